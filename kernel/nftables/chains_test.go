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
		"add table netdev guard", "add chain netdev guard in { type filter hook ingress device eth0 priority 0; policy drop; }",
		"add chain inet guard in { type filter hook ingress device eth0 priority 1; }",
	} {
		if out, err := n.Command(t.Context(), "nft", command).CombinedOutput(); err != nil {
			t.Fatalf("nft %s: %v: %s", command, err, out)
		}
	}
	var list []Chain
	err := n.Do(func() (err error) { list, err = Chains(t.Context()); return err })
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []Chain{
		{Family: "inet", Table: "guard", Name: "early", Type: "filter", Hook: "prerouting", Priority: -200, Policy: "drop"},
		{Family: "inet", Table: "guard", Name: "nested"},
		{Family: "netdev", Table: "guard", Name: "in", Type: "filter", Hook: HookIngress, Policy: "drop"},
		{Family: "inet", Table: "guard", Name: "in", Type: "filter", Hook: HookIngress, Priority: 1, Policy: "accept"},
		{Family: "ip", Table: "quiet", Name: "out", Type: "nat", Hook: "postrouting", Priority: 100, Policy: "accept"},
	} {
		if !slices.Contains(list, want) {
			t.Errorf("no %+v in %+v", want, list)
		}
	}
}
