// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/apiserver"
)

// clusterAddresses are the addresses of all nodes of the cluster, and the ranges of their pods.
type clusterAddresses struct {
	changed func(proxier.Cluster) // lists are sorted, without duplicates

	mu     sync.Mutex
	byName map[string]proxier.Cluster
	synced bool
	last   proxier.Cluster
}

var _ apiserver.NodesHandler = &clusterAddresses{}

func (c *clusterAddresses) OnNode(node *v1.Node) {
	var of proxier.Cluster
	for _, a := range node.Status.Addresses {
		if addr, err := proxier.ParseAddr(a.Address); err == nil { // names of hosts are there, too
			of.Nodes = append(of.Nodes, addr)
		}
	}
	for _, text := range node.Spec.PodCIDRs {
		if p, err := proxier.ParseCIDR(text); err == nil {
			of.Pods = append(of.Pods, p)
		}
	}
	c.change(func() { c.byName[node.Name] = of })
}

func (c *clusterAddresses) OnNodeDelete(node *v1.Node) {
	c.change(func() { delete(c.byName, node.Name) })
}

func (c *clusterAddresses) OnNodesSynced() { c.change(func() { c.synced = true }) }

func (c *clusterAddresses) change(do func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	do()
	if !c.synced {
		return
	}
	var all proxier.Cluster
	for _, of := range c.byName {
		all.Nodes, all.Pods = append(all.Nodes, of.Nodes...), append(all.Pods, of.Pods...)
	}
	slices.SortFunc(all.Nodes, netip.Addr.Compare)
	slices.SortFunc(all.Pods, func(a, b netip.Prefix) int { return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits()) })
	all.Nodes, all.Pods = slices.Compact(all.Nodes), slices.Compact(all.Pods)
	// Without any node, something is wrong: who may send does not change.
	if len(all.Nodes) > 0 && !(slices.Equal(all.Nodes, c.last.Nodes) && slices.Equal(all.Pods, c.last.Pods)) {
		c.last = all
		c.changed(all)
	}
}

// followNodes tells the addresses of all nodes and their pods, until ctx is done. Without access to Nodes it tells nothing.
func (p *proxy) followNodes(ctx context.Context, tell func(proxier.Cluster) error) {
	logger := klog.FromContext(ctx)
	addresses := &clusterAddresses{byName: map[string]proxier.Cluster{}, changed: func(c proxier.Cluster) {
		if err := tell(c); err != nil {
			logger.Error(err, "Cannot tell programs all nodes of the cluster, for direct server return; they go on with those known before")
		}
	}}
	source := apiserver.NewNodes(p.client, addresses, apiserver.NodesOptions{
		Consequence: "direct server return takes packets from any address, not from nodes of the cluster alone",
	})
	if err := source.Run(ctx); err != nil {
		logger.Error(err, "Cannot read the addresses of nodes")
	}
}
