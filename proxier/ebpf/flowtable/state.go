// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// State is how far the connection of a flow has come.
type State uint8

// States of TCP, and of UDP.
const (
	Opening     State = iota // the client has not answered the SYN-ACK
	Established              // data goes both ways
	Closing                  // one side has sent its FIN
	Closed                   // both have, or one was reset
	Unanswered               // packets of the client alone
	Answered                 // packets both ways
)

func (s State) String() string {
	switch s {
	case Opening:
		return "opening"
	case Established:
		return "established"
	case Closing:
		return "closing"
	case Closed:
		return "closed"
	case Unanswered:
		return "unanswered"
	case Answered:
		return "answered"
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// stateOf reads enum flow_flag.
func stateOf(protocol proxier.Protocol, flags uint32) State {
	switch {
	case protocol != proxier.TCP && flags&lbmap.FlowReplied != 0:
		return Answered
	case protocol != proxier.TCP:
		return Unanswered
	case flags&lbmap.FlowClosed != 0:
		return Closed
	case flags&(lbmap.FlowFINRequest|lbmap.FlowFINReply) != 0:
		return Closing
	case flags&lbmap.FlowEstablished != 0:
		return Established
	}
	return Opening
}
