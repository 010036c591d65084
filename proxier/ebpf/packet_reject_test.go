// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"net/netip"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/packet"
)

// icmp returns the ICMP error that this node sends about a packet.
func (p *path) icmp(from netip.AddrPort, message uint16, rest uint32, about packet.Packet) packet.Packet {
	// Errors quote 8 bytes after the IP header, or the fixed part of a TCP header.
	keep := 8
	if about.TCP != nil {
		keep = 20
	}
	quote := about.Build()
	quote = quote[:len(quote)-len(about.Transport())+keep]
	q := packet.NewError(from.Addr(), message, rest, about)
	cut := packet.ParseIP(quote)
	q.ICMP.Quoted, q.Payload = &cut, nil
	return p.back(q)
}

func (p *path) portUnreachable(from netip.AddrPort, about packet.Packet) packet.Packet {
	if from.Addr().Is4() {
		return p.icmp(from, packet.PortUnreachable, 0, about)
	}
	return p.icmp(from, packet.PortUnreachable6, 0, about)
}

// resetOf returns a TCP reset with these sequence numbers.
func (p *path) resetOf(src, dst netip.AddrPort, flags packet.Flags, seq, ack uint32) packet.Packet {
	q := tcp(src, dst, flags)
	q.TCP.Seq, q.TCP.Ack, q.TCP.Window = seq, ack, 0
	return p.back(q)
}

