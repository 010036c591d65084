// SPDX-License-Identifier: Apache-2.0

package direct

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Types of ICMP and ICMPv6, and lengths of headers in bytes.
const (
	echoRequest4, echoReply4 = 8, 0
	echoRequest6, echoReply6 = 128, 129

	header4, header6, headerICMP, headerGeneve = 20, 40, 8, 16

	ttl = 64

	// inverted is the bit of a sequence number by which answers to probes with an option differ from all probes.
	inverted = 1 << 15
)

// probe identifies an echo request, and the reply to it. The cookie keeps those who did not see the request from answering it.
type probe struct {
	id       uint16
	round    uint16
	cookie   uint64
	dispatch lbmap.Dispatch
	sources  []netip.Prefix // of IP in IP
}

// request is an IP packet from one address to another that has an echo request with the same addresses in it, or an option with the latter.
// IP in IP comes from a prefix, if there is one: nodes have to take that too.
func (p probe) request(from, to netip.Addr) []byte {
	if from.Is4() {
		return p.wrap(ipv4, from, to, unix.IPPROTO_IPIP, unix.ETH_P_IP, ipv4(from, to, unix.IPPROTO_ICMP, p.icmp(echoRequest4, 0)))
	}
	const length = headerICMP + 8
	sum := sumOf(from.AsSlice()) + sumOf(to.AsSlice()) + length + unix.IPPROTO_ICMPV6
	return p.wrap(ipv6, from, to, unix.IPPROTO_IPV6, unix.ETH_P_IPV6, ipv6(from, to, unix.IPPROTO_ICMPV6, p.icmp(echoRequest6, sum)))
}

// wrap is a packet in another one, whose protocol is inIP unless the packet is in Geneve, as etherType. Or it is the packet with an option.
func (p probe) wrap(outer func(from, to netip.Addr, protocol byte, payload []byte) []byte, from, to netip.Addr, inIP byte, etherType uint16, inner []byte) []byte {
	switch p.dispatch {
	case lbmap.DispatchGeneve:
		return outer(from, to, unix.IPPROTO_UDP, geneve(etherType, inner))
	case lbmap.DispatchOpt:
		return withOption(inner, to)
	}
	for _, prefix := range p.sources {
		if prefix.Addr().Is4() == from.Is4() {
			from = prefix.Addr().Next()
		}
	}
	return outer(from, to, inIP, inner)
}

// withOption adds an option to an IP packet, as programs do (bpf/option.h): that it is for this address.
func withOption(b []byte, to netip.Addr) []byte {
	a := to.AsSlice()
	if to.Is4() {
		slices.Reverse(a)
		option := append([]byte{lbmap.OptionV4, 4 + 4, 0, 0}, a...)
		b = slices.Insert(b, header4, option...)
		b[0] += byte(len(option) / 4)
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
		b[10], b[11] = 0, 0
		binary.BigEndian.PutUint16(b[10:], fold(sumOf(b[:header4+len(option)])))
		return b
	}
	option := append([]byte{b[6], lbmap.OptionV6Units, lbmap.OptionV6, lbmap.OptionV6Len}, a...)
	b = slices.Insert(b, header6, append(option, 0, 0, 0, 0)...)
	b[6] = unix.IPPROTO_DSTOPTS
	binary.BigEndian.PutUint16(b[4:], uint16(len(b)-header6))
	return b
}

// geneve is a UDP datagram with an IP packet in Geneve, as programs send it (bpf/geneve.h).
func geneve(protocol uint16, inner []byte) []byte {
	b := make([]byte, headerGeneve, headerGeneve+len(inner))
	binary.BigEndian.PutUint16(b, lbmap.GeneveFirstSport)
	binary.BigEndian.PutUint16(b[2:], lbmap.GenevePort)
	binary.BigEndian.PutUint16(b[4:], uint16(headerGeneve+len(inner)))
	binary.BigEndian.PutUint16(b[10:], protocol)
	binary.BigEndian.PutUint32(b[12:], lbmap.GeneveVni<<8)
	return append(b, inner...)
}

// icmp is the message; sum is that of its pseudo header.
func (p probe) icmp(kind byte, sum uint32) []byte {
	b := make([]byte, headerICMP, headerICMP+8)
	b[0] = kind
	binary.BigEndian.PutUint16(b[4:], p.id)
	binary.BigEndian.PutUint16(b[6:], p.round&^inverted)
	b = binary.BigEndian.AppendUint64(b, p.cookie)
	binary.BigEndian.PutUint16(b[2:], fold(sum+sumOf(b)))
	return b
}

// isReply reports whether an IP packet is a reply to the probe, and whose.
func (p probe) isReply(b []byte) (from netip.Addr, ok bool) {
	var message []byte
	var kind byte
	switch {
	case len(b) >= header4 && b[0] == 0x45 && b[9] == unix.IPPROTO_ICMP:
		from, message, kind = netip.AddrFrom4([4]byte(b[12:16])), b[header4:], echoReply4
	case len(b) >= header6 && b[0]>>4 == 6 && b[6] == unix.IPPROTO_ICMPV6:
		from, message, kind = netip.AddrFrom16([16]byte(b[8:24])), b[header6:], echoReply6
	default:
		return from, false
	}
	// A system that does not know the option answers too, by the number that it got.
	return from, len(message) >= headerICMP+8 && message[0] == kind &&
		(p.dispatch != lbmap.DispatchOpt || binary.BigEndian.Uint16(message[6:])&inverted != 0) &&
		binary.BigEndian.Uint16(message[4:]) == p.id && binary.BigEndian.Uint64(message[headerICMP:]) == p.cookie
}

func ipv4(from, to netip.Addr, protocol byte, payload []byte) []byte {
	b := make([]byte, header4, header4+len(payload))
	b[0] = 0x45
	binary.BigEndian.PutUint16(b[2:], uint16(header4+len(payload)))
	b[6] = 0x40 // do not fragment
	b[8], b[9] = ttl, protocol
	copy(b[12:], from.AsSlice())
	copy(b[16:], to.AsSlice())
	binary.BigEndian.PutUint16(b[10:], fold(sumOf(b)))
	return append(b, payload...)
}

func ipv6(from, to netip.Addr, protocol byte, payload []byte) []byte {
	b := make([]byte, header6, header6+len(payload))
	b[0] = 0x60
	binary.BigEndian.PutUint16(b[4:], uint16(len(payload)))
	b[6], b[7] = protocol, ttl
	copy(b[8:], from.AsSlice())
	copy(b[24:], to.AsSlice())
	return append(b, payload...)
}

// sumOf adds up words in network byte order; b has an even length.
func sumOf(b []byte) (sum uint32) {
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	return sum
}

// fold is the checksum of a sum (RFC 1071).
func fold(sum uint32) uint16 {
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
