// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"maps"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// A packet is compared with the rules of a chain one by one. A shared chain with more than
// splitAt of them is therefore split into a tree of two levels: it has a rule for each slot,
// which leads to a chain with the rules of that slot. With fewer than joinAt it is joined
// again, and looks as upstream's does.
const (
	splitAt = 128
	joinAt  = 64
)

// sharedChain is the desired content of a chain that all service ports share, in one family.
type sharedChain struct {
	name   sharedName
	family proxier.Family
	split  bool
	// lastFit is the shape that fitted the content after the last full sync. It differs from
	// split where the kernel refused much of the content.
	lastFit bool
	// tail are rules behind all others.
	tail []string
	// slots have their rules, each with the number of service ports that want it.
	slots map[slot]map[string]int
	size  int // how many rules slots have
	// reached are the chains that exist and that packets reach. stale are those that differ
	// in the kernel, or may differ.
	reached, stale map[string]struct{}
}

func newSharedChain(name sharedName, family proxier.Family) *sharedChain {
	return &sharedChain{
		name: name, family: family, slots: map[slot]map[string]int{}, reached: map[string]struct{}{}, stale: map[string]struct{}{},
	}
}

func (s *sharedChain) table() string { return sharedNames[s.name].table }

// root is the chain that packets come to first.
func (s *sharedChain) root() string { return sharedNames[s.name].chain }

// chainOf is the chain with the rules of a slot.
func (s *sharedChain) chainOf(at slot) string {
	if !s.split {
		return s.root()
	}
	return slotChain(s.name, at)
}

// owns reports whether a chain of its table is a part of it.
func (s *sharedChain) owns(chain string) bool {
	return chain == s.root() || strings.HasPrefix(chain, sharedNames[s.name].slots)
}

// jumpTo is the rule of the root that leads to a slot.
func (s *sharedChain) jumpTo(at slot) string { return slotJump(s.name, s.family, at) }

// chains are all chains of it and their rules. The order of rules does not matter, but for
// the tail.
func (s *sharedChain) chains() map[string][]string {
	all := map[string][]string{s.root(): nil}
	for at := range s.slots {
		rules := slices.Sorted(maps.Keys(s.slots[at]))
		name := s.chainOf(at)
		if s.split {
			all[s.root()] = append(all[s.root()], s.jumpTo(at))
		}
		all[name] = append(all[name], rules...)
	}
	slices.Sort(all[s.root()])
	all[s.root()] = append(all[s.root()], s.tail...)
	return all
}

// rulesOf are the rules of one of its chains.
func (s *sharedChain) rulesOf(chain string) []string {
	if chain == s.root() {
		return s.chains()[chain]
	}
	for at, rules := range s.slots {
		if s.chainOf(at) == chain {
			return slices.Sorted(maps.Keys(rules))
		}
	}
	return nil
}

// rules counts those of all chains.
func (s *sharedChain) rules() int {
	n := s.size + len(s.tail)
	if s.split {
		n += len(s.slots)
	}
	return n
}

// change adds or removes one user of a rule, and reports whether that changes the content.
func (s *sharedChain) change(at slot, rule string, by int) bool {
	rules := s.slots[at]
	if rules == nil {
		rules = map[string]int{}
		s.slots[at] = rules
	}
	before := rules[rule]
	rules[rule] += by
	switch {
	case rules[rule] == 0:
		delete(rules, rule)
		s.size--
		if len(rules) == 0 {
			delete(s.slots, at)
		}
		return true
	case before == 0:
		s.size++
		return true
	}
	return false
}

// unlinkEmpty makes the root stale if it jumps to chains that have no rules any more.
func (s *sharedChain) unlinkEmpty() {
	chains := s.chains()
	for name := range s.reached {
		if !has(chains, name) {
			s.stale[s.root()] = struct{}{}
		}
	}
}

// written notes that the stale chains were written.
func (s *sharedChain) written() {
	chains := s.chains()
	for name := range s.stale {
		s.reached[name] = struct{}{}
	}
	if has(s.stale, s.root()) { // which leads only to chains that have rules
		maps.DeleteFunc(s.reached, func(name string, _ struct{}) bool { return !has(chains, name) })
	}
	clear(s.stale)
}

// fitsSplit reports whether a content of this size should be split.
func (s *sharedChain) fitsSplit(size int) bool {
	if s.split {
		return size > joinAt
	}
	return size > splitAt
}

// hasOutgrownShape reports whether the content has grown or shrunk so far that another shape
// fits.
func (s *sharedChain) hasOutgrownShape() bool {
	fits := s.fitsSplit(s.size)
	return fits != s.split && fits != s.lastFit
}

// sameContent reports whether a chain in the kernel has the rules that it should have, in any
// order but for the tail.
func sameContent(got, want []string, tail int) bool {
	if len(got) != len(want) || !slices.Equal(got[len(got)-tail:], want[len(want)-tail:]) {
		return false
	}
	return slices.Equal(slices.Sorted(slices.Values(got[:len(got)-tail])), slices.Sorted(slices.Values(want[:len(want)-tail])))
}
