// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/test/packet"
)

// with returns an IPv6 packet with extension headers.
func with(p packet.Packet, list ...packet.Extension) packet.Packet {
	p = p.Clone()
	p.IPv6.Extensions = list
	return p
}

// raw returns a frame with arbitrary bytes as its payload.
func (p *path) raw(b []byte) packet.Packet {
	f := packet.Packet{Ethernet: &packet.Ethernet{Dst: p.mac, Src: gatewayMAC, Type: packet.EtherIPv4}, Payload: b}
	if b[0]>>4 == 6 {
		f.Ethernet.Type = packet.EtherIPv6
	}
	return f
}

// headerScenes are about headers with options and extensions, and about frames that the programs
// do not handle or that are malformed.
func headerScenes(p *path, e ends) []scene {
	const SYN = packet.SYN
	send, want := tcp(e.client, e.local, SYN), tcp(e.client, e.here, SYN)
	forAnother := func(mac packet.MAC) packet.Packet {
		q := send.Clone()
		q.Ethernet = &packet.Ethernet{Dst: mac, Src: gatewayMAC}
		return q
	}
	tagged := packet.Packet{Ethernet: &packet.Ethernet{Dst: p.mac, Src: gatewayMAC, Type: 0x8100}, Payload: append([]byte{0, 5, 8, 0}, send.Build()...)}
	arp := packet.Packet{Ethernet: &packet.Ethernet{Dst: p.mac, Src: gatewayMAC, Type: packet.EtherARP}, Payload: make([]byte, 28)}
	padded, paddedWant := send.Clone(), want.Clone()
	padded.Trailer = []byte{1, 2, 3, 4, 5, 6, 7}
	paddedWant.Trailer = padded.Trailer
	wrong := send.Clone()
	wrong.TCP.Checksum = new(uint16(0xdead))
	scenes := []scene{
		{name: "for others", steps: untouched(
			forAnother(packet.MAC{2, 0, 0, 0, 0, 9}), forAnother(packet.MAC{255, 255, 255, 255, 255, 255}), forAnother(packet.MAC{0x33, 0x33, 0, 0, 0, 1}),
			tagged, arp, packet.NewProtocol(e.client.Addr(), e.local.Addr(), packet.ProtoSCTP, make([]byte, 40)),
			packet.NewProtocol(e.client.Addr(), e.local.Addr(), e.protocolOfTheOther(), make([]byte, 40)),
		), flows: []string{}},
		{name: "padded", steps: []step{{in, padded, next, paddedWant, "FORWARD_LOCAL", nil}}},
		{name: "absurd", steps: untouchedFor("PASS_HEADERS", p.absurd(e)...), flows: []string{}},
		{name: "from addresses that no host has", steps: fromMartians(e), flows: []string{}},
	}
	if e.client.Addr().Is4() {
		options := func(q packet.Packet) packet.Packet {
			q = q.Clone()
			q.IPv4.Options = []byte{0x94, 4, 0, 0, 1, 1, 1, 1}
			return q
		}
		return append(scenes,
			scene{name: "options", steps: []step{
				{in, options(send), next, options(want), "FORWARD_LOCAL", nil},
				{in, options(udp(e.client, e.remote)), redirect, forwarded(options(udp(e.nat, e.there))), "FORWARD_REMOTE", nil},
				{in, options(udp(e.there, e.nat)), redirect, forwarded(options(udp(e.remote, e.client))), "FORWARD_REPLY", nil},
				{in, options(udp(e.client, e.empty)), redirect, p.portUnreachable(e.empty, options(udp(e.client, e.empty))), "REJECT", nil},
			}})
	}
	hop := packet.Extension{Type: packet.ProtoHopByHop, Data: make([]byte, 6)}
	routing := packet.Extension{Type: packet.ProtoRouting, Data: make([]byte, 14)}
	options := packet.Extension{Type: packet.ProtoDestOptions, Data: make([]byte, 22)}
	atomic := packet.Fragment{ID: 5}.Extension()
	six := slices.Repeat([]packet.Extension{options}, 6)
	mapped := packet.NewTCP(e.client, e.local, SYN, nil)
	mapped.IPv6.Dst = netip.MustParseAddr("::ffff:10.96.0.1")
	fragmentish := send.Build()
	fragmentish[6] = packet.ProtoFragment
	// The ICV has 12 bytes. The length field counts 4-byte words, without the first two.
	authentication := slices.Concat([]byte{packet.ProtoTCP, 4 - 2}, make([]byte, 14))
	authenticated := func(q packet.Packet) packet.Packet {
		return packet.NewProtocol(q.IPv6.Src, q.IPv6.Dst, protoAH, slices.Concat(authentication, q.Transport()))
	}
	return append(scenes,
		scene{name: "extension headers", steps: []step{
			{in, with(send, hop), next, with(want, hop), "FORWARD_LOCAL", nil},
			{in, with(send, hop, options, routing, options), next, with(want, hop, options, routing, options), "FORWARD_LOCAL", nil},
			{in, with(send, atomic), next, with(want, atomic), "FORWARD_LOCAL", nil},
			{in, with(send, six...), next, with(want, six...), "FORWARD_LOCAL", nil},
			{in, authenticated(send), next, authenticated(want), "FORWARD_LOCAL", nil},
			{in, with(udp(e.client, e.remote), options), redirect, forwarded(with(udp(e.nat, e.there), options)), "FORWARD_REMOTE", nil},
			{in, with(udp(e.client, e.empty), hop), redirect, p.portUnreachable(e.empty, with(udp(e.client, e.empty), hop)), "REJECT", nil},
		}},
		scene{name: "more extension headers than are walked, and an address of the other family", steps: untouchedFor("PASS_HEADERS",
			with(send, append(six, hop)...), mapped,
		), flows: []string{}},
		scene{name: "what looks like a fragment", steps: untouchedFor("PASS_FRAGMENT", p.raw(fragmentish)), flows: []string{}},
		scene{name: "another extension header", steps: untouched(with(send, packet.Extension{Type: 135, Data: make([]byte, 6)})), flows: []string{}})
}

