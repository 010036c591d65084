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
	// settings may be replaced, and node is what they are completed with; nil while there
	// is none. Both are used while the proxier has its facts changed, one at a time.
	settings     *nodefacts.Settings
	node         *v1.Node
	addresses    nodefacts.Addresses
	serviceCIDRs nodefacts.ServiceCIDRs
	uplinks      *devices.Watcher
	known        proxier.Facts // when the proxier starts
	nodeIP       atomic.Bool   // the node has an address of its own
	pods         atomic.Bool   // pods can be told from others as the configuration has it
	logger       klog.Logger
}

// podCIDRLimit is how long a Node may be without the podCIDRs that are asked for before
// that is a problem. Nothing waits for them: meanwhile nobody is taken for a pod. Upstream
// programs nothing for up to 5 minutes, and ends then.
const podCIDRLimit = 30 * time.Second

// start collects what is known before the Node is.
func (f *facts) start(ctx context.Context) {
	f.logger = klog.FromContext(ctx)
	f.warn(f.settings)
	f.known = f.settings.Facts()
	f.note(&f.known)
	f.uplinks.SetNodeIPs(f.known.NodeIPs[:])
	var err error
	if f.known.LocalAddrs, err = f.addresses.List(); err != nil {
		f.logger.Error(err, "Cannot list the addresses of this node; NodePorts are not served until that works")
	}
}

// warn says what of the settings may surprise.
func (f *facts) warn(s *nodefacts.Settings) {
	for _, warning := range s.Warnings {
		f.logger.Info("The configuration may not be what is meant", "what", warning)
	}
	if s.Policy.MasqueradeAll {
		f.logger.Info("masqueradeAll does nothing for connections that are balanced at their socket: no packet is translated, and backends see the client")
	}
	if n := &s.Policy.NodePorts; len(n.CIDRs) == 0 && !n.Primary && !n.Localhost && !n.All {
		f.logger.Info("NodePorts are served at all addresses of this node; --nodeport-addresses=primary keeps to those of its Node object")
	}
}

// revise takes over other settings.
func (f *facts) revise(s *nodefacts.Settings, px *proxier.Proxier) {
	f.warn(s)
	px.UpdatePolicy(s.Policy, func(known *proxier.Facts) {
		f.settings = s
		s.Revise(f.node, known)
		f.note(known)
	})
}

// fromNode is proxier.Options.NodeFacts.
func (f *facts) fromNode(node *v1.Node, known *proxier.Facts) {
	before := *known
	f.node = node
	f.settings.FromNode(node, known)
	f.note(known)
	f.uplinks.SetNodeIPs(known.NodeIPs[:])
	if known.Zone != before.Zone || known.NodeIPs != before.NodeIPs || !slices.Equal(known.Pods.CIDRs, before.Pods.CIDRs) {
		f.logger.Info("The Node says something else than what was known", "nodeIPs", known.NodeIPs, "zone", known.Zone, "podRanges", known.Pods.CIDRs)
	}
}

func (f *facts) note(known *proxier.Facts) {
	f.nodeIP.Store(nodefacts.KnowsNodeIP(known))
	f.pods.Store(!f.settings.NeedsPodCIDRs() || len(known.Pods.CIDRs) > 0)
}

// awaitPodCIDRs reports podCIDRs that do not come.
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
			Message: "detectLocalMode is NodeCIDR, but the Node has no podCIDRs: nobody is taken for a pod until it has",
		})
	}
}

// check is called when the Node is known, or took too long.
func (f *facts) check(logger klog.Logger) {
	if !f.nodeIP.Load() {
		logger.Info("Cannot tell this node's own address, assuming loopback. Its Node object has none or does not exist; --bind-address can name it")
	}
}

// follow keeps the addresses up to date until ctx is done.
func (f *facts) follow(ctx context.Context, px *proxier.Proxier) {
	f.addresses.Watch(ctx, func(list []netip.Addr) {
		px.UpdateFacts(func(known *proxier.Facts) { known.LocalAddrs = list })
	})
}
