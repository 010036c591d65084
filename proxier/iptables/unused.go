// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"slices"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/xtables"
)

// deleteUnused deletes the chains that are not used any more, and empties those that cannot
// be deleted.
func (f *family) deleteUnused(ctx context.Context, tables map[string]*xtables.Table) error {
	kept := map[string]struct{}{} // besides those that service ports use
	for _, p := range f.ports.AllRefused() {
		keepReached(kept, tables["nat"], p.Applied.chains)
	}
	text := newText()
	drop := func(table, name string, empty bool) {
		switch {
		case !has(f.referenced, name):
			text.table(table).drop(name)
		case !empty:
			text.table(table).declare(name)
			f.logReferenced(ctx, name)
		}
	}
	nothing := stampOf(nil)
	for name, s := range f.kernel.chains {
		if f.uses[name] == 0 && !has(kept, name) {
			drop("nat", name, s == nothing)
		}
	}
	for _, s := range f.shared {
		chains := s.chains()
		for _, c := range tables[s.table()].Chains {
			if s.owns(c.Name) && !has(chains, c.Name) {
				drop(s.table(), c.Name, len(c.Rules) == 0)
				delete(s.reached, c.Name)
			}
		}
	}
	if tables["filter"].Chain(drainChain) != nil {
		drop("filter", drainChain, false) // rules keep conntrack active themselves
	}
	for part := range text.inParts(f.batchSize()) {
		if err := f.restoreDrops(ctx, part); err != nil {
			return err
		}
		nat := part.table("nat")
		for _, name := range nat.declared {
			if has(f.kernel.chains, name) {
				f.kernel.set(name, nothing)
			}
		}
		for _, name := range nat.dropped {
			f.kernel.forget(name)
		}
	}
	return nil
}

// keepReached adds the chains that chains lead to, directly or not.
func keepReached(kept map[string]struct{}, nat *xtables.Table, chains []string) {
	for _, name := range chains {
		c := nat.Chain(name)
		if c == nil {
			continue
		}
		for _, r := range c.Rules {
			if to := jumpOf(r); isOfServicePort(to) && !has(kept, to) {
				kept[to] = struct{}{}
				keepReached(kept, nat, []string{to})
			}
		}
	}
}

// restoreDrops writes a text that deletes chains, but for those that cannot be deleted.
func (f *family) restoreDrops(ctx context.Context, t *text) error {
	for {
		err := f.restore(ctx, t)
		name := f.noteReferenced(err, t)
		if name == "" {
			return err
		}
		f.logReferenced(ctx, name)
		for _, part := range t.tables {
			part.dropped = slices.DeleteFunc(part.dropped, func(c string) bool { return c == name })
		}
	}
}

// noteReferenced notes and returns the chain that could not be deleted, if that is why a text
// was refused. The rule that leads there was added after the tables were read, or the tools
// do not show it.
func (f *family) noteReferenced(err error, t *text) string {
	var refused *xtables.RestoreError
	if !errors.As(err, &refused) {
		return ""
	}
	name := t.droppedAt(refused.Line)
	if !isOurs(name) || has(f.referenced, name) {
		return ""
	}
	f.referenced[name] = struct{}{}
	return name
}

func (f *family) logReferenced(ctx context.Context, name string) {
	klog.FromContext(ctx).Info("Cannot delete unused chain: a foreign rule still references it", "family", f.name, "chain", name)
}
