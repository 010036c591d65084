// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"net/netip"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
	"github.com/tandem-proxy/tandem/test/netfilter"
)

// TestLoopbackNodePorts: with route_localnet, the kernel accepts packets of neighbours and pods to
// loopback addresses. NodePorts at these are served to this host only, whichever other addresses
// have NodePorts, and ports without endpoints are not revealed to others.
func TestLoopbackNodePorts(t *testing.T) {
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	for name, selected := range map[string]proxier.NodePortSelector{
		"all": {Loopback: true}, "primary": {Primary: true, Localhost: true}, "alone": {Localhost: true},
		"prefix": {CIDRs: []netip.Prefix{netip.MustParsePrefix("172.18.0.0/16"), loopback}, Loopback: true},
	} {
		t.Run(name, func(t *testing.T) {
			tools := newSimulated()
			n := unstartedNode(t, tools)
			n.Start(newSimulatedTier(n.options()), iptablestest.Facts, proxier.Policy{NodePorts: selected})
			n.OnServiceAdd(service(0, nodePort(30080)))
			n.OnEndpointSliceAdd(endpoints(0, "10.244.2.5"))
			n.OnServiceAdd(service(1, nodePort(30081)))
			n.MustSync()
			for who, tc := range map[string]struct {
				source, device string
				to             string // empty: dropped
				unserved       netfilter.Verdict
			}{
				"host":      {"127.0.0.1", "", "10.244.2.5:8080", netfilter.Reject},
				"itself":    {"172.18.0.1", "", "10.244.2.5:8080", netfilter.Reject},
				"neighbour": {"172.18.0.2", "eth0", "", netfilter.Drop},
				"outside":   {"198.51.100.7", "eth0", "", netfilter.Drop},
				"pod":       {"10.244.1.9", "veth1", "", netfilter.Drop},
			} {
				p := netfilter.Packet{
					Src: netip.MustParseAddrPort(tc.source + ":40000"), Dst: netip.MustParseAddrPort("127.0.0.1:30080"), Protocol: proxier.TCP,
					In: tc.device, Out: "eth0", Local: func(a netip.Addr) bool { return a == iptablestest.Facts.NodeIPs[proxier.IPv4] },
				}
				r := tools.Tables[proxier.IPv4].Trace(p)
				if tc.to == "" && r.Verdict != netfilter.Drop || tc.to != "" && (r.Verdict != netfilter.Accept || r.To.String() != tc.to) {
					t.Errorf("%s: %s", who, r)
				}
				p.Dst = netip.MustParseAddrPort("127.0.0.1:30081")
				if r := tools.Tables[proxier.IPv4].Trace(p); r.Verdict != tc.unserved {
					t.Errorf("%s, without endpoints: %s", who, r)
				}
			}
		})
	}
}
