// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/packet"
)

const answerTTL = 64

// Number of bytes after the IP header that errors must quote: 8, or the fixed part of
// a TCP header.
const (
	quoted    = 8
	quotedTCP = 20
)

// reject answers a client with a reset or an ICMP error.
func (m *Model) reject(h *header) outcome { return m.rejectFor("REJECT", h) }

func (m *Model) rejectFor(reason string, h *header) outcome {
	if h.protocol == packet.ProtoTCP {
		return m.reset(h, reason)
	}
	if h.v6 {
		return m.sendError(h, reason, packet.PortUnreachable6, 0)
	}
	return m.sendError(h, reason, packet.PortUnreachable, 0)
}

// answerEcho replies to echo requests for load balancer and external IPs that no device has.
func (m *Model) answerEcho(h *header) outcome {
	_, f := m.frontendWith(func(_ *proxier.Decision, f *proxier.Frontend) bool {
		return (f.Kind == proxier.LoadBalancer || f.Kind == proxier.ExternalIP) && f.Addr.Addr() == h.dst
	})
	switch {
	case m.isLocal(h.dst) || isMartian(h.src):
		return pass(h.frame)
	case f == nil && contains(m.rules.Unserved, h.dst):
		return m.reject(h)
	case f == nil:
		return pass(h.frame)
	}
	return m.echoReply(h)
}

// answerProbe answers another node that asks whether this one takes packets for a backend.
func (m *Model) answerProbe(h *header) outcome {
	if !h.isEcho() || h.dst != h.wrapper.to.Addr() || h.src != h.wrapper.from {
		return drop("DROP_NO_TARGET")
	}
	out := m.echoReply(h)
	if h.wrapper.dispatch == Dispatch(Opt{}) { // a system that does not know the option answers too
		number := be.Uint16(out.frame[h.l4+6:])
		out.set(h.l4+6, be.AppendUint16(nil, ^number), h.l4+2)
	}
	return out
}

func (m *Model) echoReply(h *header) outcome {
	e := edit(h.frame)
	covered := e.transportChecksum(h)
	kind := byte(packet.EchoReply >> 8)
	if h.v6 {
		kind = packet.EchoReply6 >> 8
	}
	e.set(h.l4, []byte{kind, h.frame[h.l4+1]}, h.l4+2)
	e.setAddrs(h, h.dst, h.src, covered)
	if h.v6 {
		e.set(h.l3+7, []byte{answerTTL})
	} else {
		e.set(h.l3+8, []byte{answerTTL, h.protocol}, h.l3+10)
	}
	e.turnFrame(h)
	return m.answer(h, outcome{verdict: Redirect, reason: "ANSWER_ECHO", editor: e})
}

// turnFrame swaps the addresses of a frame, to send it back.
func (e *editor) turnFrame(h *header) {
	if h.l3 > 0 {
		copy(e.frame, h.frame[6:12])
		copy(e.frame[6:], h.frame[:6])
	}
}

func (m *Model) timeExceeded(h *header) outcome {
	if h.v6 {
		return m.sendError(h, "ERROR_TTL", packet.TimeExceeded6, 0)
	}
	return m.sendError(h, "ERROR_TTL", packet.TimeExceeded, 0)
}

func (m *Model) tooBig(h *header, mtu int) outcome {
	if h.v6 {
		return m.sendError(h, "ERROR_TOO_BIG", packet.PacketTooBig6, uint32(mtu))
	}
	return m.sendError(h, "ERROR_TOO_BIG", packet.FragNeeded, uint32(mtu))
}

// sendError sends an ICMP error to where a packet came from.
func (m *Model) sendError(h *header, reason string, message uint16, rest uint32) outcome {
	if h.place == laterFragment { // RFC 1122, 3.2.2
		return drop(reason)
	}
	length := h.l4 - h.l3 + quoted
	if h.protocol == packet.ProtoTCP {
		length = h.l4 - h.l3 + quotedTCP
	}
	// The limit of the programs; or it is quoted itself, and truncated.
	if length > 96 || length > h.end-h.l3 || length > len(h.frame)-h.l3 {
		return drop(reason)
	}
	q := packet.ParseIP(h.frame[h.l3 : h.l3+length])
	p := packet.Packet{Ethernet: turned(h.frame, h.l3), ICMP: &packet.ICMP{Type: uint8(message >> 8), Code: uint8(message), Rest: rest, Quoted: &q}}
	if h.v6 {
		p.IPv6 = &packet.IPv6{Src: h.dst, Dst: h.src, HopLimit: answerTTL}
	} else {
		p.IPv4 = &packet.IPv4{Src: h.dst, Dst: h.src, TTL: answerTTL}
	}
	e := &editor{frame: p.Build(), checksums: []int{h.l3 + 10}}
	return m.answer(h, outcome{verdict: Redirect, reason: reason, editor: e, trailerMayGo: true})
}

