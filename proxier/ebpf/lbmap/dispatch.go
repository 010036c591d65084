// SPDX-License-Identifier: Apache-2.0

package lbmap

import "net/netip"

// Dispatch is in what form packets of direct server return are sent to other nodes: DispatchIPIP, DispatchGeneve or DispatchOpt.
type Dispatch uint8

// Spread is a prefix of source addresses, as programs have it.
type Spread = tcSpread

// SpreadsOf are the prefixes of each family, IPv4 first; 0 where there is none.
func SpreadsOf(prefixes []netip.Prefix) (spreads [2]Spread) {
	for _, p := range prefixes {
		p = p.Masked()
		s, bits := &spreads[0], p.Bits()+96
		if p.Addr().Is6() {
			s, bits = &spreads[1], p.Bits()
		}
		var hosts [16]byte
		for bit := bits; bit < 128; bit++ {
			hosts[bit/8] |= 0x80 >> (bit % 8)
		}
		s.Addr, s.Hosts = FromAddr(p.Addr()), FromAddr(netip.AddrFrom16(hosts))
	}
	return spreads
}
