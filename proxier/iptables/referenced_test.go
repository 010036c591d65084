// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
)

// hidingTools do not show a foreign chain, as the iptables programs do not show chains that were
// written by nft.
type hidingTools struct {
	Tools
	chain string
}

func (t *hidingTools) SaveAll(ctx context.Context, f proxier.Family, names ...string) (map[string]*xtables.Table, error) {
	tables, err := t.Tools.SaveAll(ctx, f, names...)
	for _, table := range tables {
		shown := &xtables.Table{Name: table.Name}
		for _, c := range table.Chains {
			if c.Name != t.chain {
				shown.Chains = append(shown.Chains, c)
			}
		}
		tables[table.Name] = shown
	}
	return tables, err
}

func TestReferencedChains(t *testing.T) {
	for name, hidden := range map[string]bool{"shown": false, "hidden": true} {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/restart=%v", name, restart), func(t *testing.T) {
				var tools Tools = newSimulated()
				if hidden {
					tools = &hidingTools{tools, "ADMIN"}
				}
				n := unstartedNode(t, tools)
				iptablestest.ReferencedChains(t, n.Node, n.restart, restart, hidden)
			})
		}
	}
}
