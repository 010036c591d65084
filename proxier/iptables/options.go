// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
)

// Tools write rules into a kernel; *xtables.Tools do.
type Tools interface {
	Variant() xtables.Variant
	// Usable returns nil if rules of the family can be written, else the reason.
	Usable(ctx context.Context, family proxier.Family) error
	RandomFully() bool
	// Generation changes with every change of rules, by one for each table of a
	// restore; ok is false where there is none.
	Generation() (n uint32, ok bool, err error)
	Restore(ctx context.Context, family proxier.Family, input []byte) error
	Save(ctx context.Context, family proxier.Family, table string) (*xtables.Table, error)
	SaveAll(ctx context.Context, family proxier.Family, tables ...string) (map[string]*xtables.Table, error)
}

// Options of the tier.
type Options struct {
	Tools Tools
	// MasqueradeBit is the bit of the packet mark that says "to be masqueraded";
	// nil is 14, as upstream.
	MasqueradeBit *int
	// KeepInvalid leaves packets alone that conntrack finds invalid: those of a
	// translated connection go out untranslated then, and reset it. It is for kernels
	// that find fewer of them so (net.netfilter.nf_conntrack_tcp_be_liberal).
	KeepInvalid bool
	// Extra are chains and rules that another tier needs beside these; nil for none.
	Extra func(proxier.Family, *proxier.NodeRules) Extra
	// Flows keep conntrack as the rules are; nil where somebody else does.
	Flows *staleudp.Reconciler
	// Counters count, where the kernel can, what some rules see; nil for none.
	Counters Counters
	// Reporter is told of what could not be written; nil for nobody.
	Reporter proxier.Reporter
	// Observer counts; nil for nobody.
	Observer Observer
}

// Extra are chains and rules that no service port has a part in.
type Extra struct {
	// Before are rules that stand before those of a chain of this tier that depend on
	// options alone. In a chain that all service ports share, theirs come before.
	Before []Chain
	Chains []Chain
	// Jumps lead to them, behind those to the chains of this tier.
	Jumps []Jump
}

// Chain is a chain, or a part of it, with rules in the words of iptables-save.
type Chain struct {
	Table, Name string
	Rules       []string
}

// Jump is a rule in a chain of the kernel's.
type Jump struct{ Table, From, Rule string }

// before are the rules that stand before those of a chain.
func (e *Extra) before(table, chain string) (rules []string) {
	for _, c := range e.Before {
		if c.Table == table && c.Name == chain {
			rules = append(rules, c.Rules...)
		}
	}
	return rules
}

// Observer counts what the tier does.
type Observer interface {
	// RestoreFailed is told of each run of iptables-restore that failed; partial says
	// that it was to write what had changed alone.
	RestoreFailed(family proxier.Family, partial bool)
	// Rules is told after each sync how many rules of ours a table has, without jumps in
	// the kernel's chains, and how many the sync has written.
	Rules(family proxier.Family, table string, written, total int)
}

const defaultMasqueradeBit = 14

func (o *Options) mark() uint32 {
	if o.MasqueradeBit != nil {
		return 1 << *o.MasqueradeBit
	}
	return 1 << defaultMasqueradeBit
}
