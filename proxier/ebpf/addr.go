// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"net/netip"
	"unsafe"
)

// bpfAddr is an address as the programs see it: 16 bytes in network order,
// IPv4 mapped into IPv6.
func bpfAddr(a netip.Addr) [4]uint32 {
	b := a.As16()
	return *(*[4]uint32)(unsafe.Pointer(&b))
}

func goAddr(a [4]uint32) netip.Addr {
	return netip.AddrFrom16(*(*[16]byte)(unsafe.Pointer(&a))).Unmap()
}

// bpfPort is a port in network byte order.
func bpfPort(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}

func goAddrPort(a [4]uint32, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(goAddr(a), bpfPort(port))
}

// unspecifiedOf is the unspecified address of the same family.
func unspecifiedOf(a [4]uint32) [4]uint32 {
	if goAddr(a).Is4() {
		return bpfAddr(netip.IPv4Unspecified())
	}
	return bpfAddr(netip.IPv6Unspecified())
}

func bpfPrefix(p netip.Prefix) nodePrefix {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	var mask [16]byte
	for i := range bits {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return nodePrefix{Addr: bpfAddr(p.Addr()), Mask: bpfAddr(netip.AddrFrom16(mask))}
}
