// SPDX-License-Identifier: Apache-2.0

package packet

import "slices"

// Fragment is the position of a fragment in its packet.
type Fragment struct {
	ID     uint32
	Offset int // in bytes
	More   bool
}

// whole reports whether the fragment is the whole packet.
func (f Fragment) whole() bool { return f.Offset == 0 && !f.More }

// Fragment returns which fragment the packet is. A whole IPv6 packet may have a fragment
// header as well.
func (p Packet) Fragment() (f Fragment, ok bool) {
	if h := p.IPv4; h != nil {
		f = Fragment{uint32(h.ID), h.FragmentOffset, h.MoreFragments}
		return f, !f.whole()
	}
	if p.IPv6 != nil {
		for _, x := range p.IPv6.Extensions {
			if x.Type == ProtoFragment {
				return x.fragment(), true
			}
		}
	}
	return f, false
}

// fragment reads a fragment header.
func (x Extension) fragment() Fragment {
	b := padded(x.Data, 6, 0)
	place := be.Uint16(b)
	return Fragment{be.Uint32(b[2:]), int(place &^ 7), place&1 != 0}
}

// Extension returns the fragment header of IPv6.
func (f Fragment) Extension() Extension {
	place := uint16(f.Offset)
	if f.More {
		place |= 1
	}
	return Extension{ProtoFragment, be.AppendUint32(be.AppendUint16(nil, place), f.ID)}
}

// Fragments splits a packet into fragments no longer than the MTU.
func (p Packet) Fragments(mtu int, id uint32) []Packet {
	rest := p.Transport()
	room := (mtu - p.fragment(Fragment{}, nil).size()) &^ 7
	var out []Packet
	for offset := 0; ; offset += room {
		if len(rest) <= room {
			return append(out, p.fragment(Fragment{id, offset, false}, rest))
		}
		out = append(out, p.fragment(Fragment{id, offset, true}, rest[:room]))
		rest = rest[room:]
	}
}

func (p Packet) size() int { return len(p.ip()) }

// fragment returns a fragment with a part of the packet.
func (p Packet) fragment(f Fragment, part []byte) Packet {
	q := Packet{Ethernet: p.Ethernet, Payload: part}
	switch {
	case p.IPv4 != nil:
		h := *p.IPv4
		h.ID, h.FragmentOffset, h.MoreFragments, h.DontFragment = uint16(f.ID), f.Offset, f.More, false
		h.Protocol = p.Protocol()
		q.IPv4 = &h
	case p.IPv6 != nil:
		h := *p.IPv6
		h.Extensions = append(slices.Clip(h.Extensions), f.Extension())
		h.NextHeader = p.Protocol()
		q.IPv6 = &h
	}
	return reparse(q)
}
