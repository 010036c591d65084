// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"net/netip"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/nodefacts"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/uplinks"
)

// facts is what this process finds out about its node.
type facts struct {
	settings     *nodefacts.Settings
	addresses    nodefacts.Addresses
	serviceCIDRs nodefacts.ServiceCIDRs
	uplinks      *uplinks.Watcher
	known        proxier.Facts // when the proxier starts
	nodeIP       atomic.Bool   // the node has an address of its own
}

// start collects what is known before the Node is.
func (f *facts) start(ctx context.Context) {
	logger := klog.FromContext(ctx)
	for _, warning := range f.settings.Warnings {
		logger.Info("The configuration may not be what is meant", "what", warning)
	}
	if f.settings.Policy.MasqueradeAll {
		logger.Info("masqueradeAll does nothing for connections that are balanced at their socket: no packet is translated, and backends see the client")
	}
	if n := &f.settings.Policy.NodePorts; len(n.CIDRs) == 0 && !n.Primary && !n.Localhost && !n.All {
		logger.Info("NodePorts are served at all addresses of this node; --nodeport-addresses=primary keeps to those of its Node object")
	}
	f.known = f.settings.Facts()
	f.nodeIP.Store(nodefacts.KnowsNodeIP(&f.known))
	f.uplinks.SetNodeIPs(f.known.NodeIPs[:])
	var err error
	if f.known.LocalAddrs, err = f.addresses.List(); err != nil {
		logger.Error(err, "Cannot list the addresses of this node; NodePorts are not served until that works")
	}
}

// fromNode is proxier.Options.NodeFacts.
func (f *facts) fromNode(node *v1.Node, known *proxier.Facts) {
	f.settings.FromNode(node, known)
	f.nodeIP.Store(nodefacts.KnowsNodeIP(known))
	f.uplinks.SetNodeIPs(known.NodeIPs[:])
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
