// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// passing is a frame at a hook.
type passing struct {
	hook  datapath.Hook
	frame []byte
}

// traffic generates random packets, most of them valid, of existing or new flows.
type traffic struct {
	*rand.Rand
	mac   packet.MAC
	flows []*datapath.Flow
	// direct has frontends where that is for direct server return, which some of what other nodes send is too.
	direct []datapath.Tuple
}

func (g traffic) one(n int) bool { return g.IntN(n) == 0 }

// next returns a packet, or its fragments.
func (g traffic) next() []passing {
	switch n := g.IntN(100); {
	case n < 2:
		return []passing{g.noise()}
	case n < 12 && len(g.flows) > 0:
		return g.frames(g.icmpError())
	case n < 55 && len(g.flows) > 0:
		return g.frames(g.ofFlow())
	case n < 58:
		return g.frames(g.echo())
	}
	return g.frames(g.request())
}

// request returns a packet of a client.
func (g traffic) request() (datapath.Hook, packet.Packet) {
	four := g.one(2)
	from, ports := randomSources, randomSourcePorts
	if g.direct != nil && !g.one(3) {
		from, ports = outsideSources, outsideSourcePorts
	}
	if g.one(60) {
		from = martians
	}
	t := datapath.Tuple{
		Src: netip.AddrPortFrom(pickAddr(g.Rand, from, four), pick(g.Rand, ports)),
		Dst: netip.AddrPortFrom(pickAddr(g.Rand, randomDestinations, four), pick(g.Rand, randomDestinationPorts)),
	}
	t.Protocol = pick(g.Rand, []uint8{packet.ProtoTCP, packet.ProtoUDP})
	if len(g.direct) > 0 && g.one(2) {
		if to := pick(g.Rand, g.direct); to.Dst.Addr().Is4() == four {
			t.Dst, t.Protocol = to.Dst, to.Protocol
		}
	}
	if len(g.direct) > 0 && g.one(3) { // another connection by one source port
		to := pick(g.Rand, g.direct)
		f := g.flowThat(func(f *datapath.Flow) bool {
			return isHere(f) && f.Request.Protocol == to.Protocol && f.Request.Dst.Addr().Is4() == to.Dst.Addr().Is4()
		})
		if f != nil {
			t = datapath.Tuple{Src: f.Request.Src, Dst: to.Dst, Protocol: to.Protocol}
		}
	}
	if g.direct != nil && g.one(60) {
		t.Dst = netip.AddrPortFrom(pickAddr(g.Rand, martians, t.Dst.Addr().Is4()), t.Dst.Port())
	}
	flags := pick(g.Rand, []packet.Flags{packet.SYN, packet.SYN, packet.SYN, packet.ACK, packet.RST, packet.SYN | packet.ACK, packet.FIN, packet.FIN | packet.SYN})
	return g.hook(datapath.In), g.transport(t, flags)
}

// hook sometimes returns the other hook.
func (g traffic) hook(h datapath.Hook) datapath.Hook {
	if g.one(20) {
		return 1 - h
	}
	return h
}

// ofFlow returns a packet of an existing flow, in either direction.
func (g traffic) ofFlow() (datapath.Hook, packet.Packet) {
	f := pick(g.Rand, g.flows)
	if g.direct != nil && g.one(2) {
		f = cmp.Or(g.flowThat(isDirect), f)
	}
	t, h := f.Request, datapath.In
	flags := pick(g.Rand, []packet.Flags{packet.SYN, packet.ACK, packet.ACK, packet.ACK | packet.PSH, packet.FIN | packet.ACK, packet.RST})
	replies := 2
	if f.Direct { // they do not come by
		replies = 10
	}
	if g.one(replies) {
		t = f.Reply
		flags = pick(g.Rand, []packet.Flags{packet.SYN | packet.ACK, packet.SYN | packet.ACK, packet.ACK, packet.FIN | packet.ACK, packet.RST | packet.ACK})
		if !f.Remote {
			h = datapath.Out
		}
	} else if g.direct != nil && !f.Direct && g.one(2) { // another node translated it, if it is to this one
		t = f.Reply.Reversed()
	}
	return g.hook(h), g.transport(t, flags)
}

