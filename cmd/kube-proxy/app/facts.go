// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/nodefacts"
)

// facts is what this process finds out about its node.
type facts struct {
	// settings are what the configuration says, and node completes them; nil while there
	// is none. Both are used only while the proxier updates its facts, one update at a time.
	settings     *nodefacts.Settings
	node         *v1.Node
	addresses    nodefacts.Addresses
	serviceCIDRs nodefacts.ServiceCIDRs
	uplinks      *devices.Watcher // for the programs on them
	origins      *devices.Watcher // of the same, for the facts
	filters      *filters         // nil where no program translates packets
	programs     bool             // programs translate packets
	known        proxier.Facts    // when the proxier starts
	nodeIP       atomic.Bool      // the node has an address of its own
	pods         atomic.Bool      // pods can be told from others as the configuration has it
	logger       klog.Logger
}

// podCIDRLimit is how long detectLocalMode NodeCIDR waits for the Node's podCIDRs before it
// reports that they are missing. Services are served meanwhile, with no client taken for a
// pod. Upstream programs nothing for up to 5 minutes, and then ends.
const podCIDRLimit = 30 * time.Second

// start collects what is known before the Node is.
func (f *facts) start(ctx context.Context) {
	f.logger = klog.FromContext(ctx)
	f.warn(f.settings)
	f.known = f.settings.Facts()
	f.note(&f.known)
	f.setNodeIPs(&f.known)
	if u, err := f.origins.List(); err == nil { // otherwise, followUplinks tries again
		setUplinks(&f.known, u)
	}
	if f.filters != nil {
		f.filters.list(ctx, &f.known)
	}
	var err error
	if f.known.LocalAddrs, err = f.addresses.List(); err != nil {
		f.logger.Error(err, "Cannot list the addresses of this node; NodePorts are not served until this works")
	}
}

// warn logs settings that may surprise.
func (f *facts) warn(s *nodefacts.Settings) {
	for _, warning := range s.Warnings {
		f.logger.Info("Configuration warning", "warning", warning)
	}
	if s.Policy.MasqueradeAll {
		f.logger.Info("masqueradeAll has no effect on connections that are balanced at the socket: backends see the client's address")
	}
	if n := &s.Policy.NodePorts; len(n.CIDRs) == 0 && !n.Primary && !n.Localhost && !n.All {
		f.logger.Info("NodePorts are served at all addresses of this node; --nodeport-addresses=primary limits them to those of its Node object")
	}
}

// revise takes over other settings.
func (f *facts) revise(s *nodefacts.Settings, px *proxier.Proxier) {
	f.warn(s)
	px.UpdatePolicy(f.policyOf(s), func(known *proxier.Facts) {
		f.settings = s
		s.Revise(f.node, known)
		f.note(known)
	})
}

// policyOf are the settings as this mode can carry them out.
func (f *facts) policyOf(s *nodefacts.Settings) proxier.Policy {
	policy := s.Policy
	if !f.programs {
		policy.Forwarding = proxier.UnsetForwarding
		policy.NoLoopbackHostIPs = true
	}
	return policy
}

// fromNode is proxier.Options.NodeFacts.
func (f *facts) fromNode(node *v1.Node, known *proxier.Facts) {
	before := *known
	f.node = node
	f.settings.FromNode(node, known)
	f.note(known)
	f.setNodeIPs(known)
	if known.Zone != before.Zone || known.NodeIPs != before.NodeIPs || !slices.Equal(known.Pods.CIDRs, before.Pods.CIDRs) {
		f.logger.Info("Node addresses, zone or pod CIDRs changed", "nodeIPs", known.NodeIPs, "zone", known.Zone, "podRanges", known.Pods.CIDRs)
	}
}

func (f *facts) note(known *proxier.Facts) {
	f.nodeIP.Store(nodefacts.KnowsNodeIP(known))
	f.pods.Store(!f.settings.NeedsPodCIDRs() || len(known.Pods.CIDRs) > 0)
}

// awaitPodCIDRs reports podCIDRs that are missing.
func (f *facts) awaitPodCIDRs(ctx context.Context, clock clock.Clock, reporter proxier.Reporter) {
	if f.pods.Load() {
		return
	}
	timer := clock.NewTimer(podCIDRLimit)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return
	case <-timer.C():
	}
	if !f.pods.Load() {
		reporter.Report(proxier.Problem{
			Kind: "Node", Field: "spec.podCIDRs", Reason: proxier.ReasonIncompleteNode,
			Message: "detectLocalMode is NodeCIDR, but the Node has no podCIDRs; until it has some, no client is treated as a pod",
		})
	}
}

// check is called when the Node is known, or took too long.
func (f *facts) check(logger klog.Logger) {
	if !f.nodeIP.Load() {
		logger.Info("Cannot find the address of this node, assuming loopback: its Node object has none or does not exist. --bind-address sets it")
	}
}

// follow keeps the addresses up to date until ctx is done.
func (f *facts) follow(ctx context.Context, px *proxier.Proxier) {
	f.addresses.Watch(ctx, func(list []netip.Addr) {
		px.UpdateFacts(func(known *proxier.Facts) { known.LocalAddrs = list })
	})
}

// followFilters keeps the rules that filter before DNAT up to date until ctx is done.
func (f *facts) followFilters(ctx context.Context, px *proxier.Proxier) {
	if f.filters != nil {
		f.filters.follow(ctx, px)
	}
}

// followUplinks keeps the names and addresses of the uplinks up to date until ctx is done.
func (f *facts) followUplinks(ctx context.Context, px *proxier.Proxier) {
	f.origins.Watch(ctx, func(u devices.Uplinks) {
		px.UpdateFacts(func(known *proxier.Facts) { setUplinks(known, u) })
	})
}

func (f *facts) setNodeIPs(known *proxier.Facts) {
	f.uplinks.SetNodeIPs(known.NodeIPs[:])
	f.origins.SetNodeIPs(known.NodeIPs[:])
}

func setUplinks(known *proxier.Facts, u devices.Uplinks) {
	known.Uplinks, known.UplinkAddrs = deviceNames(u.Devices), nil
	for _, a := range u.Addrs {
		known.UplinkAddrs = append(known.UplinkAddrs, proxier.DeviceAddr(a))
	}
}

// deviceNames are sorted.
func deviceNames(list []devices.Device) (names []string) {
	for _, d := range list {
		names = append(names, d.Name)
	}
	slices.Sort(names)
	return names
}
