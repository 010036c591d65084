// SPDX-License-Identifier: Apache-2.0

//go:build linux

package xtables

import (
	"testing"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// TestGeneration: each table of a restore counts as one change, and reading counts as none.
func TestGeneration(t *testing.T) {
	n := newNode(t, NFT)
	tools := n.tools
	generation := func() (g uint32) {
		n.do(func() error {
			var ok bool
			var err error
			if g, ok, err = tools.Generation(); !ok {
				t.Error("the nft variant has no generation")
			}
			return err
		})
		return g
	}
	restore := func(input string) { n.restore(inet.IPv4, input) }
	restore("*nat\n:A - [0:0]\n-A A -j RETURN\nCOMMIT\n*filter\n:A - [0:0]\nCOMMIT\n*mangle\n:A - [0:0]\nCOMMIT\n")
	before := generation()
	for i, step := range []struct {
		do   func()
		want uint32
	}{
		{func() {}, 0},
		{func() {
			n.do(func() error {
				_, err := tools.SaveAll(t.Context(), inet.IPv4, "nat", "filter", "mangle")
				return err
			})
		}, 0},
		{func() { restore("*nat\n:B - [0:0]\n-A B -j RETURN\n-I A 1 -j B\nCOMMIT\n") }, 1},
		{func() { restore("*nat\n:A - [0:0]\n:B - [0:0]\n-X B\nCOMMIT\n*filter\n-A A -j RETURN\nCOMMIT\n") }, 2},
		{func() {
			if out, err := n.at.Command(t.Context(), "iptables-nft", "-I", "A", "-j", "ACCEPT").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}, 1},
	} {
		step.do()
		after := generation()
		if after-before != step.want {
			t.Errorf("step %d: %d changes, want %d", i, after-before, step.want)
		}
		before = after
	}
	if _, ok, err := n.open(Legacy).Generation(); ok || err != nil {
		t.Errorf("the legacy variant has a generation, or an error: %v", err)
	}
}