// echo returns an echo request to any kind of address.
func (g traffic) echo() (datapath.Hook, packet.Packet) {
	four := g.one(2)
	from := randomSources
	if g.one(30) {
		from = martians
	}
	to := randomDestinations
	if g.direct != nil && g.one(2) { // a probe
		from, to = wrapperSources, wrapperTargets
		if g.one(10) {
			from = martians
		}
	}
	payload := make([]byte, g.IntN(60))
	return g.hook(datapath.In), packet.NewEcho(pickAddr(g.Rand, from, four), pickAddr(g.Rand, to, four), uint16(g.Uint32()), uint16(g.Uint32()), payload)
}

// transport returns a packet with these addresses and ports.
func (g traffic) transport(t datapath.Tuple, flags packet.Flags) packet.Packet {
	payload := make([]byte, pick(g.Rand, []int{0, 0, 0, 1, 7, 32, 33, 1300, 1321 + g.IntN(50), 1421 + g.IntN(50), 1600}))
	for i := range payload {
		payload[i] = byte(g.Uint32())
	}
	var p packet.Packet
	if t.Protocol == packet.ProtoTCP {
		p = packet.NewTCP(t.Src, t.Dst, flags, payload)
		p.TCP.Seq, p.TCP.Ack = g.sequence(), g.sequence()
		if g.one(4) {
			p.TCP.Options = make([]byte, 4*g.IntN(11))
		}
	} else {
		p = packet.NewUDP(t.Src, t.Dst, payload)
		if g.one(8) {
			p.UDP.Checksum = new(uint16(0))
		}
	}
	return p
}

// sequence returns a sequence number: any, or one of those of which each is in the window of many others.
func (g traffic) sequence() uint32 { return pick(g.Rand, []uint32{g.Uint32(), g.Uint32N(1 << 18)}) }

// icmpError returns an ICMP error about a translated packet of a flow, from its receiver or beyond.
func (g traffic) icmpError() (datapath.Hook, packet.Packet) {
	f := pick(g.Rand, g.flows)
	about, h := f.Request.Reversed(), datapath.In
	if g.one(2) {
		about = f.Reply.Reversed()
		if !f.Remote {
			h = datapath.Out
		}
	}
	q := g.transport(about, packet.ACK)
	g.dress(&q)
	if f.Direct && g.one(2) {
		return g.outerError(f)
	}
	quote := q.Build()
	most := len(quote) - len(q.Transport()) + 8 // the minimum of RFC 792
	switch g.IntN(4) {
	case 0:
	case 1:
		most = g.IntN(100)
	default:
		most = 500
	}
	quote = quote[:min(len(quote), most)]
	from := about.Dst.Addr()
	four := from.Is4()
	if g.one(2) {
		from = pickAddr(g.Rand, randomSources, four)
	}
	p := packet.NewProtocol(from, about.Src.Addr(), 0, quote)
	message := pick(g.Rand, []uint16{packet.PortUnreachable, packet.HostUnreachable, packet.FragNeeded, packet.TimeExceeded, 12 << 8, 4 << 8, 5 << 8, packet.EchoReply})
	if !four {
		message = pick(g.Rand, []uint16{packet.NoRoute6, packet.PortUnreachable6, packet.PacketTooBig6, packet.TimeExceeded6, 4 << 8, packet.EchoReply6, 135 << 8})
	}
	p.ICMP = &packet.ICMP{Type: uint8(message >> 8), Code: uint8(message), Rest: g.Uint32()}
	return g.hook(h), p
}

// isRunnable reports whether the kernel runs programs on a frame: BPF_PROG_TEST_RUN requires the
// fixed part of an IP header.
func isRunnable(frame []byte) bool {
	switch binary.BigEndian.Uint16(frame[12:]) {
	case packet.EtherIPv4:
		return len(frame) >= 14+20
	case packet.EtherIPv6:
		return len(frame) >= 14+40
	}
	return len(frame) > 14
}

// noise returns a frame that the programs do not handle.
func (g traffic) noise() passing {
	b := make([]byte, 14+g.IntN(100))
	for i := range b {
		b[i] = byte(g.Uint32())
	}
	copy(b, g.mac[:])
	binary.BigEndian.PutUint16(b[12:], pick(g.Rand, []uint16{packet.EtherARP, 0x8100, packet.EtherIPv4, packet.EtherIPv6, uint16(g.Uint32())}))
	return passing{g.hook(datapath.In), b}
}

