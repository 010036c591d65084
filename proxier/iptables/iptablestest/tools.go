// SPDX-License-Identifier: Apache-2.0

package iptablestest

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/netfilter"
)

// Tools are the programs with which a tier writes rules, simulated or real (see iptables.Tools).
type Tools interface {
	Variant() xtables.Variant
	Usable(ctx context.Context, family proxier.Family) error
	RandomFully() bool
	Generation() (n uint32, ok bool, err error)
	Restore(ctx context.Context, family proxier.Family, input []byte) error
	Save(ctx context.Context, family proxier.Family, table string) (*xtables.Table, error)
	SaveAll(ctx context.Context, family proxier.Family, tables ...string) (map[string]*xtables.Table, error)
}

// Simulated simulates the iptables programs and the kernel.
type Simulated struct {
	Simulates xtables.Variant
	// HasGeneration reports whether the simulated kernel has a generation of its rules.
	HasGeneration bool
	Tables        [proxier.Families]*netfilter.Tables
	// Reads counts calls of SaveAll.
	Reads [proxier.Families]int
	*netfilter.Counters
}

var _ Tools = (*Simulated)(nil)

// NewSimulated returns tools with empty tables in both families, and without a generation.
func NewSimulated() *Simulated {
	t := &Simulated{}
	for f := range proxier.Families {
		t.Tables[f] = netfilter.New(f)
	}
	t.Counters = netfilter.NewCounters(t.Tables[:]...)
	return t
}

func (t *Simulated) Variant() xtables.Variant                     { return t.Simulates }
func (t *Simulated) Usable(context.Context, proxier.Family) error { return nil }
func (t *Simulated) RandomFully() bool                            { return true }

func (t *Simulated) Generation() (uint32, bool, error) {
	return t.Tables[proxier.IPv4].Generation() + t.Tables[proxier.IPv6].Generation(), t.HasGeneration, nil
}

func (t *Simulated) Restore(_ context.Context, f proxier.Family, input []byte) error {
	var refused *netfilter.Error
	if err := t.Tables[f].Restore(input); errors.As(err, &refused) {
		line := strings.Split(string(input), "\n")[refused.Line-1]
		return &xtables.RestoreError{Line: refused.Line, Output: fmt.Sprintf("%v: %s", refused.Err, line)}
	}
	return nil
}

func (t *Simulated) Save(_ context.Context, f proxier.Family, name string) (*xtables.Table, error) {
	table := &xtables.Table{Name: name}
	for line := range strings.Lines(t.Tables[f].Save(name)) {
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

func (t *Simulated) SaveAll(ctx context.Context, f proxier.Family, names ...string) (map[string]*xtables.Table, error) {
	t.Reads[f]++
	all := map[string]*xtables.Table{}
	for _, name := range names {
		all[name], _ = t.Save(ctx, f, name)
	}
	return all, nil
}
