// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

// The built-in chains, by the kernel's names of the hooks. They are bits, since a target can
// be valid for several hooks.
type hooks uint8

const (
	prerouting hooks = 1 << iota
	input
	forward
	output
	postrouting
)

var hookNames = map[string]hooks{
	"PREROUTING": prerouting, "INPUT": input, "FORWARD": forward, "OUTPUT": output, "POSTROUTING": postrouting,
}

// builtin are the chains of each table, in the order iptables-save prints them.
var builtin = map[string][]string{
	"nat":    {"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"},
	"filter": {"INPUT", "FORWARD", "OUTPUT"},
	"mangle": {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"},
}

// Tables are the tables of one family. They are safe for concurrent use.
type Tables struct {
	// Random returns numbers from 0 to below 1, for -m statistic.
	Random func() float64
	// Now is the clock of -m recent.
	Now func() time.Time

	family proxier.Family

	mu     sync.Mutex // guards the fields below
	tables map[string]*table
	recent map[string]recentList
	// counters are those that rules may use, or nil.
	counters *Counters
	// generation counts changes of tables.
	generation uint32
}

// New makes tables without rules. The policy of built-in chains is ACCEPT.
func New(f proxier.Family) *Tables {
	t := &Tables{Random: rand.Float64, Now: time.Now, family: f, tables: map[string]*table{}, recent: map[string]recentList{}}
	for name, chains := range builtin {
		t.tables[name] = newTable(name, chains)
	}
	return t
}

// table is one table. Tables replaces it when it is restored: neither it nor its chains are
// changed.
type table struct {
	name   string
	chains map[string]*chain
}

type chain struct {
	name   string
	hook   hooks  // of a built-in chain
	policy string // of a built-in chain: ACCEPT or DROP
	rules  []*rule
}

func newTable(name string, chains []string) *table {
	t := &table{name: name, chains: map[string]*chain{}}
	for _, c := range chains {
		t.chains[c] = &chain{name: c, hook: hookNames[c], policy: "ACCEPT"}
	}
	return t
}

// Generation increases by one for each restored table.
func (t *Tables) Generation() uint32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.generation
}

// Save prints a table as iptables-save does, without comments about program and date, and
// with zero counters. Chains that are not built in are sorted by name.
func (t *Tables) Save(name string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	table := t.tables[name]
	if table == nil {
		return ""
	}
	names := slices.Clone(builtin[name])
	for _, c := range slices.Sorted(maps.Keys(table.chains)) {
		if table.chains[c].hook == 0 {
			names = append(names, c)
		}
	}
	var head, rules strings.Builder
	fmt.Fprintf(&head, "*%s\n", name)
	for _, c := range names {
		chain := table.chains[c]
		policy := chain.policy
		if chain.hook == 0 {
			policy = "-"
		}
		fmt.Fprintf(&head, ":%s %s [0:0]\n", c, policy)
		for _, r := range chain.rules {
			rules.WriteString("-A " + c)
			if r.text != "" {
				rules.WriteString(" " + r.text)
			}
			rules.WriteByte('\n')
		}
	}
	return head.String() + rules.String() + "COMMIT\n"
}
