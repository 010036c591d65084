// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"encoding/binary"
	"net/netip"
	"unsafe"
)

// FromAddr returns an address in the format of the programs: 16 bytes in network order, IPv4 mapped
// into IPv6.
func FromAddr(a netip.Addr) [4]uint32 {
	b := a.As16()
	return *(*[4]uint32)(unsafe.Pointer(&b))
}

// ToAddr is the inverse of FromAddr.
func ToAddr(a [4]uint32) netip.Addr {
	return netip.AddrFrom16(*(*[16]byte)(unsafe.Pointer(&a))).Unmap()
}

// NetworkPort converts a port to network byte order, and back.
func NetworkPort(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}

// ToAddrPort converts an address and port from the format of the programs.
func ToAddrPort(a [4]uint32, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(ToAddr(a), NetworkPort(port))
}

// Unspecified is the unspecified address of the same family.
func Unspecified(a [4]uint32) [4]uint32 {
	if ToAddr(a).Is4() {
		return FromAddr(netip.IPv4Unspecified())
	}
	return FromAddr(netip.IPv6Unspecified())
}

// FromPrefix returns a prefix in the format of the programs: an address and a mask.
func FromPrefix(p netip.Prefix) Prefix {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	var mask [16]byte
	for i := range bits {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return Prefix{Addr: FromAddr(p.Addr()), Mask: FromAddr(netip.AddrFrom16(mask))}
}

// NewRangeKey is the key of a prefix in tdm_range.
func NewRangeKey(service uint32, p netip.Prefix) RangeKey {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return RangeKey{PrefixLen: uint32(32 + bits), Service: service, Addr: FromAddr(p.Addr())}
}

// ranges4 are the addresses of IPv4, as maps have them.
var ranges4 = netip.MustParsePrefix("::ffff:0:0/96")

// SplitRange returns prefixes that have the addresses of one, but those of IPv4 only if it is one of IPv4. A wide prefix of IPv6, such as
// ::/1, contains the IPv4-mapped addresses, and so would let in every IPv4 client of a Service that has ranges of both families.
func SplitRange(p netip.Prefix) (list []netip.Prefix) {
	p = p.Masked()
	if p.Addr().Is4() || p.Bits() >= ranges4.Bits() || !p.Contains(ranges4.Addr()) {
		return []netip.Prefix{p}
	}
	for bits := p.Bits() + 1; bits <= ranges4.Bits(); bits++ { // the half that ranges4 is not in
		b := ranges4.Addr().As16()
		b[(bits-1)/8] ^= 0x80 >> ((bits - 1) % 8)
		list = append(list, netip.PrefixFrom(netip.AddrFrom16(b), bits).Masked())
	}
	return list
}
