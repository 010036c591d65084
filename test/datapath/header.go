// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"net/netip"

	"github.com/tandem-proxy/tandem/test/packet"
)

var be = binary.BigEndian

// Protocols that have ports, and AH, which package packet does not know.
const (
	protoAH = 51
	// maxExtensions is how many extension headers of IPv6 are parsed.
	maxExtensions = 6
)

// Tuple has source and destination of a packet.
type Tuple struct {
	Src, Dst netip.AddrPort
	Protocol uint8
}

// Reversed returns the tuple of replies.
func (t Tuple) Reversed() Tuple { return Tuple{t.Dst, t.Src, t.Protocol} }

type place int

const (
	whole place = iota
	firstFragment
	laterFragment
)

// header has the offsets of headers in a frame.
type header struct {
	frame      []byte
	l3, l4     int // offsets
	end        int // of the IP packet; padding may follow
	v6         bool
	src, dst   netip.Addr
	protocol   uint8
	ttl        uint8
	place      place
	fragmentID uint32
	// ports, once they are known.
	tuple Tuple
	// wrapper is nil for packets that did not come in one of another node.
	wrapper *wrapper
}

func (h *header) flags() packet.Flags {
	if h.protocol != packet.ProtoTCP || h.place == laterFragment {
		return 0
	}
	return packet.Flags(h.frame[h.l4+13])
}

func (h *header) isICMP() bool {
	return h.protocol == packet.ProtoICMP || h.protocol == packet.ProtoICMPv6
}

// isError reports whether it is an ICMP message that quotes a packet.
func (h *header) isError() bool {
	kind := h.frame[h.l4]
	if h.v6 {
		return kind >= 1 && kind <= 4
	}
	return kind == 3 || kind == 11 || kind == 12
}

func (h *header) isEcho() bool { return h.frame[h.l4] == 8 && !h.v6 || h.frame[h.l4] == 128 && h.v6 }

// parsed is how far the headers of a packet can be parsed.
type parsed int

const (
	understood parsed = iota
	foreign           // another protocol
	broken            // truncated, wrong lengths, or too many headers
)

// parse reads the headers of a frame.
func parse(frame []byte, l3 int) (*header, parsed) {
	h := &header{frame: frame, l3: l3}
	etherType := uint16(packet.EtherIPv4)
	if l3 > 0 {
		etherType = be.Uint16(frame[l3-2:])
	} else if frame[0]>>4 == 6 {
		etherType = packet.EtherIPv6
	}
	result := foreign
	switch etherType {
	case packet.EtherIPv4:
		result = h.parseIPv4(len(frame))
	case packet.EtherIPv6:
		result = h.parseIPv6(len(frame))
	}
	if result == understood && (h.l4 > h.end || h.end > len(frame) || h.place != laterFragment && !h.parseTransport()) {
		result = broken
	}
	return h, result
}

// parseIPv4 reads the IP header at l3, up to limit.
func (h *header) parseIPv4(limit int) parsed {
	if limit-h.l3 < 20 {
		return broken
	}
	b := h.frame[h.l3:limit]
	size, length := int(b[0]&0xf)*4, int(be.Uint16(b[2:]))
	if b[0]>>4 != 4 || size < 20 {
		return broken
	}
	h.src, h.dst = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
	h.protocol, h.ttl = b[9], b[8]
	h.l4, h.end = h.l3+size, h.l3+length
	offset := be.Uint16(b[6:])
	switch {
	case offset&0x1fff != 0:
		h.place = laterFragment
	case offset&0x2000 != 0:
		h.place = firstFragment
	}
	h.fragmentID = uint32(be.Uint16(b[4:]))
	if h.protocol != packet.ProtoTCP && h.protocol != packet.ProtoUDP && h.protocol != packet.ProtoICMP {
		return foreign
	}
	if size > len(b) {
		return broken
	}
	return understood
}

func (h *header) parseIPv6(limit int) parsed {
	if limit-h.l3 < 40 {
		return broken
	}
	b := h.frame[h.l3:limit]
	if b[0]>>4 != 6 {
		return broken
	}
	h.v6 = true
	h.src, h.dst = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
	if h.src.Is4In6() || h.dst.Is4In6() {
		return broken // not valid on the wire
	}
	h.ttl = b[7]
	h.l4, h.end = h.l3+40, h.l3+40+int(be.Uint16(b[4:]))
	h.protocol = b[6]
	for walked := 0; ; walked++ {
		var x []byte // the extension header
		switch h.protocol {
		case packet.ProtoTCP, packet.ProtoUDP, packet.ProtoICMPv6:
			return understood
		case packet.ProtoHopByHop, packet.ProtoRouting, packet.ProtoDestOptions, packet.ProtoFragment, protoAH:
			if walked == maxExtensions || limit-h.l4 < 8 {
				return broken
			}
			x = h.frame[h.l4:limit]
		default:
			return foreign
		}
		size := (int(x[1]) + 1) * 8
		switch h.protocol {
		case packet.ProtoFragment:
			size = 8
			offset := be.Uint16(x[2:])
			h.fragmentID = be.Uint32(x[4:])
			switch {
			case offset&^7 != 0:
				h.place = laterFragment
			case offset&1 != 0:
				h.place = firstFragment
			}
		case protoAH:
			size = (int(x[1]) + 2) * 4
		}
		h.protocol = x[0]
		h.l4 += size
		if h.place == laterFragment {
			return understood // the next header is only in the first fragment
		}
	}
}

// parseTransport requires a complete header; TCP options may continue in the next
// fragment.
func (h *header) parseTransport() bool {
	b := h.frame[h.l4:h.end]
	switch h.protocol {
	case packet.ProtoTCP:
		if len(b) < 20 {
			return false
		}
		if size := int(b[12]>>4) * 4; size < 20 || size > len(b) && h.place == whole {
			return false
		}
	default:
		if len(b) < 8 {
			return false
		}
	}
	if !h.isICMP() {
		h.setPorts(be.Uint16(b), be.Uint16(b[2:]))
	}
	return true
}

func (h *header) setPorts(src, dst uint16) {
	h.tuple = Tuple{netip.AddrPortFrom(h.src, src), netip.AddrPortFrom(h.dst, dst), h.protocol}
}

// parseQuote parses the packet that an ICMP error is about. It needs the ports; the rest
// may be truncated, and some hosts quote wrong lengths.
func (h *header) parseQuote() (*header, bool) {
	return parseQuoted(h.frame, h.l4+8, h.end, h.v6)
}

func parseQuoted(frame []byte, l3, end int, v6 bool) (*header, bool) {
	q := &header{frame: frame, l3: l3}
	result := broken
	if v6 {
		result = q.parseIPv6(end)
	} else {
		result = q.parseIPv4(end)
	}
	if result != understood || q.isICMP() || q.place == laterFragment || end-q.l4 < 4 {
		return q, false
	}
	q.setPorts(be.Uint16(q.frame[q.l4:]), be.Uint16(q.frame[q.l4+2:]))
	return q, true
}
