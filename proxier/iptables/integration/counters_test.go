// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// The counters have upstream's names.
const (
	invalidCounter  = "ct_state_invalid_dropped_pkts"
	loopbackCounter = "localhost_nps_accepted_pkts"
)

// canCount returns why rules of this kernel cannot use counters, or nil.
func canCount(t *testing.T, tools *labTools) error {
	if err := tools.Ensure(invalidCounter); err != nil {
		return err
	}
	return tools.Restore(t.Context(), proxier.IPv4, xtables.Probe("-m nfacct --nfacct-name  "+invalidCounter, "filter"))
}

// TestPacketCounters: rules count real packets: those that conntrack finds invalid and that are
// dropped, in both families, and connections to NodePorts at loopback addresses; and no others. The
// next process continues to count, and --cleanup deletes the counters unless foreign rules reference
// them.
func TestPacketCounters(t *testing.T) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			n, tools := newNode(t, v)
			at := n.at
			web, shell := at.Pod("web"), at.Pod("shell")
			if _, err := web.ServeTCP(8080); err != nil {
				t.Fatal(err)
			}
			policy := proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}}
			if err := canCount(t, tools); err != nil {
				lab.SkipOrFailModule(t, err)
			}
			tier := n.open(iptablestest.Facts, policy)
			n.OnServiceAdd(service(0, nodePort(30080)))
			n.OnEndpointSliceAdd(endpoints(0, web.Addr4.String()))
			n.OnServiceAdd(service(1, nodePort(30081), externalLocal))
			n.OnEndpointSliceAdd(endpoints(1, web.Addr4.String()))
			n.MustSync()

			var want iptables.Counted
			check := func(when string) {
				t.Helper()
				deadline := time.Now().Add(5 * time.Second)
				for { // packets may still be queued
					got, ok, err := tier.Counted()
					if err != nil || !ok {
						t.Fatalf("%s: counters available: %v, error %v", when, ok, err)
					}
					if got == want {
						return
					}
					if time.Now().After(deadline) {
						t.Fatalf("%s: %+v, want %+v", when, got, want)
					}
				}
			}
			check("nothing yet")

			ask := func(from *lab.Sandbox, to string) {
				t.Helper()
				if reply, err := from.Ask(t.Context(), "tcp", netip.MustParseAddrPort(to)); err != nil || reply.Server != "web" {
					t.Fatalf("%s: %+v, %v", to, reply, err)
				}
			}
			for _, to := range []string{"127.0.0.1:30080", "127.1.2.3:30080", "127.0.0.1:30081"} {
				ask(at.Sandbox, to)
				want.LoopbackNodePorts++
			}
			check("NodePorts at loopback addresses")
			for _, to := range []string{"172.18.0.1:30080", "10.96.0.1:80"} {
				ask(at.Sandbox, to)
				ask(shell.Sandbox, to)
			}

			gateway, err := at.Netlink().LinkByName("pod2")
			if err != nil {
				t.Fatal(err)
			}
			// reset sends a reset of an unknown connection.
			reset := func(src, dst netip.Addr) {
				t.Helper()
				p := packet.NewTCP(netip.AddrPortFrom(src, 40000), netip.AddrPortFrom(dst, 8080), packet.RST, nil)
				p.Ethernet = &packet.Ethernet{Dst: packet.MAC(gateway.Attrs().HardwareAddr)}
				if err := shell.SendFrame("eth0", p.Build()); err != nil {
					t.Fatal(err)
				}
				want.InvalidDropped++
			}
			reset(shell.Addr4, web.Addr4)
			reset(shell.Addr6, web.Addr6)
			reset(shell.Addr6, web.Addr6)
			check("invalid packets, and other connections")

			tier = n.open(iptablestest.Facts, policy)
			n.OnServiceAdd(service(0, nodePort(30080)))
			n.OnEndpointSliceAdd(endpoints(0, web.Addr4.String()))
			n.MustSync()
			ask(at.Sandbox, "127.0.0.1:30080")
			want.LoopbackNodePorts++
			check("the next process")

			remove := func() {
				t.Helper()
				if err := at.Do(func() error { return iptables.RemoveCounters(t.Context(), nfacct.Kernel{}) }); err != nil {
					t.Fatal(err)
				}
			}
			remove()
			check("removed while rules name them")
			const foreign = "*filter\n-A FORWARD -m nfacct --nfacct-name " + loopbackCounter + "\nCOMMIT\n"
			n.Restore(proxier.IPv6, foreign)
			if err := n.Tier.Cleanup(t.Context()); err != nil {
				t.Fatal(err)
			}
			check("without rules of the proxy")
			remove()
			if _, err := tools.Packets(invalidCounter); !errors.Is(err, nfacct.ErrNotFound) {
				t.Errorf("a deleted counter: %v", err)
			}
			if _, err := tools.Packets(loopbackCounter); err != nil {
				t.Errorf("a counter that a foreign rule references was deleted: %v", err)
			}
			n.Restore(proxier.IPv6, strings.Replace(foreign, "-A", "-D", 1))
			remove()
			if _, err := tools.Packets(loopbackCounter); !errors.Is(err, nfacct.ErrNotFound) {
				t.Errorf("after the last rule that references it was deleted: %v", err)
			}
		})
	}
}
