// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-proxy/tandem/test/packet"
)

// State is the state of a connection.
type State uint8

// The states, several of which can be set.
const (
	Replied State = 1 << iota
	FinRequest
	FinReply
	Closed      // both FINs, or a reset
	Established // both sides have sent packets
)

func (s State) String() string {
	var words []string
	for i, word := range []string{"replied", "fin-request", "fin-reply", "closed", "established"} {
		if s&(1<<i) != 0 {
			words = append(words, word)
		}
	}
	return strings.Join(words, ",")
}

// Flow is a connection whose packets are translated.
type Flow struct {
	// Request is the tuple of the client's packets as they arrive, Reply that of the backend's.
	Request, Reply Tuple
	// Remote says that packets are forwarded past the stack, and Direct that those of the client
	// are sent to the backend's node for direct server return.
	Remote, Direct bool
	// Remapped is a connection to no Service that got another source port, at a hook.
	Remapped bool
	State    State
	// Kept flows are not evicted.
	Kept bool
	// Packets and Bytes count requests and replies.
	Packets, Bytes [2]uint64

	backend backend
	wrapped Dispatch // in which the first packet came
	at      Hook     // of Remapped
	over    bool
	acked   [2]uint32     // newest acknowledgement number of client and backend; 0 for none
	reset   [2]bool       // by client or backend
	seen    uint32        // second of the last packet
	paused  time.Duration // since then, by Pause
	silent  time.Duration // before the last packet
}

func (f *Flow) String() string {
	words := []string{"local", "young"}
	if f.Remote {
		words[0] = "remote"
	}
	if f.Direct {
		words[0] = "direct"
	}
	if f.Remapped {
		words[0] = "remapped"
	}
	if f.Kept {
		words[1] = "kept"
	}
	if f.State != 0 {
		words = append(words, f.State.String())
	}
	return fmt.Sprintf("%d %s > %s, %s > %s %s packets %d/%d bytes %d/%d", f.Request.Protocol, f.Request.Src, f.Request.Dst,
		f.Reply.Src, f.Reply.Dst, strings.Join(words, " "), f.Packets[0], f.Packets[1], f.Bytes[0], f.Bytes[1])
}

// Flows returns the existing flows.
func (m *Model) Flows() (list []*Flow) {
	for _, f := range m.flows {
		if !f.over {
			list = append(list, f)
		}
	}
	m.flows = list
	return slices.Clone(list)
}

// find returns the flow of a packet.
func (m *Model) find(t Tuple) (f *Flow, reply bool) {
	for _, f := range m.Flows() {
		switch {
		case t == f.Request:
			return f, false
		case t == f.Reply && !f.Direct:
			return f, true
		}
	}
	return nil, false
}

// ring holds flows that evict each other.
type ring struct {
	places []*Flow
	turn   int
}

// ringAttempts is how many flows stay at most when one is added.
const ringAttempts = 16

// stays reports whether a flow is worth more than one that never got established, although it is not
// kept: of direct server return, if its client sent more than one packet, and did not close it.
func stays(f *Flow) bool {
	return f.Direct && !f.over && !f.Kept && f.State&(Established|Closed|FinRequest) == Established
}

// add stores a flow in the next slot, and evicts the older flow there unless that is kept. One that
// stays goes to the slot after it. It reports whether the evicted flow was still active.
func (r *ring) add(f *Flow, stays func(*Flow) bool) (evicted bool) {
	var old *Flow
	for range ringAttempts {
		at := r.turn % len(r.places)
		r.turn++
		old, r.places[at] = r.places[at], f
		if old == nil || stays == nil || !stays(old) {
			break
		}
		f = old
	}
	if old == nil || old.Kept {
		return false
	}
	evicted = !old.over && old.State&Closed == 0
	old.over = true
	return evicted
}

// Kept counts the flows of a protocol that are not evicted.
func (m *Model) Kept(protocol uint8) (n int) {
	for _, f := range m.Flows() {
		if f.Kept && f.Request.Protocol == protocol {
			n++
		}
	}
	return n
}

