// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"cmp"
	"maps"
	"slices"
)

// change is what has to be written for some service ports.
type change struct {
	f     *family
	text  *text
	ports []portChange
	// written has the new content of chains. Chains in deleted and emptied are not used any more;
	// the latter cannot be deleted.
	written          map[string]stamp
	deleted, emptied map[string]struct{}
	// slots are the changes of shared chains. held says that these are written later.
	slots map[slotOf]*slotChange
	held  bool
}

type portChange struct {
	index  uint32
	before portState
	want   portRules
}

type slotOf struct {
	shared sharedName
	slot   slot
}

type slotChange struct {
	added   []string
	removed bool
}

// change computes a change, and updates the counts. commit or undo must follow.
func (f *family) change(list []uint32, hold bool) *change {
	ports, chains := make([]portChange, len(list)), 0
	for i, index := range list {
		ports[i] = portChange{index, f.ports.Get(index).Applied, f.render(index)}
		chains += len(ports[i].want.chains)
	}
	c := &change{
		f: f, text: newText(), ports: ports, written: make(map[string]stamp, chains), deleted: map[string]struct{}{}, emptied: map[string]struct{}{},
		slots: map[slotOf]*slotChange{}, held: hold,
	}
	nat := c.text.table("nat")
	nat.grow(chains)
	for i := range ports {
		p := &ports[i]
		for _, chain := range p.want.chains {
			if !f.kernel.is(chain.name, chain.stamp) {
				nat.write(chain.name, chain.rules)
				c.written[chain.name] = chain.stamp
			}
		}
		c.use(p.before.chains, p.want.names)
		c.count(without(p.before.entries, p.want.entries), -1)
		c.count(without(p.want.entries, p.before.entries), 1)
	}
	if hold {
		c.try() // what is in the kernel may still lead to chains that are not used any more
		return c
	}
	c.writeSlots()
	for i := range ports {
		p := &ports[i]
		for _, name := range without(p.before.chains, p.want.names) {
			switch {
			case f.uses[name] > 0 || has(c.deleted, name) || has(c.emptied, name):
			case has(f.referenced, name):
				nat.declare(name)
				c.emptied[name] = struct{}{}
			default:
				nat.drop(name)
				c.deleted[name] = struct{}{}
			}
		}
	}
	return c
}

// use updates the use counts of chains after a change of those of a service port.
func (c *change) use(before, after []string) {
	for _, name := range without(before, after) {
		c.f.uses[name]--
	}
	for _, name := range without(after, before) {
		c.f.uses[name]++
	}
}

// trialChain exists only within a restore.
const trialChain = servicesChain + "-TRIAL"

// try writes the rules that are held to a chain that no rule jumps to. So the kernel refuses them
// now, and not later together with those of other service ports.
func (c *change) try() {
	rules := map[string][]string{}
	for i := range c.ports {
		p := &c.ports[i]
		for _, e := range without(p.want.entries, p.before.entries) {
			table := sharedNames[e.shared].table
			rules[table] = append(rules[table], e.rule)
		}
	}
	for name, list := range rules {
		part := c.text.table(name)
		part.write(trialChain, list)
		part.flush(trialChain)
		part.dropped = append(part.dropped, trialChain)
	}
}

// count adds rules of shared chains, or removes them.
func (c *change) count(entries []entry, by int) {
	for _, e := range entries {
		if !c.f.shared[e.shared].change(e.slot, e.rule, by) {
			continue
		}
		at := slotOf{e.shared, e.slot}
		s := c.slots[at]
		if s == nil {
			s = &slotChange{}
			c.slots[at] = s
		}
		switch {
		case by < 0:
			s.removed = true
		default:
			s.added = append(s.added, e.rule)
		}
	}
}

// writeSlots writes what changes in shared chains: new rules are put in front, which affects
// no other rule. Where one is removed, the chain is written as a whole.
func (c *change) writeSlots() {
	done := map[*sharedChain]string{} // one that is not split has one chain for all slots
	for _, at := range slices.SortedFunc(maps.Keys(c.slots), compareSlots) {
		s, changed := c.f.shared[at.shared], c.slots[at]
		name, table := s.chainOf(at.slot), c.text.table(s.table())
		if done[s] == name {
			continue
		}
		if c.removesFrom(s, name) || has(s.stale, name) || !has(s.reached, name) {
			table.write(name, s.rulesOf(name))
			done[s] = name
			if s.split && !has(s.reached, name) && !has(s.stale, s.root()) {
				table.insert(s.root(), s.jumpTo(at.slot))
			}
			continue
		}
		for _, rule := range changed.added {
			table.insert(name, rule)
		}
	}
}

func compareSlots(a, b slotOf) int {
	return cmp.Or(cmp.Compare(a.shared, b.shared), cmp.Compare(a.slot, b.slot))
}

// removesFrom reports whether a rule is removed from a chain of a shared one.
func (c *change) removesFrom(s *sharedChain, name string) bool {
	for at, changed := range c.slots {
		if changed.removed && c.f.shared[at.shared] == s && s.chainOf(at.slot) == name {
			return true
		}
	}
	return false
}

// commit records that the change is in the kernel.
func (c *change) commit() {
	f := c.f
	for name, s := range c.written {
		f.kernel.set(name, s)
	}
	for name := range c.deleted {
		f.kernel.forget(name)
	}
	for name := range c.emptied {
		f.kernel.set(name, stampOf(nil))
	}
	for at := range c.slots {
		s := f.shared[at.shared]
		name := s.chainOf(at.slot)
		if c.held {
			s.stale[name] = struct{}{}
			if s.split && !has(s.reached, name) {
				s.stale[s.root()] = struct{}{}
			}
			continue
		}
		s.reached[name] = struct{}{}
		delete(s.stale, name)
	}
	for i := range c.ports {
		p := &c.ports[i]
		if f.ports.Get(p.index).Wanted() {
			f.ports.Done(p.index, portState{chains: p.want.names, entries: p.want.entries})
		} else {
			f.ports.Removed(p.index)
		}
	}
}

// undo reverts the counts. How much of the change the kernel has is unknown: a table may have been
// changed before another one was refused.
func (c *change) undo(err error) {
	f := c.f
	for i := range c.ports {
		p := &c.ports[i]
		f.count(without(p.want.entries, p.before.entries), -1)
		f.count(without(p.before.entries, p.want.entries), 1)
		c.use(p.want.names, p.before.chains)
		f.ports.Failed(p.index, err)
	}
	for name := range c.written {
		f.kernel.forget(name)
	}
	for _, names := range []map[string]struct{}{c.deleted, c.emptied} {
		for name := range names {
			f.kernel.forget(name)
		}
	}
	for at := range c.slots {
		s := f.shared[at.shared]
		name := s.chainOf(at.slot)
		s.stale[name] = struct{}{}
		if !has(s.reached, name) {
			s.stale[s.root()] = struct{}{}
		}
	}
}