// frames returns a packet as a frame, or as fragments, not always in order.
func (g traffic) frames(h datapath.Hook, p packet.Packet) []passing {
	p.Ethernet = &packet.Ethernet{Dst: g.mac, Src: packet.MAC{2, 0, 0, 0, 0, 1}}
	if g.one(50) {
		p.Ethernet.Dst[5]++ // another machine's address
	}
	g.dress(&p)
	parts := []packet.Packet{p}
	if size := len(p.Transport()); size > 16 && g.one(10) {
		headers := len(p.Build()) - 14 - size - len(p.Trailer)
		if p.IPv6 != nil {
			headers += 8
		}
		parts = p.Fragments(headers+8+8*g.IntN(size/8), g.Uint32N(4))
		if g.one(3) {
			g.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		}
		parts = parts[:min(len(parts), 4)]
	}
	wrap := func(frame []byte) []byte { return frame }
	if g.direct != nil && h == datapath.In && g.one(3) {
		wrap = g.wrapping(p)
	}
	var out []passing
	for _, part := range parts {
		b := part.Build()
		repairAH(b)
		if g.one(12) {
			b = g.damage(b)
		}
		out = append(out, passing{h, wrap(b)})
	}
	return out
}

// dress gives a packet random header fields, options and extension headers, and sometimes wrong
// checksums and padding.
func (g traffic) dress(p *packet.Packet) {
	ttl := pick(g.Rand, []uint8{64, 64, 64, 64, 64, 64, 255, 2, 1, 0})
	if h := p.IPv4; h != nil {
		h.TTL, h.ID, h.DontFragment = ttl, uint16(g.Uint32N(4)), g.one(2)
		if g.direct != nil {
			h.TOS = uint8(g.Uint32())
		}
		if g.one(8) {
			h.Options = make([]byte, 4*(1+g.IntN(10)))
		}
		if g.one(40) {
			h.Checksum = new(uint16(g.Uint32()))
		}
	}
	if h := p.IPv6; h != nil {
		h.HopLimit = ttl
		if g.direct != nil {
			h.TrafficClass, h.FlowLabel = uint8(g.Uint32()), g.Uint32N(1<<20)
		}
		for g.one(6) || len(h.Extensions) > 0 && len(h.Extensions) < 8 && !g.one(3) {
			kind := pick(g.Rand, []uint8{packet.ProtoHopByHop, packet.ProtoRouting, packet.ProtoDestOptions, protoAH, packet.ProtoFragment})
			data := make([]byte, 6+8*g.IntN(3))
			if kind == packet.ProtoFragment {
				data = make([]byte, 6) // an atomic fragment
			}
			h.Extensions = append(h.Extensions, packet.Extension{Type: kind, Data: data})
		}
	}
	wrong := func(sum **uint16) {
		if g.one(40) {
			*sum = new(uint16(g.Uint32()))
		}
	}
	switch {
	case p.TCP != nil:
		wrong(&p.TCP.Checksum)
	case p.UDP != nil:
		wrong(&p.UDP.Checksum)
	case p.ICMP != nil:
		wrong(&p.ICMP.Checksum)
	}
	if g.one(10) {
		p.Trailer = make([]byte, 1+g.IntN(20))
		p.Trailer[0] = 1
	}
}

const protoAH = 51

// repairAH corrects the lengths of authentication headers: they count 4-byte words, other
// extension headers 8-byte words. It stops at the first header that is no extension header.
func repairAH(frame []byte) {
	if len(frame) < 54 || binary.BigEndian.Uint16(frame[12:]) != packet.EtherIPv6 {
		return
	}
	next, at := frame[20], 54
	for at+8 <= len(frame) && slices.Contains([]uint8{packet.ProtoHopByHop, packet.ProtoRouting, packet.ProtoDestOptions, packet.ProtoFragment, protoAH}, next) {
		size := 8 * (int(frame[at+1]) + 1)
		if next == protoAH {
			frame[at+1] = uint8(size/4 - 2)
		}
		next, at = frame[at], at+size
	}
}

// damage truncates a frame, or changes some of its bytes.
func (g traffic) damage(b []byte) []byte {
	b = slices.Clone(b)
	switch g.IntN(3) {
	case 0:
		b = b[:14+g.IntN(len(b)-13)]
	case 1: // a length or an offset
		at := 14 + pick(g.Rand, []int{0, 2, 3, 4, 5, 6, 7, 32, 33, 41, 52})
		if at < len(b) {
			b[at] = byte(g.Uint32())
		}
	default:
		for range 1 + g.IntN(3) {
			b[g.IntN(len(b))] ^= 1 << g.IntN(8)
		}
	}
	return b
}
