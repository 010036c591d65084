// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
)

// observed has the arguments of the last calls of an Observer, by family and table.
type observed struct {
	written, total [proxier.Families]map[string]int
	failed         []bool // whether each was partial
}

func (o *observed) RestoreFailed(_ proxier.Family, partial bool) {
	o.failed = append(o.failed, partial)
}

func (o *observed) Rules(family proxier.Family, table string, written, total int) {
	if o.total[family] == nil {
		o.written[family], o.total[family] = map[string]int{}, map[string]int{}
	}
	o.written[family][table], o.total[family][table] = written, total
}

// TestCounts: an Observer gets the number of existing rules, also after changes, whether shared
// chains are split or not.
func TestCounts(t *testing.T) {
	n := unstartedNode(t, newSimulated())
	seen := &observed{}
	opts := n.options()
	opts.Observer = seen
	n.Start(newSimulatedTier(opts), iptablestest.Facts, proxier.Policy{})
	check := func(what string) {
		t.Helper()
		for family := range proxier.Families {
			there := map[string]int{}
			for at, rules := range contents(t, n.Tools, family) {
				if table, chain, _ := strings.Cut(at, " "); strings.HasPrefix(chain, "KUBE-") {
					there[table] += len(rules)
				}
			}
			for _, table := range []string{"nat", "filter"} {
				if got := seen.total[family][table]; got != there[table] || got == 0 {
					t.Errorf("%s: the Observer got %d rules of %s in %s, want %d", what, got, table, family, there[table])
				}
			}
		}
	}
	n.Serve(0, 10, 2)
	n.MustSync()
	check("first")
	if wrote, total := seen.written[proxier.IPv4]["nat"], seen.total[proxier.IPv4]["nat"]; wrote != total {
		t.Errorf("the first sync wrote %d rules of %d", wrote, total)
	}
	n.Serve(10, 300, 3)
	n.MustSync()
	check("many")
	n.Serve(4, 1, 1)
	n.MustSync() // decides whether to split chains before it writes
	check("a tree")
	n.Serve(5, 1, 1)
	n.MustSync()
	check("an endpoint less")
	if wrote := seen.written[proxier.IPv4]["nat"]; wrote == 0 || wrote > 10 {
		t.Errorf("a change wrote %d rules", wrote)
	}
	for i := 20; i < 300; i++ {
		n.OnServiceDelete(service(i))
	}
	n.MustSync() // which may leave rules that jump to empty chains
	n.MustFullSync()
	check("after most went")
	if len(seen.failed) > 0 {
		t.Errorf("failures: %v", seen.failed)
	}
}
