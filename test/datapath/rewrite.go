// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"

	"github.com/tandem-proxy/tandem/test/packet"
)

// follow handles a packet of a flow.
func (m *Model) follow(f *Flow, reply bool, h *header) outcome {
	to, reason := f.Reply.Reversed(), "FORWARD_LOCAL"
	if f.Remote {
		reason = "FORWARD_REMOTE"
	}
	if reply {
		to, reason = f.Request.Reversed(), "FORWARD_REPLY"
	}
	if f.Remapped {
		reason = "REMAP"
	}
	out := outcome{verdict: Next, reason: reason}
	if f.Remote {
		if h.ttl <= 1 {
			return m.timeExceeded(h)
		}
		way, ok := m.node.Route(to.Dst.Addr())
		if !ok {
			return drop("DROP_NO_ROUTE")
		}
		if mtu := way.MTU - m.overhead(h, f.Direct); h.end-h.l3 > mtu {
			return m.tooBig(h, mtu)
		}
		out.verdict = Redirect
	}
	out.editor = edit(h.frame)
	if f.Remote {
		out.hop(h)
	}
	if f.Direct {
		out.reason = "FORWARD_DIRECT"
		return m.sendDirect(out, h, f)
	}
	if reply && f.wrapped != nil && !f.Remote {
		out.lowerMSS(h, f.wrapped)
	}
	out.rewrite(h, to)
	return out
}

// hop decrements the hop limit, as a router does.
func (e *editor) hop(h *header) {
	if h.v6 {
		e.set(h.l3+7, []byte{h.ttl - 1})
		return
	}
	e.set(h.l3+8, []byte{h.ttl - 1, h.protocol}, h.l3+10)
}

// rewrite changes the addresses of a packet, and its ports if it has any.
func (e *editor) rewrite(h *header, to Tuple) {
	covered := e.transportChecksum(h)
	e.setAddrs(h, to.Src.Addr(), to.Dst.Addr(), covered)
	if h.place == laterFragment || h.isICMP() {
		return
	}
	e.set(h.l4, be.AppendUint16(be.AppendUint16(nil, to.Src.Port()), to.Dst.Port()), covered...)
	if h.protocol == packet.ProtoUDP && len(covered) > 0 {
		e.udp = covered[0]
	}
}

// transportChecksum returns the offset of the checksum that covers addresses and ports, if
// there is one.
func (e *editor) transportChecksum(h *header) []int {
	switch {
	case h.place == laterFragment, h.protocol == packet.ProtoICMP:
		return nil
	case h.protocol == packet.ProtoTCP:
		return []int{h.l4 + 16}
	case h.protocol == packet.ProtoICMPv6:
		return []int{h.l4 + 2}
	case be.Uint16(e.frame[h.l4+6:]) == 0:
		return nil
	}
	return []int{h.l4 + 6}
}

// setAddrs overwrites the addresses, and updates the given checksums and that of the IPv4
// header.
func (e *editor) setAddrs(h *header, src, dst netip.Addr, covered []int) {
	addrs := append(src.AsSlice(), dst.AsSlice()...)
	if h.v6 {
		e.set(h.l3+8, addrs, covered...)
		return
	}
	e.set(h.l3+12, addrs, append(covered, h.l3+10)...)
}

// followError translates an ICMP error about a packet of a flow. The quoted packet becomes
// the one that the receiver of the error sent. The addresses are translated like those of
// replies to the quoted packet.
func (m *Model) followError(hook Hook, h *header) outcome {
	q, ok := h.parseQuote()
	if !ok {
		return m.aboutNoFlow(hook, h)
	}
	f, reply := m.find(q.tuple.Reversed())
	if f == nil || !m.here(hook, f, reply) || f.Direct && h.wrapper != nil {
		return m.aboutNoFlow(hook, h)
	}
	answer := f.Reply.Reversed() // tuple of packets in this direction after translation
	if reply {
		answer = f.Request.Reversed()
	}
	out := outcome{verdict: Next, reason: "FORWARD_ICMP", editor: edit(h.frame)}
	if f.Remote {
		if h.ttl <= 1 {
			return drop("ERROR_TTL") // no ICMP error about an ICMP error
		}
		if _, ok := m.node.Route(answer.Dst.Addr()); !ok {
			return drop("DROP_NO_ROUTE")
		}
		out.verdict = Redirect
		out.hop(h)
	}
	if f.Direct { // the backend's node translates it
		return m.sendDirect(out, h, f)
	}
	out.rewriteQuote(h, q, answer.Reversed())
	from := h.src
	if answer.Src.Addr() != q.dst {
		from = answer.Src.Addr()
	}
	out.rewrite(h, Tuple{Src: netip.AddrPortFrom(from, 0), Dst: netip.AddrPortFrom(answer.Dst.Addr(), 0)})
	return out
}

// aboutNoFlow handles an ICMP error about no flow.
func (m *Model) aboutNoFlow(hook Hook, h *header) outcome {
	if hook == In && !m.node.Pod && h.wrapper == nil {
		return m.followOuterError(h)
	}
	return m.ofNoFlow(h)
}

// rewriteQuote translates the quoted packet, whose checksum may be missing.
func (e *editor) rewriteQuote(h, q *header, to Tuple) {
	outer := h.l4 + 2
	covered := []int{outer}
	inner := q.l4 + 16
	if q.protocol == packet.ProtoUDP {
		inner = q.l4 + 6
	}
	before := [2]byte{}
	hasInner := inner+2 <= h.end && (q.protocol == packet.ProtoTCP || be.Uint16(e.frame[inner:]) != 0)
	if hasInner {
		before = [2]byte(e.frame[inner:])
		covered = append(covered, inner)
	}
	addrs := append(to.Src.Addr().AsSlice(), to.Dst.Addr().AsSlice()...)
	if q.v6 {
		e.set(q.l3+8, addrs, covered...)
	} else {
		// The checksum of that header is also part of the message.
		headerSum := [2]byte(e.frame[q.l3+10:])
		e.set(q.l3+12, addrs, append(covered, q.l3+10)...)
		e.correct(outer, headerSum[:], e.frame[q.l3+10:q.l3+12])
	}
	e.set(q.l4, be.AppendUint16(be.AppendUint16(nil, to.Src.Port()), to.Dst.Port()), covered...)
	if hasInner {
		e.correct(outer, before[:], e.frame[inner:inner+2])
	}
}
