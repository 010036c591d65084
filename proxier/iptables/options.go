// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"

	"github.com/tandem-proxy/tandem/conntrack"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/xtables"
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
	// Flows keep conntrack as the rules are; nil where somebody else does.
	Flows *conntrack.Reconciler
	// Reporter is told of what could not be written; nil for nobody.
	Reporter proxier.Reporter
	// Observer counts; nil for nobody.
	Observer Observer
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
