// SPDX-License-Identifier: Apache-2.0

// Package packet builds and parses packets for tests.
//
// A Packet is a struct of layers. Build encodes it, and Parse decodes it. Parse and then
// Build returns the same bytes for any input, since Parse keeps unparseable bytes as
// payload. Lengths and checksums are nil if they are correct: literals need not
// specify them, wrong ones can be set, and wrong ones of parsed packets stand out in a
// diff.
//
//	syn := packet.NewTCP(client, vip, packet.SYN, nil)
//	syn.IPv4.Options = []byte{0x94, 4, 0, 0}
//	syn.TCP.Checksum = new(uint16(0xdead))
//	err := syn.Verify() // transport checksum 0xdead, want 0x…
//
// Layers are pointers: Clone a packet before changing a copy of it.
//
// Inner packets of tunnels are payload; parse them with ParseIP.
package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Types of Ethernet frames.
const (
	EtherIPv4 = 0x0800
	EtherARP  = 0x0806
	EtherIPv6 = 0x86dd
)

// Protocols that can follow an IP header, including extension headers of IPv6.
const (
	ProtoHopByHop    = 0
	ProtoICMP        = 1
	ProtoTCP         = 6
	ProtoUDP         = 17
	ProtoRouting     = 43
	ProtoFragment    = 44
	ProtoICMPv6      = 58
	ProtoDestOptions = 60
	ProtoSCTP        = 132
)

// Packet is a packet by its layers, any of which can be nil.
type Packet struct {
	Ethernet *Ethernet // if nil, the packet begins with its IP header
	IPv4     *IPv4
	IPv6     *IPv6 // not together with IPv4
	TCP      *TCP
	UDP      *UDP
	ICMP     *ICMP // ICMPv6 over IPv6
	Payload  []byte
	// Trailer is the padding after the IP packet, for short frames.
	Trailer []byte
}

// MAC is a link-layer address.
type MAC [6]byte

func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// Ethernet is the header of a frame.
type Ethernet struct {
	Dst, Src MAC
	Type     uint16 // derived from the IP header if there is one
}

// IPv4 is an IPv4 header.
type IPv4 struct {
	Src, Dst                              netip.Addr
	TOS, TTL                              uint8
	ID                                    uint16
	Reserved, DontFragment, MoreFragments bool
	FragmentOffset                        int    // in bytes
	Options                               []byte // padded to a multiple of 4
	Protocol                              uint8  // derived from the next layer if there is one
	Length, Checksum                      *uint16
}

// IPv6 is an IPv6 header with its extension headers.
type IPv6 struct {
	Src, Dst     netip.Addr
	TrafficClass uint8
	FlowLabel    uint32
	HopLimit     uint8
	Extensions   []Extension
	NextHeader   uint8   // after the extensions; derived from the next layer if there is one
	Length       *uint16 // of the payload
}

// Extension is an extension header. Data begins after the length field, and is padded to a
// multiple of its unit.
type Extension struct {
	Type uint8
	Data []byte
}

// Flags are the flags of a TCP header, including the reserved ones.
type Flags uint16

// TCP flags.
const (
	FIN Flags = 1 << iota
	SYN
	RST
	PSH
	ACK
	URG
	ECE
	CWR
)

// TCP is a TCP header.
type TCP struct {
	Src, Dst       uint16
	Seq, Ack       uint32
	Flags          Flags
	Window, Urgent uint16
	Options        []byte // padded to a multiple of 4
	Checksum       *uint16
}

// UDP is a UDP header. A checksum of 0 means no checksum.
type UDP struct {
	Src, Dst         uint16
	Length, Checksum *uint16
}

// ICMP is a message of ICMP or ICMPv6.
type ICMP struct {
	Type, Code uint8
	Rest       uint32 // identifier and sequence number of an echo; the MTU of errors about it
	// Quoted is the packet that an error is about, often truncated.
	Quoted   *Packet
	Checksum *uint16
}

// Messages of ICMP and of ICMPv6, type in the upper byte, code in the lower, as
// ICMP.Is takes them.
const (
	EchoReply       = 0 << 8
	NetUnreachable  = 3 << 8
	HostUnreachable = 3<<8 | 1
	PortUnreachable = 3<<8 | 3
	FragNeeded      = 3<<8 | 4
	EchoRequest     = 8 << 8
	TimeExceeded    = 11 << 8

	NoRoute6         = 1 << 8
	PortUnreachable6 = 1<<8 | 4
	PacketTooBig6    = 2 << 8
	TimeExceeded6    = 3 << 8
	EchoRequest6     = 128 << 8
	EchoReply6       = 129 << 8
)

// Is reports whether it is the given message.
func (i *ICMP) Is(message uint16) bool {
	return i != nil && i.Type == uint8(message>>8) && i.Code == uint8(message)
}

// newIP returns a packet with the header that fits the addresses.
func newIP(src, dst netip.Addr) Packet {
	if src.Is4() {
		return Packet{IPv4: &IPv4{Src: src, Dst: dst, TTL: 64}}
	}
	return Packet{IPv6: &IPv6{Src: src, Dst: dst, HopLimit: 64}}
}

