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

// nodeToBoth calls one more handler for the Node.
type nodeToBoth struct {
	proxier.Handler
	also   proxier.NodeHandler
	logger klog.Logger
}

func (n *nodeToBoth) OnNodeAdd(node *v1.Node) {
	n.also.OnNodeAdd(node)
	n.Handler.OnNodeAdd(node)
}

func (n *nodeToBoth) OnNodeUpdate(old, node *v1.Node) {
	n.also.OnNodeUpdate(old, node)
	n.Handler.OnNodeUpdate(old, node)
}

func (n *nodeToBoth) OnNodeDelete(node *v1.Node) {
	n.logger.Info("The Node object was deleted; its last state stays in force, and health checks tell load balancers to send no new connections", "node", klog.KObj(node))
	n.also.OnNodeDelete(node)
	n.Handler.OnNodeDelete(node)
}

func (n *nodeToBoth) OnNodeSynced() {
	n.also.OnNodeSynced()
	n.Handler.OnNodeSynced()
}

// nodeLimit is how long the first sync waits for the Node. Meanwhile what
// the process before this one programmed goes on serving.
const nodeLimit = 10 * time.Second

// nodeBeforeServices delays OnServiceSynced, and with it the first sync, until the Node is
// known: without its zone, addresses and pod CIDRs, the first sync would remove what the
// second adds again. So it would without the hostPorts of Pods, if those are served.
type nodeBeforeServices struct {
	proxier.Handler
	clock    clock.WithDelayedExecution
	released func() // called once

	mu        sync.Mutex
	services  bool // all are known
	node      bool // it is known, or took too long
	awaitPods bool // hostPorts are served, and Pods are not known yet
}

func (n *nodeBeforeServices) OnServiceSynced() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.services = true
	if n.node && !n.awaitPods {
		n.Handler.OnServiceSynced()
		return
	}
	n.clock.AfterFunc(nodeLimit, func() { n.release(); n.podsKnown() })
}

// podsKnown is called when all Pods are known, or cannot be.
func (n *nodeBeforeServices) podsKnown() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.awaitPods {
		return
	}
	n.awaitPods = false
	if n.node && n.services {
		n.Handler.OnServiceSynced()
	}
}

func (n *nodeBeforeServices) OnNodeSynced() {
	n.Handler.OnNodeSynced()
	n.release()
}

func (n *nodeBeforeServices) release() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.node {
		return
	}
	n.node = true
	n.released()
	if n.services && !n.awaitPods {
		n.Handler.OnServiceSynced()
	}
}
