// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"slices"
)

var be = binary.BigEndian

// Build returns the bytes of the packet.
func (p Packet) Build() []byte {
	var b []byte
	if e := p.Ethernet; e != nil {
		b = slices.Concat(e.Dst[:], e.Src[:])
		b = be.AppendUint16(b, p.etherType())
	}
	return slices.Concat(b, p.ip(), p.Trailer)
}

func (p Packet) etherType() uint16 {
	switch {
	case p.IPv4 != nil:
		return EtherIPv4
	case p.IPv6 != nil:
		return EtherIPv6
	}
	return p.Ethernet.Type
}

// ip returns the packet from its IP header to the end of its payload.
func (p Packet) ip() []byte {
	rest := p.Transport()
	switch {
	case p.IPv4 != nil:
		return append(p.IPv4.header(p.Protocol(), len(rest)), rest...)
	case p.IPv6 != nil:
		return append(p.IPv6.header(p.Protocol(), len(rest)), rest...)
	}
	return rest
}

// header returns the header, given the length of the payload.
func (h *IPv4) header(protocol uint8, rest int) []byte {
	b := append(make([]byte, 20), padded(h.Options, 4, 0)...)
	b[0] = 4<<4 | uint8(len(b)/4)
	b[1] = h.TOS
	be.PutUint16(b[2:], or(h.Length, uint16(len(b)+rest)))
	be.PutUint16(b[4:], h.ID)
	offset := uint16(h.FragmentOffset / 8)
	for i, set := range []bool{h.Reserved, h.DontFragment, h.MoreFragments} {
		if set {
			offset |= 1 << (15 - i)
		}
	}
	be.PutUint16(b[6:], offset)
	b[8], b[9] = h.TTL, protocol
	src, dst := h.Src.As4(), h.Dst.As4()
	copy(b[12:], src[:])
	copy(b[16:], dst[:])
	be.PutUint16(b[10:], or(h.Checksum, ^fold(sum(b))))
	return b
}

func (h *IPv6) header(protocol uint8, rest int) []byte {
	b := make([]byte, 40)
	be.PutUint32(b, 6<<28|uint32(h.TrafficClass)<<20|h.FlowLabel&0xfffff)
	b[7] = h.HopLimit
	src, dst := h.Src.As16(), h.Dst.As16()
	copy(b[8:], src[:])
	copy(b[24:], dst[:])
	next := 6 // offset of the next header's protocol
	for _, x := range h.Extensions {
		b[next], next = x.Type, len(b)
		data := padded(x.Data, 8, 2)
		length := uint8((len(data)+2)/8 - 1) // 0 is the reserved byte of a fragment header
		b = append(append(b, 0, length), data...)
	}
	b[next] = protocol
	be.PutUint16(b[4:], or(h.Length, uint16(len(b)-40+rest)))
	return b
}

// Transport returns the bytes after the IP header.
func (p Packet) Transport() []byte {
	b := p.unsummed()
	if at, given := p.checksum(); at > 0 {
		be.PutUint16(b[at:], or(given, p.rightChecksum(b)))
	}
	return b
}

// unsummed returns the transport with a checksum of zero.
func (p Packet) unsummed() []byte {
	var b []byte
	switch {
	case p.TCP != nil:
		t := p.TCP
		b = append(make([]byte, 20), padded(t.Options, 4, 0)...)
		be.PutUint16(b, t.Src)
		be.PutUint16(b[2:], t.Dst)
		be.PutUint32(b[4:], t.Seq)
		be.PutUint32(b[8:], t.Ack)
		be.PutUint16(b[12:], uint16(len(b)/4)<<12|uint16(t.Flags)&0xfff)
		be.PutUint16(b[14:], t.Window)
		be.PutUint16(b[18:], t.Urgent)
	case p.UDP != nil:
		b = make([]byte, 8)
		be.PutUint16(b, p.UDP.Src)
		be.PutUint16(b[2:], p.UDP.Dst)
		be.PutUint16(b[4:], or(p.UDP.Length, uint16(len(b)+len(p.Payload))))
	case p.ICMP != nil:
		b = make([]byte, 8)
		b[0], b[1] = p.ICMP.Type, p.ICMP.Code
		be.PutUint32(b[4:], p.ICMP.Rest)
		if p.ICMP.Quoted != nil {
			b = append(b, p.ICMP.Quoted.Build()...)
		}
	}
	return append(b, p.Payload...)
}

func or(given *uint16, right uint16) uint16 {
	if given != nil {
		return *given
	}
	return right
}

// padded returns data padded with zeros, so that its length plus the bytes before it is
// a multiple of unit.
func padded(data []byte, unit, before int) []byte {
	length := (before + len(data) + unit - 1) / unit * unit
	return append(slices.Clone(data), make([]byte, length-before-len(data))...)
}
