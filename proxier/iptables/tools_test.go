// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
	"github.com/tandem-proxy/tandem/test/netfilter"
)

// fakeTools stand in for the tools and the kernel.
type fakeTools struct {
	variant xtables.Variant
	tables  [proxier.Families]*netfilter.Tables
	*netfilter.Counters
	reads [proxier.Families]int // of all tables
	// tells says whether there is a generation.
	tells bool
}

func newFakeTools() *fakeTools {
	t := &fakeTools{}
	for f := range proxier.Families {
		t.tables[f] = netfilter.New(f)
	}
	t.Counters = netfilter.NewCounters(t.tables[:]...)
	return t
}

func (t *fakeTools) Variant() xtables.Variant                     { return t.variant }
func (t *fakeTools) Usable(context.Context, proxier.Family) error { return nil }
func (t *fakeTools) RandomFully() bool                            { return true }

func (t *fakeTools) Generation() (uint32, bool, error) {
	return t.tables[proxier.IPv4].Generation() + t.tables[proxier.IPv6].Generation(), t.tells, nil
}

func (t *fakeTools) Restore(_ context.Context, f proxier.Family, input []byte) error {
	var refused *netfilter.Error
	if err := t.tables[f].Restore(input); errors.As(err, &refused) {
		line := strings.Split(string(input), "\n")[refused.Line-1]
		return &xtables.RestoreError{Line: refused.Line, Output: fmt.Sprintf("%v: %s", refused.Err, line)}
	}
	return nil
}

func (t *fakeTools) Save(_ context.Context, f proxier.Family, name string) (*xtables.Table, error) {
	table := &xtables.Table{Name: name}
	for line := range strings.Lines(t.tables[f].Save(name)) {
		line = strings.TrimSuffix(line, "\n")
		if def, ok := strings.CutPrefix(line, ":"); ok {
			words := strings.Fields(def)
			table.Chains = append(table.Chains, xtables.Chain{Name: words[0], Policy: words[1]})
		}
		if def, ok := strings.CutPrefix(line, "-A "); ok {
			chain, rule, _ := strings.Cut(def, " ")
			c := table.Chain(chain)
			c.Rules = append(c.Rules, rule)
		}
	}
	return table, nil
}

func (t *fakeTools) SaveAll(ctx context.Context, f proxier.Family, names ...string) (map[string]*xtables.Table, error) {
	t.reads[f]++
	all := map[string]*xtables.Table{}
	for _, name := range names {
		all[name], _ = t.Save(ctx, f, name)
	}
	return all, nil
}

// watchedTools remember what is restored, and let tests step in.
type watchedTools struct {
	Tools
	// before may refuse what is to be restored, after is called when it was.
	before func(input string) error
	after  func(f proxier.Family)

	mu       sync.Mutex
	restored []string
}

func (t *watchedTools) Restore(ctx context.Context, f proxier.Family, input []byte) error {
	if t.before != nil {
		if err := t.before(string(input)); err != nil {
			return err
		}
	}
	if err := t.Tools.Restore(ctx, f, input); err != nil {
		return err
	}
	t.mu.Lock()
	t.restored = append(t.restored, string(input))
	t.mu.Unlock()
	if t.after != nil {
		t.after(f)
	}
	return nil
}

// take returns what was restored since the last call.
func (t *watchedTools) take() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := t.restored
	t.restored = nil
	return list
}

// refusing fails input that writes a chain.
func refusing(chain string) func(string) error {
	return func(input string) error {
		if at := strings.Index(input, "\n:"+chain+" "); at >= 0 {
			return &xtables.RestoreError{Line: 2 + strings.Count(input[:at], "\n"), Output: "no chain like that one"}
		}
		return nil
	}
}

var tableNames = []string{"nat", "filter", "mangle"}

// contents is what tools save: rules by table and chain.
func contents(t *testing.T, tools Tools, f proxier.Family) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, name := range tableNames {
		table, err := tools.Save(t.Context(), f, name)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range table.Chains {
			all[name+" "+c.Name] = slices.Clone(c.Rules)
		}
	}
	return all
}