// protocolOfTheOther returns the ICMP protocol of the other family, which is unknown in this one.
func (e ends) protocolOfTheOther() uint8 {
	if e.client.Addr().Is4() {
		return packet.ProtoICMPv6
	}
	return packet.ProtoICMP
}

// absurd returns malformed packets to a Service. Frames that end within the IP header are not
// among them: the kernel does not run programs on those.
func (p *path) absurd(e ends) (list []packet.Packet) {
	tcp, udp := tcp(e.client, e.local, packet.SYN).Build(), udp(e.client, e.local).Build()
	broken := func(b []byte, change func(b []byte)) {
		b = slices.Clone(b)
		change(b)
		list = append(list, p.raw(b))
	}
	put := func(at int, value ...byte) func([]byte) { return func(b []byte) { copy(b[at:], value) } }
	l4, length := 20, 2 // offsets of the transport header and of the length
	if e.client.Addr().Is6() {
		l4, length = 40, 4
	}
	size := func(n int) func([]byte) {
		if length == 4 {
			n -= 40
		}
		return func(b []byte) { binary.BigEndian.PutUint16(b[length:], uint16(n)) }
	}
	broken(tcp, put(0, 0x15|tcp[0]&0xf))    // version
	broken(tcp, size(len(tcp)+1))           // longer than the frame
	broken(tcp, size(len(tcp)-1))           // shorter than its headers
	broken(tcp, size(l4))                   // no transport
	broken(udp, size(l4+7))                 // less than a header
	broken(tcp, put(l4+12, 0x40))           // TCP header of 16 bytes
	broken(tcp, put(l4+12, 0x60))           // TCP header longer than the packet
	list = append(list, p.raw(tcp[:l4+19])) // truncated TCP header
	list = append(list, p.raw(udp[:l4+4]))  // truncated UDP header
	if length == 2 {
		broken(tcp, put(0, 0x44)) // IP header of 16 bytes
		broken(tcp, put(0, 0x4f)) // IP header of 60 bytes
		broken(tcp, size(19))     // less than an IP header
		return list
	}
	// An extension header longer than the packet.
	broken(tcp, func(b []byte) { b[6], b[40] = packet.ProtoHopByHop, packet.ProtoTCP })
	broken(tcp, size(40)) // a jumbogram, or nothing
	return list
}

// fromMartians are packets whose source addresses must not get replies.
func fromMartians(e ends) (steps []step) {
	for _, text := range martians {
		a := netip.MustParseAddr(text)
		if a.Is4() != e.client.Addr().Is4() {
			continue
		}
		from := netip.AddrPortFrom(a, 1000)
		steps = append(steps, untouchedFor("PASS_MARTIAN", tcp(from, e.local, packet.SYN), udp(from, e.remote), udp(from, e.empty), tcp(from, e.unserved, packet.SYN))...)
		steps = append(steps, untouched(tcp(from, e.here, packet.SYN), packet.NewEcho(a, e.balancer.Addr(), 1, 1, nil), packet.NewEcho(a, e.unserved.Addr(), 1, 1, nil))...)
	}
	return steps
}
