// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"strings"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// deliver passes an object to the handler if it changed.
func (s *Source) deliver(e *entry, o *object) {
	if o.absent {
		s.withdraw(o.key, e)
		return
	}
	if e.delivered && e.digest == o.digest {
		return
	}
	update := e.delivered
	old := *e
	e.delivered, e.digest = true, o.digest
	switch {
	case o.service != nil && update:
		s.handler.OnServiceUpdate(serviceStub(o.key), o.service)
	case o.service != nil:
		s.handler.OnServiceAdd(o.service)
	case o.slice != nil:
		e.service = strings.Clone(o.slice.Labels[discoveryv1.LabelServiceName])
		if update && old.service != e.service {
			// The handler stores slices by Service, and an update has only the new
			// one.
			s.handler.OnEndpointSliceDelete(sliceStub(o.key, &old))
			update = false
		}
		if update {
			s.handler.OnEndpointSliceUpdate(sliceStub(o.key, &old), o.slice)
		} else {
			s.handler.OnEndpointSliceAdd(o.slice)
		}
	case o.cidr != nil:
		s.opts.OnServiceCIDR(o.key.name, o.cidr.Spec.CIDRs)
	case update:
		s.handler.OnNodeUpdate(nodeStub(o.key), o.node)
	default:
		s.handler.OnNodeAdd(o.node)
	}
}

// withdraw passes the deletion of an object to the handler.
func (s *Source) withdraw(k key, e *entry) {
	if !e.delivered {
		return
	}
	e.delivered = false
	switch k.kind {
	case kindService:
		s.handler.OnServiceDelete(serviceStub(k))
	case kindEndpointSlice:
		s.handler.OnEndpointSliceDelete(sliceStub(k, e))
	case kindNode:
		s.handler.OnNodeDelete(nodeStub(k))
	case kindServiceCIDR:
		s.opts.OnServiceCIDR(k.name, nil)
	}
}

// These placeholders stand for previous versions of objects, which are not kept.

func serviceStub(k key) *v1.Service {
	return &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: k.namespace, Name: k.name}}
}

func sliceStub(k key, e *entry) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: k.namespace, Name: k.name, Labels: map[string]string{discoveryv1.LabelServiceName: e.service},
	}}
}

func nodeStub(k key) *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: k.name}}
}