// saved is what tools save, one line for each rule. What stands in a hub in any order is
// sorted.
func saved(t *testing.T, tools Tools, f proxier.Family) string {
	t.Helper()
	all := contents(t, tools, f)
	var b strings.Builder
	for _, at := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&b, "%s\n", at)
		rules := all[at]
		if hubOf(at) != nil {
			tail := len(rules)
			for tail > 0 && isTail(rules[tail-1]) {
				tail--
			}
			slices.Sort(rules[:tail])
		}
		for _, r := range rules {
			fmt.Fprintf(&b, "  %s\n", r)
		}
	}
	return b.String()
}

// hubOf is the hub that a chain of a table belongs to.
func hubOf(at string) *hub {
	table, chain, _ := strings.Cut(at, " ")
	for name := range hubs {
		if h := newHub(name, proxier.IPv4); h.table() == table && h.owns(chain) {
			return h
		}
	}
	return nil
}

func isTail(rule string) bool {
	return strings.Contains(rule, "this must be the last rule") || strings.Contains(rule, "addresses of nobody")
}

// entries are the rules that packets meet in hubs, however those are cut, and what is
// wrong with the cut.
func entries(t *testing.T, tools Tools, f proxier.Family) (list, wrong []string) {
	t.Helper()
	all := contents(t, tools, f)
	for at, rules := range all {
		h := hubOf(at)
		if h == nil {
			continue
		}
		table, chain, _ := strings.Cut(at, " ")
		root := all[table+" "+h.chain()]
		led := slices.ContainsFunc(root, func(r string) bool { return jumpOf(r) == chain })
		if chain != h.chain() && len(rules) > 0 && !led {
			wrong = append(wrong, "nothing leads to "+at)
			continue
		}
		for _, r := range rules {
			if to := jumpOf(r); chain != h.chain() || !h.owns(to) || h.name == servicesNAT && to == nodePortsChain {
				list = append(list, table+" "+h.chain()+" "+r)
			}
		}
	}
	slices.Sort(list)
	return list, wrong
}

// node is a node of the lab, or a fake one, whose rules a tier writes.
type node struct {
	*proxier.Proxier
	t     *testing.T
	tools *watchedTools
	tier  proxier.Tier
	told  []proxier.Problem
}

// fakeTier is the part of a Tier that writes rules.
type fakeTier struct {
	opts Options
	*writer
}

func newFakeTier(opts Options) *fakeTier {
	t := &fakeTier{opts: opts}
	t.writer = newWriter(&t.opts, func(proxier.Family) bool { return true })
	for _, f := range t.families {
		f.counts = opts.Counters != nil
	}
	return t
}

func (t *fakeTier) Sync(ctx context.Context, u proxier.Update) error {
	errs := t.write(ctx, u)
	return errors.Join(errs[:]...)
}
func (t *fakeTier) Cleanup(ctx context.Context) error                       { return Cleanup(ctx, t.opts.Tools, false) }
func (t *fakeTier) Supports(_ *proxier.Decision, _ *proxier.Frontend) error { return nil }

func newNode(t *testing.T, tools Tools) *node {
	t.Helper()
	n := &node{t: t, tools: &watchedTools{Tools: tools}}
	n.restart()
	return n
}

func (n *node) options() Options {
	counters, _ := n.tools.Tools.(Counters)
	return Options{Tools: n.tools, Counters: counters, Flows: staleudp.New(staleudp.Options{Table: conntrack.Kernel{}}), Reporter: proxier.ReporterFunc(func(p proxier.Problem) { n.told = append(n.told, p) })}
}

// restart has another process go on that knows nothing.
func (n *node) restart() {
	n.t.Helper()
	n.start(newFakeTier(n.options()), testFacts, proxier.Policy{})
}

func (n *node) start(tier proxier.Tier, facts proxier.Facts, policy proxier.Policy) {
	n.t.Helper()
	n.tier = tier
	var err error
	n.Proxier, err = proxier.New(proxier.Options{NodeName: "node1", Facts: facts, Policy: policy, Tier: tier})
	if err != nil {
		n.t.Fatal(err)
	}
	n.OnServiceSynced()
	n.OnEndpointSlicesSynced()
}

func (n *node) sync() {
	n.t.Helper()
	if err := n.Sync(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
}

// compare does what the periodic sync does.
func (n *node) compare() error {
	return n.tier.Sync(n.t.Context(), proxier.Update{Full: true, Changes: n.Table().All()})
}

func (n *node) syncAll() {
	n.t.Helper()
	if err := n.compare(); err != nil {
		n.t.Fatal(err)
	}
}