// answer sends an answer back to where a packet came from; to one that came in a packet of another
// node, by the route to the client.
func (m *Model) answer(h *header, out outcome) outcome {
	if h.wrapper == nil {
		return out
	}
	if _, ok := m.node.Route(h.src); !ok {
		out.verdict, out.noRoute = Shot, true
		return out
	}
	copy(out.frame, h.frame[:12*min(h.l3, 1)])
	return out
}

// turned returns the header of a frame that is sent back.
func turned(frame []byte, l2 int) *packet.Ethernet {
	if l2 == 0 {
		return nil
	}
	return &packet.Ethernet{Dst: packet.MAC(frame[6:12]), Src: packet.MAC(frame[0:6])}
}

// reset answers a segment with a reset (RFC 9293, 3.10.7.1). The reset may have the segment's
// payload.
func (m *Model) reset(h *header, reason string) outcome {
	// Fragments are dropped: the rest of the segment is unknown.
	if h.flags()&packet.RST != 0 || h.place != whole {
		return drop(reason)
	}
	size := int(h.frame[h.l4+12]>>4) * 4
	payload := h.end - h.l4 - size
	end := h.end
	if payload == 0 {
		end = h.l4 + 20 // without options
	}
	b := slices.Clone(h.frame[:end])
	if h.v6 {
		be.PutUint16(b[h.l3+4:], uint16(end-h.l3-40))
		b[h.l3+7] = answerTTL
		copy(b[h.l3+8:], slices.Concat(h.dst.AsSlice(), h.src.AsSlice()))
	} else {
		be.PutUint16(b[h.l3+2:], uint16(end-h.l3))
		b[h.l3+8] = answerTTL
		copy(b[h.l3+12:], slices.Concat(h.dst.AsSlice(), h.src.AsSlice()))
	}
	in, t := h.frame[h.l4:h.end], b[h.l4:]
	be.PutUint16(t, be.Uint16(in[2:]))
	be.PutUint16(t[2:], be.Uint16(in))
	flags := h.flags()
	seq, ack, answer := be.Uint32(in[8:]), uint32(0), packet.RST
	if flags&packet.ACK == 0 {
		seq, ack, answer = 0, be.Uint32(in[4:])+uint32(payload), packet.RST|packet.ACK
		for _, counts := range []packet.Flags{packet.SYN, packet.FIN} {
			if flags&counts != 0 {
				ack++
			}
		}
	}
	be.PutUint32(t[4:], seq)
	be.PutUint32(t[8:], ack)
	header := 5
	if payload > 0 {
		header = size / 4
	}
	be.PutUint16(t[12:], uint16(header)<<12|uint16(answer))
	be.PutUint16(t[14:], 0) // window
	be.PutUint16(t[18:], 0) // urgent pointer
	e := &editor{frame: b, checksums: []int{h.l4 + 16}}
	e.turnFrame(h)
	e.fixChecksums(h)
	return m.answer(h, outcome{verdict: Redirect, reason: reason, editor: e, trailerMayGo: true})
}

// fixChecksums corrects the checksums of a changed segment, but keeps wrong ones wrong.
func (e *editor) fixChecksums(h *header) {
	end := len(e.frame)
	was := transportSum(h.frame[h.l4:h.end], h.src, h.dst)
	is := transportSum(e.frame[h.l4:end], h.dst, h.src)
	e.shift(h.l4+16, was, is)
	if !h.v6 {
		e.checksums = append(e.checksums, h.l3+10)
		e.shift(h.l3+10, sum(h.frame[h.l3:h.l4]), sum(e.frame[h.l3:h.l4]))
	}
}

// transportSum returns 0xffff for a segment whose checksum is correct.
func transportSum(b []byte, src, dst netip.Addr) uint16 {
	length := be.AppendUint32(nil, uint32(len(b)))
	return sum(src.AsSlice(), dst.AsSlice(), length, []byte{0, packet.ProtoTCP}, b)
}

// shift changes a checksum so that the total sum is unchanged.
func (e *editor) shift(at int, was, is uint16) {
	e.correct(at, be.AppendUint16(nil, was), be.AppendUint16(nil, is))
}
