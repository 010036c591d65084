// SPDX-License-Identifier: Apache-2.0

package app

import (
	"time"

	v1 "k8s.io/api/core/v1"

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
	f.also.OnNodeDelete(node)
	f.Handler.OnNodeDelete(node)
}

func (f *nodeFan) OnNodeSynced() {
	f.also.OnNodeSynced()
	f.Handler.OnNodeSynced()
}
