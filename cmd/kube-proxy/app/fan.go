// SPDX-License-Identifier: Apache-2.0

package app

import (
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
)

// observers tell several.
type observers []proxier.Observer

func (o observers) Queued(at time.Time) {
	for _, each := range o {
		each.Queued(at)
	}
}

func (o observers) Synced(info proxier.SyncInfo) {
	for _, each := range o {
		each.Synced(info)
	}
}

// nodeFan tells one more handler of the Node.
type nodeFan struct {
	proxier.Handler
	also proxier.NodeHandler
}

func (f *nodeFan) OnNodeAdd(node *v1.Node) {
	f.also.OnNodeAdd(node)
	f.Handler.OnNodeAdd(node)
}

func (f *nodeFan) OnNodeUpdate(old, node *v1.Node) {
	f.also.OnNodeUpdate(old, node)
	f.Handler.OnNodeUpdate(old, node)
}

func (f *nodeFan) OnNodeDelete(node *v1.Node) {
	klog.InfoS("The Node is gone; what was known of it stays in force, and load balancers are told to send nothing new", "node", klog.KObj(node))
	f.also.OnNodeDelete(node)
	f.Handler.OnNodeDelete(node)
}

func (f *nodeFan) OnNodeSynced() {
	f.also.OnNodeSynced()
	f.Handler.OnNodeSynced()
}

// nodeLimit is how long the first sync waits for the Node. What the process
// before this one programmed serves meanwhile.
const nodeLimit = 10 * time.Second

// nodeFirst holds back the news that all Services are known until the Node is:
// without its zone, addresses and pod CIDRs, the first sync would take away what
// the second brings back.
type nodeFirst struct {
	proxier.Handler
	clock    clock.WithDelayedExecution
	released func() // told once

	mu       sync.Mutex
	services bool // all are known
	node     bool // it is known, or took too long
}

func (f *nodeFirst) OnServiceSynced() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.services = true
	if f.node {
		f.Handler.OnServiceSynced()
		return
	}
	f.clock.AfterFunc(nodeLimit, f.release)
}

func (f *nodeFirst) OnNodeSynced() {
	f.Handler.OnNodeSynced()
	f.release()
}

func (f *nodeFirst) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.node {
		return
	}
	f.node = true
	f.released()
	if f.services {
		f.Handler.OnServiceSynced()
	}
}
