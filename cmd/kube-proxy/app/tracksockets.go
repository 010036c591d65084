// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/sockdiag"
	"github.com/tandem-proxy/tandem/proxier"
)

// connected are the states in which a TCP socket can stay idle. In others, packets come soon.
const connected = 1<<sockdiag.Established | 1<<sockdiag.CloseWait

// trackSockets creates the missing conntrack entries for TCP connections of a family that sockets of this network namespace have
// with other hosts, and returns how many it created. Conntrack sees no packets before a rule needs it, and then picks up an older
// connection with its next packet. Until then masquerading can give its source port to another connection with the same peer, and
// that one's reset ends it.
func trackSockets(ctx context.Context, family proxier.Family) (created int, err error) {
	var flows []conntrack.Flow
	filter := sockdiag.Filter{Protocol: unix.IPPROTO_TCP, States: connected}
	_, _, err = sockdiag.Dump(ctx, filter, func(s sockdiag.Socket) (destroy bool) {
		if proxier.FamilyOf(s.Remote.Addr()) == family && !s.Remote.Addr().IsLoopback() && s.Local.Addr() != s.Remote.Addr() {
			// Which side is the origin does not matter: conntrack too takes the side that sends first, if it picks up a connection.
			flows = append(flows, conntrack.Flow{Protocol: inet.TCP, Source: s.Local, Destination: s.Remote, Replies: s.Remote, Seen: s.Local})
		}
		return false
	})
	if err != nil {
		return 0, err
	}
	// Entries of connections whose packets a rule excludes from conntrack (NOTRACK) stay until they time out.
	room, err := conntrack.Room(kernelSettings)
	if err != nil {
		return 0, err
	}
	if len(flows) > room {
		klog.FromContext(ctx).Info("Not all connections of this host get conntrack entries, as the table would be more than half full; an idle one breaks if a masqueraded connection gets its source port", "family", family, "connections", len(flows), "room", room)
		flows = flows[:room]
	}
	return conntrack.Kernel{}.CreateEstablished(ctx, kernelSettings, flows)
}
