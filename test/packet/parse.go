// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"net/netip"
	"slices"
)

// Parse decodes a frame. Unparseable bytes are payload of the layers before them.
func Parse(frame []byte) Packet {
	if len(frame) < 14 {
		return Packet{Payload: clone(frame)}
	}
	e := &Ethernet{Dst: MAC(frame[:6]), Src: MAC(frame[6:12]), Type: be.Uint16(frame[12:])}
	p := Packet{Payload: clone(frame[14:])}
	switch e.Type {
	case EtherIPv4:
		p = parseIPv4(frame[14:])
	case EtherIPv6:
		p = parseIPv6(frame[14:])
	}
	if p.IPv4 != nil || p.IPv6 != nil {
		e.Type = 0
	}
	p.Ethernet = e
	return p
}

// ParseIP decodes a packet that begins with its IP header.
func ParseIP(b []byte) Packet {
	if len(b) > 0 && b[0]>>4 == 6 {
		return parseIPv6(b)
	}
	return parseIPv4(b)
}

func parseIPv4(b []byte) Packet {
	if len(b) < 20 || b[0]>>4 != 4 {
		return Packet{Payload: clone(b)}
	}
	size, length := int(b[0]&0xf)*4, int(be.Uint16(b[2:]))
	if size < 20 || size > len(b) {
		return Packet{Payload: clone(b)}
	}
	flags := be.Uint16(b[6:])
	h := &IPv4{
		Src: netip.AddrFrom4([4]byte(b[12:16])), Dst: netip.AddrFrom4([4]byte(b[16:20])),
		TOS: b[1], TTL: b[8], ID: be.Uint16(b[4:]),
		Reserved: flags&0x8000 != 0, DontFragment: flags&0x4000 != 0, MoreFragments: flags&0x2000 != 0,
		FragmentOffset: int(flags&0x1fff) * 8,
		Options:        clone(b[20:size]),
		Protocol:       b[9],
	}
	p := Packet{IPv4: h}
	rest := b[size:]
	if length >= size && length <= len(b) {
		rest, p.Trailer = b[size:length], clone(b[length:])
	} else {
		h.Length = new(uint16(length))
	}
	h.Checksum = wrong(be.Uint16(b[10:]), be.Uint16(h.header(b[9], len(rest))[10:]))
	p.parseTransport(rest)
	return p
}

func parseIPv6(b []byte) Packet {
	if len(b) < 40 || b[0]>>4 != 6 {
		return Packet{Payload: clone(b)}
	}
	first := be.Uint32(b)
	h := &IPv6{
		Src: netip.AddrFrom16([16]byte(b[8:24])), Dst: netip.AddrFrom16([16]byte(b[24:40])),
		TrafficClass: uint8(first >> 20), FlowLabel: first & 0xfffff, HopLimit: b[7],
	}
	p := Packet{IPv6: h}
	rest, length := b[40:], int(be.Uint16(b[4:]))
	if length <= len(rest) {
		rest, p.Trailer = rest[:length], clone(rest[length:])
	} else {
		h.Length = new(uint16(length))
	}
	h.NextHeader = b[6]
	for {
		size := extensionSize(h.NextHeader, rest)
		if f, _ := p.Fragment(); size == 0 || f.Offset > 0 {
			break
		}
		h.Extensions = append(h.Extensions, Extension{h.NextHeader, clone(rest[2:size])})
		h.NextHeader, rest = rest[0], rest[size:]
	}
	p.parseTransport(rest)
	return p
}

// extensionSize returns the length of an extension header in b, 0 if it is none.
func extensionSize(protocol uint8, b []byte) int {
	size := 0
	switch protocol {
	case ProtoHopByHop, ProtoRouting, ProtoDestOptions:
		if len(b) >= 2 {
			size = (int(b[1]) + 1) * 8
		}
	case ProtoFragment:
		if len(b) >= 2 && b[1] == 0 {
			size = 8
		}
	}
	if size > len(b) {
		return 0
	}
	return size
}

// parseTransport fills in the layers above the IP header, and clears the protocol of that
// header if a layer implies it.
func (p *Packet) parseTransport(b []byte) {
	p.Payload = clone(b)
	if f, _ := p.Fragment(); f.Offset > 0 {
		return
	}
	switch proto, v6 := p.Protocol(), p.IPv6 != nil; {
	case proto == ProtoTCP && len(b) >= 20:
		size := int(b[12]>>4) * 4
		if size < 20 || size > len(b) {
			return
		}
		p.TCP = &TCP{
			Src: be.Uint16(b), Dst: be.Uint16(b[2:]), Seq: be.Uint32(b[4:]), Ack: be.Uint32(b[8:]),
			Flags: Flags(be.Uint16(b[12:]) & 0xfff), Window: be.Uint16(b[14:]), Urgent: be.Uint16(b[18:]),
			Options: clone(b[20:size]),
		}
		p.Payload = clone(b[size:])
		p.TCP.Checksum = wrong(be.Uint16(b[16:]), p.rightChecksum(p.unsummed()))
	case proto == ProtoUDP && len(b) >= 8:
		p.UDP = &UDP{Src: be.Uint16(b), Dst: be.Uint16(b[2:]), Length: wrong(be.Uint16(b[4:]), uint16(len(b)))}
		p.Payload = clone(b[8:])
		p.UDP.Checksum = wrong(be.Uint16(b[6:]), p.rightChecksum(p.unsummed()))
	case (proto == ProtoICMP && !v6 || proto == ProtoICMPv6 && v6) && len(b) >= 8:
		p.ICMP = &ICMP{Type: b[0], Code: b[1], Rest: be.Uint32(b[4:])}
		p.Payload = clone(b[8:])
		if p.ICMP.isError(v6) {
			if q := ParseIP(b[8:]); q.IPv4 != nil || q.IPv6 != nil {
				p.ICMP.Quoted, p.Payload = &q, nil
			}
		}
		p.ICMP.Checksum = wrong(be.Uint16(b[2:]), p.rightChecksum(p.unsummed()))
	default:
		return
	}
	if p.IPv4 != nil {
		p.IPv4.Protocol = 0
	} else {
		p.IPv6.NextHeader = 0
	}
}

func (i *ICMP) isError(v6 bool) bool {
	if v6 {
		return i.Type < 128
	}
	switch i.Type {
	case 3, 4, 5, 11, 12:
		return true
	}
	return false
}

// wrong returns nil for a correct value.
func wrong(got, right uint16) *uint16 {
	if got == right {
		return nil
	}
	return &got
}

// clone returns nil for an empty slice, so that packets can be compared.
func clone(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	return slices.Clone(b)
}
