// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

func TestCover(t *testing.T) {
	for _, test := range []struct {
		name  string
		limit int
		addrs []string
		want  []string
	}{
		{"none", 4, nil, nil},
		{"neighbours", 4, []string{"10.96.0.1", "10.96.0.10", "fd00::1"}, []string{"10.96.0.0/24", "fd00::/120"}},
		{"the nearest become one", 3, []string{"10.96.0.1", "172.20.0.1", "10.96.3.1", "fd00::1"}, []string{"10.96.0.0/22", "172.20.0.0/24", "fd00::/120"}},
		{"one that is inside is dropped", 3, []string{"10.96.0.1", "172.20.0.1", "10.96.1.1", "10.96.3.1", "fd00::1"}, []string{"10.96.0.0/22", "172.20.0.0/24", "fd00::/120"}},
		{"families stay apart", 2, []string{"10.96.0.1", "fd00::1", "fd00:ffff::1", "192.0.2.1"}, []string{"0.0.0.0/0", "fd00::/16"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var c Cover
			for _, a := range test.addrs {
				if !c.Add(netip.MustParseAddr(a), test.limit) {
					t.Logf("%s is covered already", a)
				}
			}
			var got []string
			for _, p := range c.list {
				got = append(got, p.String())
			}
			slices.Sort(got)
			if !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

// TestCoverOfManyAddresses: every address is covered, and two ranges stay two.
func TestCoverOfManyAddresses(t *testing.T) {
	var c Cover
	r := rand.New(rand.NewPCG(1, 2))
	var all []netip.Addr
	for range 10_000 {
		for _, first := range []byte{10, 172} {
			a := netip.AddrFrom4([4]byte{first, 16 + byte(r.IntN(16)), byte(r.IntN(256)), byte(r.IntN(256))})
			c.Add(a, 8)
			all = append(all, a)
		}
	}
	for _, a := range all {
		if !slices.ContainsFunc(c.list, func(p netip.Prefix) bool { return p.Contains(a) }) {
			t.Fatalf("%s is not in %v", a, c.list)
		}
	}
	for _, p := range c.list {
		if p.Bits() < 12 {
			t.Errorf("%s is wider than the ranges", p)
		}
	}
	if len(c.list) > 8 {
		t.Errorf("%d prefixes", len(c.list))
	}
}
