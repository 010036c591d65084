// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/proxier"
)

// The cluster of testdata/upstream.saved; its Services are in package integration. The
// node is the first one; pods are local if their third octet is 1.
var (
	nodeAddr = netip.MustParseAddr("172.18.0.1")
	lbAddr   = netip.MustParseAddr("203.0.113.10")
	localPod = netip.MustParseAddr("10.244.1.1") // endpoint of all Services that have any
	otherPod = netip.MustParseAddr("10.244.2.1") // likewise, on another node
	farPod   = netip.MustParseAddr("10.244.2.2") // likewise
	shell    = netip.MustParseAddr("10.244.1.9") // a pod of this node that is no endpoint
	outside  = netip.MustParseAddr("198.51.100.7")
)

func clusterIP(n int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 0, byte(n)}), 80)
}

func nodePort(n int) netip.AddrPort { return netip.AddrPortFrom(nodeAddr, uint16(30000+n)) }

func upstreamTables(t *testing.T) *Tables {
	saved := read(t, "upstream.saved")
	tables := restored(t, proxier.IPv4, saved)
	if diff := cmp.Diff(saved, saveAll(tables)); diff != "" {
		t.Errorf("saved (-want +got):\n%s", diff)
	}
	return tables
}

func isNode(a netip.Addr) bool { return a == nodeAddr }

// from returns a packet from one of the addresses above.
func from(src netip.Addr, to netip.AddrPort) Packet {
	p := Packet{Src: netip.AddrPortFrom(src, 40000), Dst: to, Protocol: proxier.TCP, Local: isNode, Out: "eth0"}
	switch src {
	case outside, otherPod:
		p.In = "eth0"
	case nodeAddr:
	default:
		p.In = "veth1"
	}
	return p
}

// TestUpstream: upstream's rules handle all kinds of packets correctly.
func TestUpstream(t *testing.T) {
	tables := upstreamTables(t)
	stranger := netip.MustParseAddr("192.0.2.7") // in no source range
	lb := netip.AddrPortFrom(lbAddr, 80)
	all := []netip.Addr{localPod, otherPod, farPod}
	for _, test := range []struct {
		name   string
		packet Packet
		// verdict, and where it goes if that is accept
		verdict    Verdict
		kind       string
		to         []netip.Addr // with equal probabilities, port 8080; not translated if empty
		masquerade bool         // a hairpin is always masqueraded
	}{
		{name: "ClusterIP from a pod", packet: from(shell, clusterIP(1)), to: all},
		{name: "ClusterIP from an endpoint", packet: from(localPod, clusterIP(1)), to: all},
		{name: "ClusterIP from the host", packet: from(nodeAddr, clusterIP(1)), to: all, masquerade: true},
		{name: "ClusterIP from outside", packet: from(outside, clusterIP(1)), to: all, masquerade: true},
		{name: "ClusterIP, another port", packet: from(shell, netip.AddrPortFrom(clusterIP(1).Addr(), 81))},
		{name: "NodePort Local from outside", packet: from(outside, nodePort(2)), to: []netip.Addr{localPod}},
		{name: "NodePort Local from a pod", packet: from(shell, nodePort(2)), to: all},
		{name: "NodePort Local from the host", packet: from(nodeAddr, nodePort(2)), to: all, masquerade: true},
		{name: "NodePort Local without a local endpoint, from outside", packet: from(outside, nodePort(6)), verdict: Drop},
		{name: "NodePort Local without a local endpoint, from a pod", packet: from(shell, nodePort(6)), to: []netip.Addr{otherPod}},
		{name: "NodePort Local without a local endpoint, from the host", packet: from(nodeAddr, nodePort(6)), to: []netip.Addr{otherPod}, masquerade: true},
		{name: "NodePort that is none", packet: from(outside, nodePort(1))},
		{name: "load balancer from its range", packet: from(outside, lb), to: []netip.Addr{localPod}, masquerade: true},
		{name: "load balancer from elsewhere", packet: from(stranger, lb), verdict: Drop},
		{name: "NodePort of the load balancer from elsewhere", packet: from(stranger, nodePort(3)), to: []netip.Addr{localPod}, masquerade: true},
		{name: "ClusterIP without endpoints from a pod", packet: from(shell, clusterIP(4)), verdict: Reject, kind: "icmp-port-unreachable"},
		{name: "ClusterIP without endpoints from the host", packet: from(nodeAddr, clusterIP(4)), verdict: Reject, kind: "icmp-port-unreachable"},
		{name: "NodePort without endpoints from outside", packet: from(outside, nodePort(4)), verdict: Reject, kind: "icmp-port-unreachable"},
		{name: "NodePort without endpoints from the host", packet: from(nodeAddr, nodePort(4)), verdict: Reject, kind: "icmp-port-unreachable"},
	} {
		t.Run(test.name, func(t *testing.T) {
			want := map[netip.AddrPort]float64{}
			for _, a := range test.to {
				want[netip.AddrPortFrom(a, 8080)] = 1 / float64(len(test.to))
			}
			if test.verdict == Accept && len(want) == 0 {
				want[test.packet.Dst] = 1
			}
			if diff := cmp.Diff(want, tables.Targets(test.packet), nearly); diff != "" {
				t.Errorf("targets (-want +got):\n%s", diff)
			}
			for _, b := range tables.Branches(test.packet) {
				masquerade := test.masquerade || b.Verdict == Accept && b.To.Addr() == test.packet.Src.Addr()
				if b.Verdict != test.verdict || b.Kind != test.kind || b.Masqueraded != masquerade {
					t.Errorf("with probability %.3f: %s", b.Probability, b.Result)
				}
			}
		})
	}
}

// nearly is for probabilities, of which the kernel knows 31 bits.
var nearly = cmp.Comparer(func(a, b float64) bool { return a-b < 1e-8 && b-a < 1e-8 })

// TestUpstreamAffinity: a client keeps its endpoint until the affinity times out. Then it is
// treated as a new client.
func TestUpstreamAffinity(t *testing.T) {
	tables := upstreamTables(t)
	now := time.Unix(1e9, 0)
	tables.Now = func() time.Time { return now }
	packet := from(shell, clusterIP(5))
	even := map[netip.AddrPort]float64{netip.AddrPortFrom(localPod, 8080): 0.5, netip.AddrPortFrom(otherPod, 8080): 0.5}
	want := func(when string, p Packet, want map[netip.AddrPort]float64) {
		t.Helper()
		if diff := cmp.Diff(want, tables.Targets(p), nearly); diff != "" {
			t.Errorf("targets %s (-want +got):\n%s", when, diff)
		}
	}
	want("at first", packet, even)
	tables.Random = func() float64 { return 0.9 }
	first := tables.Trace(packet).To
	tables.Random = func() float64 { return 0 }
	only := map[netip.AddrPort]float64{first: 1}
	for range 3 {
		now = now.Add(3 * time.Hour)
		want("within the timeout", packet, only)
		if to := tables.Trace(packet).To; to != first {
			t.Errorf("led to %s after %s", to, first)
		}
	}
	want("of another client", from(outside, clusterIP(5)), even)
	now = now.Add(3*time.Hour + time.Second)
	want("after the timeout", packet, even)
	if to := tables.Trace(packet).To; to == first {
		t.Errorf("led to %s, which was not chosen randomly", to)
	}
}