// isOver reports whether a request ends its current flow: the client opens a new connection,
// or the backend does not serve any more.
func (m *Model) isOver(f *Flow, h *header) bool {
	if f.Direct && h.wrapper != nil { // the client came to another node meanwhile, which selected another backend
		return true
	}
	if f.Request.Protocol == packet.ProtoTCP {
		switch {
		case h.flags()&(packet.SYN|packet.ACK) != packet.SYN:
			return false
		case m.draining && !f.Remapped || f.State&Closed != 0:
			return true
		case f.Direct:
			return !m.takesDirect(f)
		case f.State&Established != 0:
			return false
		}
	}
	return !f.Remapped && !m.serves(f.backend)
}

// account updates a flow for a packet.
func (m *Model) account(f *Flow, reply bool, h *header) {
	way := 0
	if reply {
		way = 1
	}
	f.Packets[way]++
	f.Bytes[way] += uint64(len(h.frame) - h.l3)
	now := m.node.Seen(f.Request)
	f.seen, f.silent, f.paused = now, f.idle(now), 0

	before := f.State
	flags := h.flags()
	if reply {
		f.State |= Replied
	}
	if flags&packet.FIN != 0 && flags&packet.RST == 0 {
		f.State |= []State{FinRequest, FinReply}[way]
	}
	if h.protocol == packet.ProtoTCP && h.place != laterFragment {
		f.noteSegment(way, h)
	}
	if f.State&(FinRequest|FinReply) == FinRequest|FinReply {
		f.State |= Closed
	}
	if before&Replied != 0 {
		answers := !reply && flags&(packet.SYN|packet.ACK|packet.RST) == packet.ACK
		if h.protocol == packet.ProtoUDP || answers {
			f.State |= Established
		}
	}
	if f.Direct {
		m.accountDirect(f, before, h)
	}
	switch fresh := f.State &^ before; {
	case fresh&Closed != 0 || f.Direct && fresh&FinRequest != 0:
		if f.Kept {
			f.Kept = false
			m.over.add(f, nil)
		}
	case f.State&Closed == 0 && (fresh&Established != 0 || before&Closed != 0 && f.State&Established != 0):
		f.Kept = !f.Direct || f.Kept || m.Kept(h.protocol) < m.node.limit(h.protocol)/2
	}
}

// accountDirect updates the state of a flow whose replies do not come by: a client that sends more
// than a first packet seems to get them.
func (m *Model) accountDirect(f *Flow, before State, h *header) {
	switch {
	case h.protocol == packet.ProtoUDP && f.Packets[0] > 1:
		f.State |= Replied | Established
	case h.protocol == packet.ProtoTCP && h.flags()&packet.SYN == 0 && before&Closed == 0:
		f.State |= Established
	}
}

// noteSegment closes a flow by a reset that its receiver may accept, and opens it again if the end that
// seemed to have sent the reset goes on.
func (f *Flow) noteSegment(way int, h *header) {
	const window = 1 << 17
	const fins = FinRequest | FinReply
	switch flags := h.flags(); {
	case flags&packet.RST != 0:
		f.reset[way] = true
		expected := f.acked[1-way]
		if f.State&Established == 0 || expected == 0 || be.Uint32(h.frame[h.l4+4:])-expected < window {
			f.State |= Closed
		}
	case flags&packet.ACK != 0:
		f.acked[way] = be.Uint32(h.frame[h.l4+8:])
		if f.reset[way] && flags&packet.SYN == 0 {
			f.reset[way] = false
			if !f.reset[1-way] && f.State&fins != fins {
				f.State &^= Closed
			}
		}
	}
}

// Expire ends flows that are idle in a second. limit returns the idle timeout of flows in a state.
func (m *Model) Expire(now uint32, limit func(protocol uint8, s State) time.Duration) {
	for _, f := range m.Flows() {
		if f.idle(now) > limit(f.Request.Protocol, f.State) {
			f.over = true
		}
	}
}

// Pause makes all flows idle for so much longer.
func (m *Model) Pause(d time.Duration) {
	for _, f := range m.Flows() {
		f.paused += d
	}
}

// idle returns for how long a flow had no packets.
func (f *Flow) idle(now uint32) time.Duration {
	return f.paused + time.Duration(now-f.seen)*time.Second
}
