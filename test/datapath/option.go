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

// needsOption reports whether the backend's node may not know the connection of a packet, or could not
// tell it.
func (f *Flow) needsOption(h *header) bool {
	return h.protocol != packet.ProtoTCP || h.place != whole || h.flags()&packet.SYN != 0 || f.Packets[0] == 1 || f.silent >= optionAfter
}

// Pause makes all flows older by so much.
func (m *Model) Pause(d time.Duration) {
	for _, f := range m.Flows() {
		f.paused += d
	}
}