// NewTCP returns a TCP segment.
func NewTCP(src, dst netip.AddrPort, flags Flags, payload []byte) Packet {
	p := newIP(src.Addr(), dst.Addr())
	p.TCP = &TCP{Src: src.Port(), Dst: dst.Port(), Flags: flags, Window: 65535}
	p.Payload = payload
	return p
}

// NewUDP returns a UDP datagram.
func NewUDP(src, dst netip.AddrPort, payload []byte) Packet {
	p := newIP(src.Addr(), dst.Addr())
	p.UDP = &UDP{Src: src.Port(), Dst: dst.Port()}
	p.Payload = payload
	return p
}

// NewEcho returns an echo request.
func NewEcho(src, dst netip.Addr, id, seq uint16, payload []byte) Packet {
	p := newIP(src, dst)
	p.ICMP = &ICMP{Type: EchoRequest >> 8, Rest: uint32(id)<<16 | uint32(seq)}
	if src.Is6() {
		p.ICMP.Type = EchoRequest6 >> 8
	}
	p.Payload = payload
	return p
}

// NewProtocol returns a packet of a protocol without a layer in this package.
func NewProtocol(src, dst netip.Addr, protocol uint8, payload []byte) Packet {
	p := newIP(src, dst)
	if p.IPv4 != nil {
		p.IPv4.Protocol = protocol
	} else {
		p.IPv6.NextHeader = protocol
	}
	p.Payload = payload
	return p
}

// NewError returns an ICMP error about a packet, addressed to its source. It quotes
// as much as routers do.
func NewError(from netip.Addr, message uint16, rest uint32, about Packet) Packet {
	about.Ethernet, about.Trailer = nil, nil
	p := newIP(from, about.Source().Addr())
	limit := 576
	if p.IPv6 != nil {
		limit = 1280
	}
	quoted := about.Build()
	quoted = quoted[:min(len(quoted), limit-len(p.Build())-8)]
	p.ICMP = &ICMP{Type: uint8(message >> 8), Code: uint8(message), Rest: rest}
	p.Payload = quoted
	return reparse(p)
}

// Clone returns a copy whose layers can be changed. Bytes are shared.
func (p Packet) Clone() Packet {
	p.Ethernet, p.IPv4, p.IPv6 = copied(p.Ethernet), copied(p.IPv4), copied(p.IPv6)
	p.TCP, p.UDP, p.ICMP = copied(p.TCP), copied(p.UDP), copied(p.ICMP)
	if p.ICMP != nil && p.ICMP.Quoted != nil {
		p.ICMP.Quoted = new(p.ICMP.Quoted.Clone())
	}
	return p
}

func copied[T any](layer *T) *T {
	if layer == nil {
		return nil
	}
	return new(*layer)
}

// reparse finds the layers of a packet that was put together from bytes.
func reparse(p Packet) Packet {
	if p.Ethernet != nil {
		return Parse(p.Build())
	}
	return ParseIP(p.Build())
}

// Protocol is what follows the IP header and its extensions.
func (p Packet) Protocol() uint8 {
	switch {
	case p.TCP != nil:
		return ProtoTCP
	case p.UDP != nil:
		return ProtoUDP
	case p.ICMP != nil && p.IPv6 != nil:
		return ProtoICMPv6
	case p.ICMP != nil:
		return ProtoICMP
	case p.IPv4 != nil:
		return p.IPv4.Protocol
	case p.IPv6 != nil:
		return p.IPv6.NextHeader
	}
	return 0
}

// Source and Destination are addresses and, if there are any, ports. They include ports of a
// truncated header, as ICMP errors may quote it.
func (p Packet) Source() netip.AddrPort {
	src, _ := p.addrs()
	port, _ := p.ports()
	return netip.AddrPortFrom(src, port)
}

// Destination, see Source.
func (p Packet) Destination() netip.AddrPort {
	_, dst := p.addrs()
	_, port := p.ports()
	return netip.AddrPortFrom(dst, port)
}

func (p Packet) addrs() (src, dst netip.Addr) {
	switch {
	case p.IPv4 != nil:
		return p.IPv4.Src, p.IPv4.Dst
	case p.IPv6 != nil:
		return p.IPv6.Src, p.IPv6.Dst
	}
	return src, dst
}

func (p Packet) ports() (src, dst uint16) {
	switch {
	case p.TCP != nil:
		return p.TCP.Src, p.TCP.Dst
	case p.UDP != nil:
		return p.UDP.Src, p.UDP.Dst
	}
	switch p.Protocol() {
	case ProtoTCP, ProtoUDP, ProtoSCTP:
		if f, _ := p.Fragment(); f.Offset == 0 && len(p.Payload) >= 4 {
			return binary.BigEndian.Uint16(p.Payload), binary.BigEndian.Uint16(p.Payload[2:])
		}
	}
	return 0, 0
}
