// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"slices"
	"time"

	"github.com/tandem-proxy/tandem/test/packet"
)

// Opt translates packets to the backend, and adds the frontend as an IP option, in front of others.
type Opt struct{}

const (
	optionV4, optionV4Bytes = 0x9a, 8 // type and length
	optionV6, optionV6Bytes = 0x1b, 24
	// optionAfter is the pause after which the next segment of a connection has the option again.
	optionAfter = 5 * time.Second
	largestV4   = 60 // header with options
)

func (Opt) String() string { return "opt" }

// Overhead implements Dispatch.
func (Opt) Overhead(v6 bool) int {
	if v6 {
		return optionV6Bytes
	}
	return optionV4Bytes
}

// Send returns the packet that a node sends to a backend instead of a client's, both from their IP
// header on; the client's if there is no place for an option.
func (Opt) Send(p []byte, to netip.AddrPort) []byte {
	h, result := parse(p, 0)
	if result != understood {
		return p
	}
	e := edit(p)
	if !e.sendWithOption(h, to) {
		return p
	}
	return e.frame
}

// translate gives a packet a backend as its destination.
func (e *editor) translate(h *header, to netip.AddrPort) {
	e.rewrite(h, Tuple{Src: netip.AddrPortFrom(h.src, h.tuple.Src.Port()), Dst: to})
}

// sendWithOption translates a packet, and adds an option with its destination; false if there is no
// place for one.
func (e *editor) sendWithOption(h *header, to netip.AddrPort) bool {
	e.translate(h, to)
	port := h.tuple.Dst.Port()
	at := h.l3 + ipSize(h.v6)
	var option []byte
	if h.v6 {
		next := h.l3 + 6
		if e.frame[next] == packet.ProtoHopByHop { // which has to be the first
			return false
		}
		option = append([]byte{e.frame[next], optionV6Bytes/8 - 1, optionV6, 20}, h.dst.AsSlice()...)
		option = append(be.AppendUint16(option, port), 0, 0)
		e.set(next, []byte{packet.ProtoDestOptions})
	} else {
		if h.l4-h.l3+optionV4Bytes > largestV4 {
			return false
		}
		// Of port and address, the last byte comes first.
		option = append(h.dst.AsSlice(), byte(port>>8), byte(port))
		slices.Reverse(option)
		option = append([]byte{optionV4, optionV4Bytes}, option...)
		e.correct(h.l3+10, make([]byte, len(option)), option)
	}
	e.lengthen(h, len(option))
	e.frame = slices.Insert(e.frame, at, option...)
	e.move(at, len(option))
	return true
}

// lengthen changes the lengths in an IP header for that many bytes more.
func (e *editor) lengthen(h *header, n int) {
	length := h.end - h.l3 + n
	if h.v6 {
		e.set(h.l3+4, be.AppendUint16(nil, uint16(length-40)))
		return
	}
	words := byte((h.l4 - h.l3 + n) / 4)
	e.set(h.l3, be.AppendUint16([]byte{4<<4 | words, e.frame[h.l3+1]}, uint16(length)), h.l3+10)
}

// move moves the places of checksums from an offset on.
func (e *editor) move(from, n int) {
	for i := range e.checksums {
		if e.checksums[i] >= from {
			e.checksums[i] += n
		}
	}
	if e.udp >= from {
		e.udp += n
	}
}

// takeOption removes the option of another node from a packet, which gets back the destination that its
// client sent it to. Others stay as they are.
func (m *Model) takeOption(h *header) *header {
	frontend, ok := h.option()
	if !ok {
		return nil
	}
	w := &wrapper{to: netip.AddrPortFrom(h.dst, h.tuple.Dst.Port()), dispatch: Opt{}}
	u := *h
	u.dst, u.wrapper = frontend.Addr(), w
	w.from = m.sender(&u)
	if !h.isICMP() && h.place != laterFragment {
		u.setPorts(h.tuple.Src.Port(), frontend.Port())
	}
	if !m.isForTarget(&u) {
		return nil
	}
	m.hadOptions = true
	m.Counted["UNWRAP"]++
	e := edit(h.frame)
	e.removeOption(h)
	bare, _ := parse(e.frame, h.l3)
	e.translate(bare, frontend)
	if e.udp > 0 && be.Uint16(e.frame[e.udp:]) == 0 { // it would mean that there is none
		be.PutUint16(e.frame[e.udp:], 0xffff)
	}
	taken, _ := parse(e.frame, h.l3)
	taken.wrapper = w
	return taken
}

