// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"net/netip"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// TestNeighboursAtLoopback: a NodePort at a loopback address is served to this host only. Crafted
// packets of neighbours to that address are not forwarded.
func TestNeighboursAtLoopback(t *testing.T) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			n, _ := newNode(t, v)
			at := n.at
			web, shell := at.Pod("web"), at.Pod("shell")
			if _, err := web.ServeTCP(8080); err != nil {
				t.Fatal(err)
			}
			n.open(iptablestest.Facts, proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}})
			n.OnServiceAdd(service(0, nodePort(30080)))
			n.OnEndpointSliceAdd(endpoints(0, web.Addr4.String()))
			n.MustSync()
			capture, err := web.Capture("eth0", func(c lab.Captured) bool { return c.TCP != nil && c.TCP.Dst == 8080 })
			if err != nil {
				t.Fatal(err)
			}
			defer capture.Close()
			gateway, err := at.Netlink().LinkByName("pod2")
			if err != nil {
				t.Fatal(err)
			}
			loopback := netip.MustParseAddrPort("127.0.0.1:30080")
			for i, to := range []netip.AddrPort{loopback, netip.AddrPortFrom(at.Addr4, 30080)} {
				syn := packet.NewTCP(netip.AddrPortFrom(shell.Addr4, 40000), to, packet.SYN, nil)
				syn.TCP.Seq = uint32(1 + i) // masquerading changes the port
				syn.Ethernet = &packet.Ethernet{Dst: packet.MAC(gateway.Attrs().HardwareAddr)}
				if err := shell.SendFrame("eth0", syn.Build()); err != nil {
					t.Fatal(err)
				}
			}
			// The second packet arrives, and the host is served at the loopback address.
			if _, err := capture.Expect(t.Context(), func(c lab.Captured) bool { return true }); err != nil {
				t.Fatal(err)
			}
			if reply, err := at.Ask(t.Context(), "tcp", loopback); err != nil || reply.Server != "web" {
				t.Errorf("the host: %+v, %v", reply, err)
			}
			for _, p := range capture.Packets() {
				if p.TCP.Seq == 1 {
					t.Errorf("forwarded: %s", p)
				}
			}
		})
	}
}
