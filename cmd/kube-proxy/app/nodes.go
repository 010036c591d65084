// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"net/netip"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/apiserver"
)

// nodeAddresses are the addresses of all nodes of the cluster.
type nodeAddresses struct {
	changed func([]netip.Addr) // sorted, without duplicates

	mu     sync.Mutex
	byName map[string][]netip.Addr
	synced bool
	last   []netip.Addr
}

var _ apiserver.NodesHandler = &nodeAddresses{}

func (n *nodeAddresses) OnNode(node *v1.Node) {
	var list []netip.Addr
	for _, a := range node.Status.Addresses {
		if addr, err := proxier.ParseAddr(a.Address); err == nil { // names of hosts are there, too
			list = append(list, addr)
		}
	}
	n.change(func() { n.byName[node.Name] = list })
}

func (n *nodeAddresses) OnNodeDelete(node *v1.Node) {
	n.change(func() { delete(n.byName, node.Name) })
}

func (n *nodeAddresses) OnNodesSynced() { n.change(func() { n.synced = true }) }

func (n *nodeAddresses) change(do func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	do()
	if !n.synced {
		return
	}
	var all []netip.Addr
	for _, list := range n.byName {
		all = append(all, list...)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	all = slices.Compact(all)
	if len(all) > 0 && !slices.Equal(all, n.last) { // without any, something is wrong: who may send does not change
		n.last = all
		n.changed(all)
	}
}

// followNodes tells the addresses of all nodes, until ctx is done. Without access to Nodes it tells nothing.
func (p *proxy) followNodes(ctx context.Context, tell func([]netip.Addr) error) {
	logger := klog.FromContext(ctx)
	addresses := &nodeAddresses{byName: map[string][]netip.Addr{}, changed: func(list []netip.Addr) {
		if err := tell(list); err != nil {
			logger.Error(err, "Cannot limit direct server return to nodes of the cluster; those known before may go on")
		}
	}}
	source := apiserver.NewNodes(p.client, addresses, apiserver.NodesOptions{
		Consequence: "direct server return takes packets from any address, not from nodes of the cluster alone",
	})
	if err := source.Run(ctx); err != nil {
		logger.Error(err, "Cannot read the addresses of nodes")
	}
}
