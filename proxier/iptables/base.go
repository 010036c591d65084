// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"slices"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/xtables"
)

// base writes the missing chains and jumps that do not depend on service ports.
func (f *family) base(tables map[string]*xtables.Table) *text {
	t := newText()
	nat, filter := f.static()
	chains := slices.Clip(f.extra.Chains)
	for table, list := range map[string][]chain{"nat": nat, "filter": filter} {
		for _, c := range list {
			chains = append(chains, Chain{Table: table, Name: c.name, Rules: append(f.extra.before(table, c.name), c.rules...)})
		}
	}
	for _, c := range chains {
		if there := tables[c.Table].Chain(c.Name); there == nil || !slices.Equal(there.Rules, c.Rules) {
			t.table(c.Table).write(c.Name, c.Rules)
		}
	}
	for _, s := range f.shared {
		if tables[s.table()].Chain(s.root()) == nil {
			t.table(s.table()).write(s.root(), s.tail)
			delete(s.stale, s.root())
			s.reached[s.root()] = struct{}{}
			if len(s.chains()[s.root()]) > len(s.tail) {
				s.stale[s.root()] = struct{}{}
			}
		}
	}
	for name, table := range tables {
		if table.Chain(canaryChain) == nil {
			t.table(name).write(canaryChain, nil)
		}
	}
	addJumps(t, tables, append(jumps(f.loopback), f.extra.Jumps...))
	return t
}

// ensureCounters creates counters that another program has deleted: a rule that names a
// missing one is refused. While a rule names it, it cannot be deleted.
func (f *family) ensureCounters(ctx context.Context) {
	f.counting = f.counts
	if !f.counts {
		return
	}
	if err := ensureCounters(f.opts.Counters); err != nil {
		f.counting = false
		klog.FromContext(ctx).Error(err, "Rules do not count packets until the next full sync", "family", f.name)
	}
}

// addJumps writes the jumps that are missing in the kernel's chains, or in another order.
func addJumps(t *text, tables map[string]*xtables.Table, list []Jump) {
	type chainOf struct{ table, from string }
	wanted := map[chainOf][]string{}
	for _, j := range list {
		wanted[chainOf{j.Table, j.From}] = append(wanted[chainOf{j.Table, j.From}], j.Rule)
	}
	for at, rules := range wanted {
		var there []string
		if c := tables[at.table].Chain(at.from); c != nil {
			there = c.Rules
		} else {
			t.table(at.table).declare(at.from)
		}
		if inOrder(there, rules) {
			continue
		}
		for _, r := range slices.Backward(rules) {
			if slices.Contains(there, r) {
				t.table(at.table).delete(at.from, r)
			}
			t.table(at.table).insert(at.from, r)
		}
	}
}
