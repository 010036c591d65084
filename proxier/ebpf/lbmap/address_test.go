// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// TestSplitRange: the parts of a range have the same addresses, but a wide one of IPv6 has none of IPv4, and they do not overlap.
func TestSplitRange(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	mapped := netip.MustParsePrefix("::ffff:0:0/96")
	for _, text := range []string{"::/0", "::/1", "8000::/1", "::/8", "::ffff:0:0/95", "::fffe:0:0/95", "2001:db8::/32", "2001:db8::1/128", "0.0.0.0/1", "198.51.100.1/32", "::/127"} {
		p := netip.MustParsePrefix(text)
		parts := SplitRange(p)
		for i, a := range parts {
			if a != a.Masked() || slices.ContainsFunc(parts[i+1:], a.Overlaps) {
				t.Errorf("%s: part %s of %v", text, a, parts)
			}
		}
		for range 2000 {
			b := mapped.Addr().As16()
			for i := r.IntN(16); i < 16; i++ { // addresses near those of IPv4 as well
				b[i] = byte(r.Uint32())
			}
			a := netip.AddrFrom16(b)
			if p.Addr().Is4() {
				a = netip.AddrFrom4([4]byte(b[12:]))
			}
			want := p.Contains(a) && (p.Addr().Is4() || !mapped.Contains(a))
			if got := slices.ContainsFunc(parts, func(part netip.Prefix) bool { return part.Contains(a) }); got != want {
				t.Fatalf("%s: %s is in the parts: %v", text, a, got)
			}
		}
	}
	if len(SplitRange(netip.MustParsePrefix("::/0"))) != 96 || len(SplitRange(netip.MustParsePrefix("2001:db8::/32"))) != 1 {
		t.Error("the number of parts is another one")
	}
}
