// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"cmp"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/tandem-proxy/tandem/kernel/xtables"
)

// compare takes over what the kernel has. Service ports and chains that differ from what is
// desired are pending, or stale, afterwards. It reports whether there are rules of an earlier
// process, or of upstream, that serve until all others are written.
func (f *family) compare(tables map[string]*xtables.Table) (adopting bool) {
	f.kernel.clear()
	for _, c := range tables["nat"].Chains {
		if isOfServicePort(c.Name) {
			f.kernel.set(strings.Clone(c.Name), stampOf(c.Rules)) // else all that was read would be kept
		}
	}
	f.findReferenced(tables)
	return f.compareShared(tables, f.comparePorts(tables))
}

// findReferenced finds the chains of the proxy that foreign rules lead to.
func (f *family) findReferenced(tables map[string]*xtables.Table) {
	clear(f.referenced)
	for _, table := range tables {
		for _, c := range table.Chains {
			if isOurs(c.Name) {
				continue
			}
			for _, r := range c.Rules {
				if to := jumpOf(r); isOurs(to) {
					f.referenced[strings.Clone(to)] = struct{}{}
				}
			}
		}
	}
}

// comparePorts finds out which service ports are in the kernel as desired. All others are
// pending; their existing chains and rules count as applied, even those of other processes. It
// also counts the rules that shared chains will have; a rule that several service ports share
// counts once.
func (f *family) comparePorts(tables map[string]*xtables.Table) (desired [sharedCount]int) {
	f.ports.Retry()
	clear(f.uses)
	f.rendered = map[uint32]portRules{}
	there := f.entriesOf(tables)
	var rules [sharedCount]map[string]struct{}
	for s := range rules {
		rules[s] = map[string]struct{}{}
	}
	for list := range slices.Chunk(f.pendingFirst(), renderedAtOnce) {
		for i, r := range f.renderAll(list) {
			index := list[i]
			item := f.ports.Get(index)
			for _, e := range r.entries {
				rules[e.shared][e.rule] = struct{}{}
			}
			state := item.Applied
			f.count(state.entries, -1)
			state.entries = slices.DeleteFunc(union(state.entries, r.entries), func(e entry) bool { return !has(there[e.shared], e.rule) })
			f.count(state.entries, 1)
			state.chains = slices.DeleteFunc(union(state.chains, r.names), func(name string) bool { return !has(f.kernel.chains, name) })
			for _, name := range state.chains {
				f.uses[name]++
			}
			if item.Wanted() && f.isApplied(&state, &r) {
				f.ports.Done(index, state)
				continue
			}
			f.ports.Adopt(index, state)
			f.rendered[index] = r
		}
	}
	for s := range rules {
		desired[s] = len(rules[s])
	}
	return desired
}

// pendingFirst are all service ports: the pending ones in their order, then the others in
// the order of their indices.
func (f *family) pendingFirst() []uint32 {
	list := make([]uint32, 0, f.ports.Len())
	for index := range f.ports.Pending() {
		list = append(list, index)
	}
	pending := len(list)
	for index := range f.ports.All() {
		if !f.ports.IsPending(index) {
			list = append(list, index)
		}
	}
	slices.SortFunc(list[pending:], cmp.Compare[uint32])
	return list
}

// entriesOf are the rules of shared chains in the kernel.
func (f *family) entriesOf(tables map[string]*xtables.Table) (there [sharedCount]map[string]struct{}) {
	for i, s := range f.shared {
		there[i] = map[string]struct{}{}
		for _, c := range tables[s.table()].Chains {
			if !s.owns(c.Name) {
				continue
			}
			for _, r := range c.Rules {
				there[i][r] = struct{}{}
			}
		}
	}
	return there
}

// isApplied reports whether the kernel has exactly the rules of a service port.
func (f *family) isApplied(state *portState, r *portRules) bool {
	return sameSet(state.entries, r.entries) && sameSet(state.chains, r.names) &&
		!slices.ContainsFunc(r.chains, func(c chain) bool { return !f.kernel.is(c.name, c.stamp) })
}

// count counts rules into the shared chains, or out of them.
func (f *family) count(entries []entry, by int) {
	for _, e := range entries {
		f.shared[e.shared].change(e.slot, e.rule, by)
	}
}

// compareShared chooses the shape of shared chains, and finds those that differ.
func (f *family) compareShared(tables map[string]*xtables.Table, desired [sharedCount]int) (adopting bool) {
	for i, s := range f.shared {
		s.split = s.fitsSplit(desired[i])
		clear(s.stale)
		table := tables[s.table()]
		for name, rules := range s.chains() {
			tail := 0
			if name == s.root() {
				tail = len(s.tail)
			}
			there := table.Chain(name)
			if there != nil && sameContent(there.Rules, rules, tail) {
				continue
			}
			s.stale[name] = struct{}{}
			if there != nil && len(there.Rules) > 0 {
				adopting = true
			}
		}
		clear(s.reached)
		if root := table.Chain(s.root()); root != nil {
			s.reached[s.root()] = struct{}{}
			for _, r := range root.Rules {
				if to := jumpOf(r); table.Chain(to) != nil && s.owns(to) {
					s.reached[strings.Clone(to)] = struct{}{} // as in compare
				}
			}
		}
	}
	return adopting
}

// render is what is desired of a service port.
func (f *family) render(index uint32) portRules {
	if r, ok := f.rendered[index]; ok {
		return r
	}
	if p := f.ports.Get(index); p.Wanted() {
		return f.renderer.render(p.Desired())
	}
	return portRules{}
}

// renderedAtOnce bounds the memory that is needed where nothing differs.
const renderedAtOnce = 2048

// renderAll renders service ports on all CPUs: a node that starts waits for it.
func (f *family) renderAll(list []uint32) []portRules {
	all := make([]portRules, len(list))
	each := max(1, (len(list)+runtime.GOMAXPROCS(0)-1)/runtime.GOMAXPROCS(0))
	var wg sync.WaitGroup
	for from := 0; from < len(list); from += each {
		wg.Go(func() {
			for i := from; i < min(from+each, len(list)); i++ {
				all[i] = f.render(list[i])
			}
		})
	}
	wg.Wait()
	return all
}

func has[K comparable, V any](m map[K]V, key K) bool { _, ok := m[key]; return ok }

// union are the elements of both, each once.
func union[T comparable](a, b []T) []T { return append(slices.Clone(a), without(b, a)...) }

func sameSet[T comparable](a, b []T) bool { return len(without(a, b)) == 0 && len(without(b, a)) == 0 }

// without are the elements of a that are not in b.
func without[T comparable](a, b []T) []T {
	if len(a) == 0 || slices.Equal(a, b) {
		return nil
	}
	if len(b) == 0 {
		return slices.Clone(a)
	}
	in := make(map[T]struct{}, len(b))
	for _, x := range b {
		in[x] = struct{}{}
	}
	return slices.DeleteFunc(slices.Clone(a), func(x T) bool { return has(in, x) })
}
