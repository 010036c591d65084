// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"os/exec"
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/test/lab"
)

// TestChains reads what nft wrote.
func TestChains(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	if _, err := exec.LookPath("nft"); err != nil {
		lab.SkipOrFail(t, err)
	}
	for _, command := range []string{
		"add table inet guard",
		"add chain inet guard early { type filter hook prerouting priority -200; policy drop; }",
		"add chain inet guard nested",
		"add table ip quiet", "add chain ip quiet out { type nat hook postrouting priority 100; }", "add rule ip quiet out masquerade",
		"add table ip6 nested", "add chain ip6 nested a", "add rule ip6 nested a tcp dport 80 drop",
		"add table ip rejects", "add chain ip rejects a", "add rule ip rejects a tcp dport 80 reject",
	} {
		if out, err := n.Command(t.Context(), "nft", command).CombinedOutput(); err != nil {
			t.Fatalf("nft %s: %v: %s", command, err, out)
		}
	}
	var list []Chain
	drops := map[string]bool{}
	err := n.Do(func() (err error) {
		if list, err = Chains(t.Context()); err != nil {
			return err
		}
		for _, c := range list {
			if drops[c.Table], err = Drops(t.Context(), c.Family, c.Table); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []Chain{
		{Family: "inet", Table: "guard", Name: "early", Type: "filter", Hook: "prerouting", Priority: -200, Policy: "drop"},
		{Family: "inet", Table: "guard", Name: "nested"},
		{Family: "ip", Table: "quiet", Name: "out", Type: "nat", Hook: "postrouting", Priority: 100, Policy: "accept"},
	} {
		if !slices.Contains(list, want) {
			t.Errorf("no %+v in %+v", want, list)
		}
	}
	for table, want := range map[string]bool{"guard": false, "quiet": false, "nested": true, "rejects": true} {
		if drops[table] != want {
			t.Errorf("table %s drops: %v", table, !want)
		}
	}
}
