// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"context"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/sockdiag"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
)

const establishedName = settingsDir + "nf_conntrack_tcp_timeout_established"

// connected are the states in which a TCP socket still sends or receives.
const connected = 1<<sockdiag.Established | 1<<sockdiag.FinWait1 | 1<<sockdiag.FinWait2 | 1<<sockdiag.CloseWait

// TrackSockets creates entries for the TCP connections of a family that sockets of this network namespace have with other
// hosts, as far as there are none, and returns how many it created. Conntrack sees no packets before a rule needs it, and then
// knows an older connection only from its next packet on. Until then masquerading can give its source port to another
// connection with the same peer, and that one's reset ends it. It needs CAP_NET_ADMIN.
func TrackSockets(ctx context.Context, root sysctl.Root, family inet.Family) (created int, err error) {
	seconds, err := number(root, establishedName)
	if err != nil {
		return 0, err
	}
	var flows []Flow
	_, _, err = sockdiag.Dump(ctx, sockdiag.Filter{Protocol: unix.IPPROTO_TCP, States: connected}, func(s sockdiag.Socket) bool {
		if inet.FamilyOf(s.Remote.Addr()) == family && !s.Remote.Addr().IsLoopback() && s.Local.Addr() != s.Remote.Addr() {
			// Which side began it does not matter: after a pause, conntrack takes the one that sends first.
			flows = append(flows, Flow{Protocol: inet.TCP, Source: s.Local, Destination: s.Remote, Replies: s.Remote, Seen: s.Local})
		}
		return false
	})
	if err != nil {
		return 0, err
	}
	timeout := time.Duration(seconds) * time.Second
	return change(ctx, flows, unix.EEXIST, func(b []byte, f *Flow, seq uint32) []byte { return createRequest(b, f, timeout, seq) })
}
