// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"sync"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// PodHandler is told of the Pods of a node and of all Namespaces. Calls for Pods are sequential, and so are those
// for Namespaces; both are concurrent.
type PodHandler interface {
	// OnPod and OnNamespace are called for objects that are new or have changed.
	OnPod(*v1.Pod)
	OnPodDelete(*v1.Pod)
	OnPodsSynced()
	OnNamespace(*v1.Namespace)
	OnNamespaceDelete(*v1.Namespace)
	OnNamespacesSynced()
}

// PodOptions are the options of NewPods.
type PodOptions struct {
	// NodeName is the node whose Pods are watched.
	NodeName string
	// Annotations of Pods and Labels of Namespaces to keep. Others are dropped, as are all fields but
	// spec.hostNetwork and status.phase.
	Annotations, Labels []string
	// Consequence describes what does not work without access to Pods or Namespaces.
	PodConsequence, NamespaceConsequence string
	// Clock defaults to the real one.
	Clock clock.PassiveClock
}

// HostPortHandler is told of the Pods of a node. Calls are sequential, but for OnPodsDenied.
type HostPortHandler interface {
	OnPod(*v1.Pod)
	OnPodDelete(*v1.Pod)
	OnPodsSynced()
	// OnPodsDenied is called when Pods may not be read, once. They may be later.
	OnPodsDenied(error)
}

// HostPortOptions are the options of NewHostPorts.
type HostPortOptions struct {
	// NodeName is the node whose Pods are watched.
	NodeName string
	// Consequence describes what does not work without access to Pods.
	Consequence string
	// Clock defaults to the real one.
	Clock clock.PassiveClock
}

// NewHostPorts builds a Source that reads the hostPorts and addresses of Pods, if it is allowed to, as NewPods does.
func NewHostPorts(client *Client, handler HostPortHandler, opts HostPortOptions) *Source {
	s := newSource(client, Options{Clock: opts.Clock})
	s.trim.hostPorts = true
	s.subscriptions = func(logger klog.Logger) []subscription {
		pods := s.pods(client, logger, opts.NodeName, opts.Consequence, handler)
		var once sync.Once
		pods.denied = func(err error) { once.Do(func() { handler.OnPodsDenied(err) }) }
		return []subscription{pods}
	}
	return s
}

// onPods is what both kinds of handlers have.
type onPods interface {
	OnPod(*v1.Pod)
	OnPodDelete(*v1.Pod)
	OnPodsSynced()
}

func (s *Source) pods(client *Client, logger klog.Logger, node, consequence string, handler onPods) subscription {
	pods := reviewed(s, client.Pods(), logger, consequence, func(m metav1.ObjectMeta) *v1.Pod { return &v1.Pod{ObjectMeta: m} }, handler.OnPod, handler.OnPodDelete, handler.OnPodsSynced)
	pods.tweak = func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
	}
	return pods
}

// reviewed is a subscription to all objects of a resource that the API server may refuse: it is asked first.
func reviewed[T object](s *Source, r Resource, logger klog.Logger, consequence string, identity func(metav1.ObjectMeta) T, on, deleted func(T), synced func()) subscription {
	return subscription{
		resource: r.name,
		optional: consequence, absentInterval: s.absentInterval, review: true,
		object: identity(metav1.ObjectMeta{}),
		tweak:  func(*metav1.ListOptions) {},
		list:   r.List,
		watch:  r.Watch,
		handler: &kind[T]{
			logger: logger, resource: r.name,
			identity: func(m metav1.ObjectMeta, _ string) T { return identity(m) },
			add:      on,
			update:   func(_, o T) { on(o) },
			delete:   deleted,
		},
		synced: synced,
	}
}

// NewPods builds a Source that reads Pods and Namespaces, if it is allowed to list and watch them: it asks by
// SelfSubjectAccessReviews, again every ten minutes. Until it may read Pods, it does not ask for Namespaces.
func NewPods(client *Client, handler PodHandler, opts PodOptions) *Source {
	s := newSource(client, Options{Clock: opts.Clock})
	s.trim.podAnnotations, s.trim.namespaceLabels = opts.Annotations, opts.Labels
	s.subscriptions = func(logger klog.Logger) []subscription {
		podsSynced := make(chan struct{})
		pods := s.pods(client, logger, opts.NodeName, opts.PodConsequence, handler)
		pods.synced = func() { handler.OnPodsSynced(); close(podsSynced) }
		namespaces := reviewed(s, client.Namespaces(), logger, opts.NamespaceConsequence, func(m metav1.ObjectMeta) *v1.Namespace { return &v1.Namespace{ObjectMeta: m} },
			handler.OnNamespace, handler.OnNamespaceDelete, handler.OnNamespacesSynced)
		namespaces.after = podsSynced
		return []subscription{pods, namespaces}
	}
	return s
}