// option returns the frontend in the option of a packet, if that is right after the fixed header.
func (h *header) option() (frontend netip.AddrPort, ok bool) {
	b := h.frame[h.l3:h.l4]
	if !h.v6 {
		if b = b[20:]; len(b) < optionV4Bytes || b[0] != optionV4 || b[1] != optionV4Bytes {
			return frontend, false
		}
		reversed := slices.Clone(b[2:optionV4Bytes])
		slices.Reverse(reversed)
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(reversed)), be.Uint16(reversed[4:])), true
	}
	next := b[6]
	if b = b[40:]; next != packet.ProtoDestOptions || len(b) < optionV6Bytes || [3]byte(b[1:4]) != [3]byte{optionV6Bytes/8 - 1, optionV6, 20} {
		return frontend, false
	}
	a := netip.AddrFrom16([16]byte(b[4:]))
	return netip.AddrPortFrom(a, be.Uint16(b[20:])), !a.Is4In6()
}

func (e *editor) removeOption(h *header) {
	at, n := h.l3+ipSize(h.v6), Opt{}.Overhead(h.v6)
	if h.v6 {
		e.set(h.l3+6, []byte{e.frame[at]})
	} else {
		e.correct(h.l3+10, e.frame[at:at+n], make([]byte, n))
	}
	e.lengthen(h, -n)
	e.frame = slices.Delete(e.frame, at, at+n)
}

// isBound reports whether another node selected the backend of a segment for good: it sends others of the
// connection there without an option.
func (h *header) isBound() bool {
	return h.wrapper != nil && h.wrapper.dispatch == Dispatch(Opt{}) && h.protocol == packet.ProtoTCP
}

// isElsewhere reports whether another node translates segments of a flow to another backend than this node.
func (h *header) isElsewhere(f *Flow, reply bool) bool {
	to := f.Reply.Src
	if reply {
		to = f.Request.Src
	}
	return h.isBound() && !h.isSelected(to)
}

// isSelected reports whether another node selected this backend for a segment. Only the first fragment has a port.
func (h *header) isSelected(backend netip.AddrPort) bool {
	return backend.Addr() == h.wrapper.to.Addr() && (h.place == laterFragment || backend.Port() == h.wrapper.to.Port())
}

// translated returns the flow of a segment that another node translated.
func (m *Model) translated(h *header) *Flow {
	if !m.hadOptions || m.node.Pod || h.wrapper != nil || h.protocol != packet.ProtoTCP || h.flags()&(packet.SYN|packet.ACK) == packet.SYN {
		return nil
	}
	f, reply := m.find(h.tuple.Reversed())
	if f == nil || !reply || f.Remote || f.Direct || f.Remapped {
		return nil
	}
	return f
}

// ownsPort reports whether the source port of a flow's client tells its frontend.
func (f *Flow) ownsPort() bool {
	return f.wrapped == Dispatch(Opt{}) && f.Request.Protocol == packet.ProtoTCP
}

// isTaken reports whether the replies to a new flow that owns its port are those of another one, which has not closed.
func (m *Model) isTaken(reply Tuple) bool {
	f, _ := m.find(reply)
	return f != nil && f.State&Closed == 0
}

// makeWay ends the flow that has these replies, if it has closed; false if it has not.
func (m *Model) makeWay(reply Tuple) bool {
	if m.isTaken(reply) {
		return false
	}
	if f, _ := m.find(reply); f != nil {
		f.over = true
	}
	return true
}

// needsOption reports whether the backend's node may not know the connection of a packet, or could not
// tell it.
func (f *Flow) needsOption(h *header) bool {
	return h.protocol != packet.ProtoTCP || h.place != whole || h.flags()&packet.SYN != 0 || f.Packets[0] == 1 || f.silent >= optionAfter
}
