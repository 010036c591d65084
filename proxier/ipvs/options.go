// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"time"

	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
)

// Rules is a tier that serves by rules what virtual servers cannot, and writes the
// constant rules.
type Rules interface {
	proxier.Tier
	// Usable returns nil if it can serve a family, else the reason.
	Usable(proxier.Family) error
	// Run repairs rules that others delete or change, until ctx is done.
	Run(context.Context)
	Close() error
}

// Tools read and write rules.
type Tools interface {
	Usable(ctx context.Context, family proxier.Family) error
	RandomFully() bool
	Restore(ctx context.Context, family proxier.Family, input []byte) error
	Save(ctx context.Context, family proxier.Family, table string) (*xtables.Table, error)
}

// Options of the tier. The zero value of all but Tools and OpenRules is what upstream does
// without flags.
type Options struct {
	Tools Tools
	// OpenRules opens the tier that has the rules, among them the constant ones.
	OpenRules func(ctx context.Context, constant func(proxier.Family, *proxier.NodeRules) ConstantRules) (Rules, error)
	// MasqueradeAll is that of the policy by which decisions are made.
	MasqueradeAll bool
	// Scheduler of all virtual servers; empty is rr.
	Scheduler string
	// ExcludeCIDRs have virtual servers that other programs manage.
	ExcludeCIDRs []netip.Prefix
	// StrictARP makes this node answer ARP for an address only on the device that has it.
	StrictARP bool
	// The kernel's timeouts are not changed if these are 0.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// Drain is how long a TCP destination that is gone keeps its connections at most; 0 is
	// 15 minutes.
	Drain time.Duration
	// UpstreamSemantics has virtual servers serve what upstream's do, in upstream's way,
	// where that differs from the decision: one set of endpoints for everybody, and all of
	// them where a Local policy leaves none.
	UpstreamSemantics bool
	// Reporter receives what could not be written; optional.
	Reporter proxier.Reporter
	// Clock is for tests.
	Clock clock.PassiveClock
}

const (
	defaultScheduler = "rr"
	// Upstream has no deadline: destinations on nodes that died stay until their
	// connections time out, which may take days where there are keep-alives.
	defaultDrain = 15 * time.Minute
)

func (o *Options) scheduler() string { return cmp.Or(o.Scheduler, defaultScheduler) }

func (o *Options) drain() time.Duration { return cmp.Or(o.Drain, defaultDrain) }

// excludes reports whether others manage the virtual servers at an address.
func (o *Options) excludes(a netip.Addr) bool {
	return slices.ContainsFunc(o.ExcludeCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
}
