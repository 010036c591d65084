// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"math/bits"
	"net/netip"
	"slices"
)

// Cover is a few prefixes that contain many addresses, and not much else if those are allocated from a few
// ranges.
type Cover struct{ list []netip.Prefix }

// coverBits is the number of host bits of the smallest prefix.
const coverBits = 8

// Add makes the cover contain an address. It reports whether the cover changed. If it then has more prefixes
// than limit, the two nearest ones become one.
func (c *Cover) Add(a netip.Addr, limit int) bool {
	if slices.ContainsFunc(c.list, func(p netip.Prefix) bool { return p.Contains(a) }) {
		return false
	}
	c.list = append(c.list, netip.PrefixFrom(a, a.BitLen()-coverBits).Masked())
	for len(c.list) > limit {
		c.merge()
	}
	return true
}

// merge replaces two prefixes by the smallest one that contains both.
func (c *Cover) merge() {
	var best netip.Prefix
	for i, p := range c.list {
		for _, q := range c.list[:i] {
			if both, ok := union(p, q); ok && (!best.IsValid() || both.Addr().BitLen()-both.Bits() < best.Addr().BitLen()-best.Bits()) {
				best = both
			}
		}
	}
	c.list = slices.DeleteFunc(c.list, best.Overlaps)
	c.list = append(c.list, best)
}

// union is the smallest prefix that contains two of the same family.
func union(p, q netip.Prefix) (netip.Prefix, bool) {
	if p.Addr().BitLen() != q.Addr().BitLen() {
		return netip.Prefix{}, false
	}
	n := 0
	b := q.Addr().AsSlice()
	for i, x := range p.Addr().AsSlice() {
		same := bits.LeadingZeros8(x ^ b[i])
		n += same
		if same < 8 {
			break
		}
	}
	return netip.PrefixFrom(p.Addr(), min(n, p.Bits(), q.Bits())).Masked(), true
}
