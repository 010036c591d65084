// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hostfilter

import (
	"fmt"
	"slices"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/nftables"
)

// Rule is a rule that can drop packets.
type Rule struct {
	// Match has all packets that it can drop, and perhaps more.
	Match inet.Match
	// Where it is, for people.
	Where string
}

func (r Rule) String() string { return fmt.Sprintf("%s (%s)", r.Where, r.Match) }

// step is a rule of a chain, of either origin.
type step struct {
	nftables.Rule
	where string
}

const (
	// maxSteps bounds what is followed, and maxRules what is told: beyond, everything counts as
	// dropped.
	maxSteps = 50_000
	maxRules = 1000
	maxDepth = 16 // as the kernel
)

// walk follows the chains of one table from its hooks.
type walk struct {
	// load reads the rules of a chain, and chains has those that were read.
	load   func(chain string) ([]step, error)
	chains map[string][]step
	errs   []error
	found  *found
	steps  int
	depth  int
}

func newWalk(load func(string) ([]step, error), to *found) *walk {
	return &walk{load: load, chains: map[string][]step{}, found: to}
}

func (w *walk) rules(chain string) []step {
	list, known := w.chains[chain]
	if !known {
		var err error
		if list, err = w.load(chain); err != nil {
			w.errs = append(w.errs, err)
		}
		w.chains[chain] = list
	}
	return list
}

// protocols are those that are translated for Services.
var protocols = []inet.Protocol{inet.TCP, inet.UDP, inet.SCTP}

// found are rules with different matches.
type found struct {
	rules []Rule
	seen  map[string]bool
	all   bool // the first matches everything
}

func (f *found) add(m inet.Match, where string) {
	if f.all || m.Protocol != 0 && !slices.Contains(protocols, m.Protocol) {
		return
	}
	if f.seen == nil {
		f.seen = map[string]bool{}
	}
	text := m.String()
	switch {
	case m.IsAll():
		f.all, f.rules = true, []Rule{{m, where}}
	case f.seen[text]:
	case len(f.rules) == maxRules:
		f.all, f.rules = true, []Rule{{inet.Match{}, fmt.Sprintf("more than %d rules, among them %s", maxRules, where)}}
	default:
		f.seen[text] = true
		f.rules = append(f.rules, Rule{m, where})
	}
}

// begin follows a base chain.
func (w *walk) begin(chain string, within inet.Match, drops bool, where string) {
	if ends := w.chain(chain, within); !ends && drops {
		w.found.add(within, where)
	}
}

// chain follows a chain for these packets. It reports whether none of them comes back from it.
func (w *walk) chain(name string, within inet.Match) (ends bool) {
	if w.depth++; w.depth > maxDepth {
		w.depth--
		return false // the kernel refuses such chains
	}
	defer func() { w.depth-- }()
	rules := w.rules(name)
	for i := range rules {
		s := &rules[i]
		if w.found.all {
			return false
		}
		if w.steps++; w.steps > maxSteps {
			w.found.add(inet.Match{}, "too many rules to follow, among them "+s.where)
			return false
		}
		m, some := within.And(s.Match)
		if !some {
			continue
		}
		// Whether the rule leaves nothing of these packets to the next one.
		whole := s.Exact && m.String() == within.String()
		switch s.Verdict {
		case nftables.Drop:
			if w.found.add(m, s.where); whole {
				return true
			}
		case nftables.Accept:
			if whole {
				return true
			}
		case nftables.Return:
			if whole {
				return false
			}
		case nftables.Jump:
			if w.chain(s.Target, m) && whole {
				return true
			}
		case nftables.Goto:
			if ended := w.chain(s.Target, m); whole {
				return ended
			}
		}
	}
	return false
}
