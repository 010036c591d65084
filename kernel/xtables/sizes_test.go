// SPDX-License-Identifier: Apache-2.0

//go:build linux

package xtables

import (
	"testing"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// TestSizes: in the legacy variant, rules and chains that come or go change the sizes of their
// family's tables, and reading changes none.
func TestSizes(t *testing.T) {
	for f := range inet.Families {
		n := newNode(t, Legacy)
		sizes := func() (text string) {
			n.do(func() error {
				var ok bool
				var err error
				if text, ok, err = n.tools.Sizes(f, "nat", "filter", "mangle"); !ok {
					t.Error("the legacy variant has no sizes")
				}
				return err
			})
			return text
		}
		n.restore(f, "*nat\n:A - [0:0]\n-A A -j RETURN\nCOMMIT\n*filter\n:A - [0:0]\nCOMMIT\n")
		last := sizes()
		for _, step := range []struct {
			name    string
			do      func()
			changes bool
		}{
			{"nothing", func() {}, false},
			{"read", func() {
				n.do(func() error { _, err := n.tools.Save(t.Context(), f, "nat"); return err })
			}, false},
			{"a jump", func() { n.restore(f, "*nat\n-I OUTPUT 1 -j A\nCOMMIT\n") }, true},
			{"a chain", func() { n.restore(f, "*filter\n:B - [0:0]\nCOMMIT\n") }, true},
			{"a flushed chain", func() { n.restore(f, "*nat\n-F OUTPUT\nCOMMIT\n") }, true},
		} {
			step.do()
			now := sizes()
			if (now != last) != step.changes {
				t.Errorf("%s, %s: %s, was %s", f, step.name, now, last)
			}
			last = now
		}
	}
	n := newNode(t, NFT)
	n.do(func() error {
		_, ok, err := n.tools.Sizes(inet.IPv4, "nat")
		if ok {
			t.Error("the nft variant has sizes")
		}
		return err
	})
}
