// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
)

// Tools read and write rules; *xtables.Tools are those of the kernel.
type Tools interface {
	Variant() xtables.Variant
	// Usable returns nil if rules of the family can be written, else the reason.
	Usable(ctx context.Context, family proxier.Family) error
	RandomFully() bool
	// Generation increases with every change of rules, by one for each table of a
	// restore; ok is false where there is none.
	Generation() (n uint32, ok bool, err error)
	Restore(ctx context.Context, family proxier.Family, input []byte) error
	Save(ctx context.Context, family proxier.Family, table string) (*xtables.Table, error)
	SaveAll(ctx context.Context, family proxier.Family, tables ...string) (map[string]*xtables.Table, error)
}

// Options of the tier.
type Options struct {
	Tools Tools
	// MasqueradeBit is the bit of the packet mark that requests masquerading; nil is 14, as
	// upstream.
	MasqueradeBit *int
	// KeepInvalid does not drop packets that conntrack finds invalid. Those of a translated
	// connection are sent untranslated then, and reset it. It is for kernels that find fewer
	// packets invalid (net.netfilter.nf_conntrack_tcp_be_liberal).
	KeepInvalid bool
	// Extra are chains and rules that another tier needs beside these; nil for none.
	Extra func(proxier.Family, *proxier.NodeRules) Extra
	// Flows deletes stale conntrack entries after a sync; nil where the caller does.
	Flows *staleudp.Reconciler
	// TrackSockets creates conntrack entries for connections of this host that began before there were rules; nil for none.
	TrackSockets func(context.Context, proxier.Family) (created int, err error)
	// Counters count the packets of some rules, where the kernel can; nil for none.
	Counters Counters
	// Reporter receives what could not be written; may be nil.
	Reporter proxier.Reporter
	// Repaired is told of rules that others deleted or changed, once they are written again;
	// may be nil.
	Repaired func(proxier.Repair)
	// Observer counts; may be nil.
	Observer Observer
}

// Extra are chains and rules that do not depend on service ports.
type Extra struct {
	// Before are rules in front of those of a chain of this tier that depend on options
	// alone. In a shared chain, the rules of service ports come first.
	Before []Chain
	Chains []Chain
	// Jumps lead to them, after those to the chains of this tier.
	Jumps []Jump
}

// Chain is a chain, or a part of it, with rules as iptables-save prints them.
type Chain struct {
	Table, Name string
	Rules       []string
}

// Jump is a rule in a built-in chain.
type Jump struct{ Table, From, Rule string }

// before are the rules in front of those of a chain.
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
	// RestoreFailed is called for each run of iptables-restore that failed. partial says
	// that it was to write changes alone.
	RestoreFailed(family proxier.Family, partial bool)
	// Rules is called after each sync with the number of rules that it has written to a
	// table, and the number that the proxy's chains have there.
	Rules(family proxier.Family, table string, written, total int)
}

const defaultMasqueradeBit = 14

func (o *Options) mark() uint32 {
	if o.MasqueradeBit != nil {
		return 1 << *o.MasqueradeBit
	}
	return 1 << defaultMasqueradeBit
}
