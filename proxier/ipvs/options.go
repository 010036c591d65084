// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
)

// Options of the tier. The zero value of all but Rules is what upstream does without flags.
type Options struct {
	// Rules are the options of the tier that has the rules; its Extra is set here, and its
	// Flows have to be nil.
	Rules iptables.Options
	// MasqueradeAll is that of the policy by which decisions are made.
	MasqueradeAll bool
	// Scheduler of all virtual servers; empty is rr.
	Scheduler string
	// ExcludeCIDRs have virtual servers of somebody else.
	ExcludeCIDRs []netip.Prefix
	// StrictARP has this node answer ARP for the addresses of a device on that device
	// alone.
	StrictARP bool
	// The kernel's timeouts are left as they are where these are 0.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// Drain is how long a TCP destination that is gone keeps its connections at most; 0 is
	// 15 minutes.
	Drain time.Duration
	// UpstreamSemantics has virtual servers carry what upstream's do, in upstream's way,
	// where that differs from the decision: one set of endpoints for everybody, and all of
	// them where a Local policy leaves none.
	UpstreamSemantics bool
	// Reporter is told of what could not be written; nil for nobody.
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

// excludes says whether virtual servers at an address are somebody else's.
func (o *Options) excludes(a netip.Addr) bool {
	return slices.ContainsFunc(o.ExcludeCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
}
