// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// NodesHandler is told of the addresses of all Nodes. Calls are sequential.
type NodesHandler interface {
	OnNode(*v1.Node)
	OnNodeDelete(*v1.Node)
	OnNodesSynced()
}

// NodesOptions are the options of NewNodes.
type NodesOptions struct {
	// Consequence describes what does not work without access to Nodes.
	Consequence string
	// Clock defaults to the real one.
	Clock clock.PassiveClock
}

// NewNodes builds a Source that reads the addresses of all Nodes, if it is allowed to, as NewPods does.
func NewNodes(client *Client, handler NodesHandler, opts NodesOptions) *Source {
	s := newSource(client, Options{Clock: opts.Clock})
	s.trim.addresses = true
	s.subscriptions = func(logger klog.Logger) []subscription {
		return []subscription{reviewed(s, client.Nodes(), logger, opts.Consequence, func(m metav1.ObjectMeta) *v1.Node { return &v1.Node{ObjectMeta: m} },
			handler.OnNode, handler.OnNodeDelete, handler.OnNodesSynced)}
	}
	return s
}
