// SPDX-License-Identifier: Apache-2.0

//go:build linux

package xtables

import (
	"testing"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// TestUses: in the nft variant, rules of a chain and jumps to it change its use.
func TestUses(t *testing.T) {
	for f := range inet.Families {
		n := newNode(t, NFT)
		uses := func() (text string) {
			n.do(func() error {
				var ok bool
				var err error
				if text, ok, err = n.tools.Uses(f, ChainName{"nat", "A"}, ChainName{"filter", "A"}); !ok {
					t.Error("the nft variant has no uses")
				}
				return err
			})
			return text
		}
		if got, want := uses(), "nat A: false 0\nfilter A: false 0\n"; got != want {
			t.Errorf("%s, at first: %q, want %q", f, got, want)
		}
		for _, step := range []struct{ name, input, want string }{
			{"two rules", "*nat\n:A - [0:0]\n-A A -j RETURN\n-A A -j ACCEPT\nCOMMIT\n", "nat A: true 2\nfilter A: false 0\n"},
			{"a jump", "*nat\n-A OUTPUT -j A\nCOMMIT\n*filter\n:A - [0:0]\nCOMMIT\n", "nat A: true 3\nfilter A: true 0\n"},
			{"another chain", "*nat\n:B - [0:0]\n-A B -j RETURN\nCOMMIT\n", "nat A: true 3\nfilter A: true 0\n"},
			{"no jump", "*nat\n-F OUTPUT\nCOMMIT\n", "nat A: true 2\nfilter A: true 0\n"},
			{"no chain", "*nat\n-F A\n-X A\nCOMMIT\n", "nat A: false 0\nfilter A: true 0\n"},
		} {
			n.restore(f, step.input)
			if got := uses(); got != step.want {
				t.Errorf("%s, %s: %q, want %q", f, step.name, got, step.want)
			}
		}
	}
	if _, ok, err := newNode(t, Legacy).tools.Uses(inet.IPv4, ChainName{"nat", "A"}); ok || err != nil {
		t.Errorf("the legacy variant has uses, or an error: %v", err)
	}
}