// rejectScenes are about rejected packets.
func rejectScenes(p *path, e ends) []scene {
	const SYN, ACK, FIN, RST, PSH = packet.SYN, packet.ACK, packet.FIN, packet.RST, packet.PSH
	// segment has sequence number 1000 and acknowledges 5000.
	segment := func(to netip.AddrPort, flags packet.Flags, payload string) packet.Packet {
		q := packet.NewTCP(e.client, to, flags, []byte(payload))
		q.TCP.Seq, q.TCP.Ack = 1000, 5000
		return q
	}
	options := func(q packet.Packet) packet.Packet {
		q.TCP.Options = []byte{2, 4, 5, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7}
		return q
	}
	carrying := func(q packet.Packet, payload string) packet.Packet {
		q.Payload = []byte(payload)
		return q
	}
	long := packet.NewUDP(e.client, e.empty, bytes.Repeat([]byte("x"), 1200))
	noSum := udp(e.client, e.empty)
	noSum.UDP.Checksum = new(uint16(0))
	padded := segment(e.empty, SYN, "")
	padded.Trailer = make([]byte, 6)
	return []scene{
		{
			name: "TCP: a reset",
			steps: []step{
				{in, segment(e.empty, SYN, ""), redirect, p.resetOf(e.empty, e.client, RST|ACK, 0, 1001), "REJECT", nil},
				{in, options(segment(e.empty, SYN, "")), redirect, p.resetOf(e.empty, e.client, RST|ACK, 0, 1001), "REJECT", nil},
				{in, segment(e.empty, ACK, ""), redirect, p.resetOf(e.empty, e.client, RST, 5000, 0), "REJECT", nil},
				{in, segment(e.empty, SYN|FIN, ""), redirect, p.resetOf(e.empty, e.client, RST|ACK, 0, 1002), "REJECT", nil},
				{in, segment(e.empty, ACK|PSH, "hello"), redirect, carrying(p.resetOf(e.empty, e.client, RST, 5000, 0), "hello"), "REJECT", nil},
				{in, segment(e.empty, SYN, "hello"), redirect, carrying(p.resetOf(e.empty, e.client, RST|ACK, 0, 1006), "hello"), "REJECT", nil},
				{in, segment(e.empty, 0, "odd"), redirect, carrying(p.resetOf(e.empty, e.client, RST|ACK, 0, 1003), "odd"), "REJECT", nil},
			},
			flows: []string{},
			stats: map[string]lbmap.ServiceStats{"empty": {Rejected: 7}},
		},
		{
			name: "TCP: a reset is not answered",
			steps: []step{
				{in, segment(e.unserved, RST, ""), shot, same, "REJECT", nil},
				{in, segment(e.empty, RST, ""), next, same, "PASS_RST", nil},
			},
		},
		{
			name: "UDP: port unreachable",
			steps: []step{
				{in, udp(e.client, e.empty), redirect, p.portUnreachable(e.empty, udp(e.client, e.empty)), "REJECT", nil},
				{in, long, redirect, p.portUnreachable(e.empty, long), "REJECT", nil},
				{in, noSum, redirect, p.portUnreachable(e.empty, noSum), "REJECT", nil},
				{in, packet.NewUDP(e.client, e.empty, nil), redirect, p.portUnreachable(e.empty, packet.NewUDP(e.client, e.empty, nil)), "REJECT", nil},
			},
			flows: []string{},
			stats: map[string]lbmap.ServiceStats{"empty": {Rejected: 4}},
		},
		{
			name: "an unallocated address in a ServiceCIDR",
			steps: []step{
				{in, segment(e.unserved, SYN, ""), redirect, p.resetOf(e.unserved, e.client, RST|ACK, 0, 1001), "REJECT", nil},
				{in, udp(e.client, e.unserved), redirect, p.portUnreachable(e.unserved, udp(e.client, e.unserved)), "REJECT", nil},
				{out, udp(e.client, e.unserved), next, same, "", nil},
				{in, udp(e.client, e.inner), next, same, "", nil},
				{in, packet.NewEcho(e.client.Addr(), e.inner.Addr(), 1, 1, nil), next, same, "", nil},
			},
			stats: map[string]lbmap.ServiceStats{},
		},
		{
			name: "an unused port at a ClusterIP, and at a load balancer IP",
			steps: []step{
				{in, udp(e.client, netip.AddrPortFrom(e.local.Addr(), 81)), redirect,
					p.portUnreachable(e.local, udp(e.client, netip.AddrPortFrom(e.local.Addr(), 81))), "REJECT", nil},
				{in, udp(e.client, netip.AddrPortFrom(e.balancer.Addr(), 81)), next, same, "", nil},
			},
			stats: map[string]lbmap.ServiceStats{},
		},
		{
			name: "a Local policy without a local endpoint",
			steps: []step{
				{in, segment(e.quiet, SYN, ""), shot, same, "DROP_POLICY", nil},
				{in, udp(e.client, e.quiet), shot, same, "DROP_POLICY", nil},
				{in, tcp(e.client, e.quietPort, SYN), shot, same, "DROP_POLICY", nil},
			},
			flows: []string{},
			stats: map[string]lbmap.ServiceStats{"quiet": {Dropped: 3}},
		},
		{
			name: "a pod of another node as well, but this host takes a short cut",
			steps: []step{
				{in, tcp(e.podOfNode2, e.quietPort, SYN), shot, same, "DROP_POLICY", nil},
				{in, udp(e.elsewhere, e.quietPort), redirect, forwarded(udp(e.nat, e.there)), "FORWARD_REMOTE", nil},
			},
			stats: map[string]lbmap.ServiceStats{"quiet": {Connections: 1, Dropped: 1}},
		},
		{
			name: "source ranges",
			steps: []step{
				{in, tcp(e.client, e.balancer, SYN), next, tcp(e.client, e.here, SYN), "FORWARD_LOCAL", nil},
				{in, tcp(e.stranger, e.balancer, SYN), shot, same, "DROP_SOURCE_RANGE", nil},
				{in, udp(e.stranger, e.balancer), shot, same, "DROP_SOURCE_RANGE", nil},
				// Source ranges apply to load balancer IPs only.
				{in, tcp(e.stranger, e.local, SYN), next, tcp(e.stranger, e.here, SYN), "FORWARD_LOCAL", nil},
			},
			stats: map[string]lbmap.ServiceStats{"local": {Connections: 2, Dropped: 2}},
		},
		{
			name: "a frame that is padded",
			steps: []step{
				{in, padded, redirect, carryingTrailer(p.resetOf(e.empty, e.client, RST|ACK, 0, 1001), padded.Trailer), "REJECT", nil},
			},
		},
	}
}

func carryingTrailer(q packet.Packet, trailer []byte) packet.Packet {
	q.Trailer = trailer
	return q
}

// TestPacketErrorBudget: the number of ICMP errors per second is limited.
func TestPacketErrorBudget(t *testing.T) {
	p := newPath(t, Options{})
	p.endsCluster(t)
	e := endsOf(0)
	frame := udp(e.client, e.empty)
	frame.Ethernet = &packet.Ethernet{Dst: p.mac, Src: gatewayMAC}
	verdicts := map[int32]int{}
	const packets, perSecond = 20000, 1000
	seconds := flowtable.MonotonicSeconds()
	if err := p.at.Do(func() error {
		for range packets {
			got, err := p.run(in, frame.Build())
			if err != nil {
				return err
			}
			verdicts[got.Verdict]++
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	// Each CPU has its own budget.
	seconds = flowtable.MonotonicSeconds() - seconds + 1
	most := perSecond * int(seconds) * ciliumebpf.MustPossibleCPU()
	if answered := verdicts[redirect]; answered < perSecond || answered > most || answered+verdicts[shot] != packets {
		t.Errorf("verdicts %v in %d seconds, want at most %d errors sent", verdicts, seconds, most)
	}
}
