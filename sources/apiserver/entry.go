// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// entry is what an informer's store keeps of an object: enough to know it when
// it comes again or goes. The object itself is there until the handler has
// seen it; keeping 10,000 Services and their slices for nobody to read would
// cost as much as the rest of the process.
type entry[T runtime.Object] struct {
	metav1.ObjectMeta
	service string // of an EndpointSlice; a map of labels would be the largest part
	object  T
	fresh   bool
}

// kind is how one kind of object passes through an informer.
type kind[T interface {
	runtime.Object
	metav1.Object
}] struct {
	resource string
	// identity makes an object that has only its name, and what a delete needs.
	identity func(m metav1.ObjectMeta, service string) T
	add      func(T)
	update   func(old, new T)
	delete   func(T)
}

// wrap makes an entry of a trimmed object.
func (k *kind[T]) wrap(obj any) any {
	object, ok := obj.(T)
	if !ok {
		return obj // a tombstone, or what typed will complain about
	}
	e := &entry[T]{object: object, fresh: true}
	e.Namespace, e.Name, e.ResourceVersion = object.GetNamespace(), object.GetName(), object.GetResourceVersion()
	e.service = object.GetLabels()[discoveryv1.LabelServiceName]
	return e
}

// OnAdd implements cache.ResourceEventHandler.
func (k *kind[T]) OnAdd(obj any, _ bool) {
	if e := k.typed(obj); e != nil {
		if object, ok := e.take(); ok {
			k.add(object)
		}
	}
}

// OnUpdate implements cache.ResourceEventHandler.
func (k *kind[T]) OnUpdate(oldObj, newObj any) {
	was, e := k.typed(oldObj), k.typed(newObj)
	if was == nil || e == nil {
		return
	}
	if object, ok := e.take(); ok {
		k.update(k.identity(was.ObjectMeta, was.service), object)
	}
}

// OnDelete implements cache.ResourceEventHandler.
func (k *kind[T]) OnDelete(obj any) {
	// The delete itself was missed and a new list no longer has the object:
	// what is left is its last known state.
	if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = tombstone.Obj
	}
	if e := k.typed(obj); e != nil {
		k.delete(k.identity(e.ObjectMeta, e.service))
	}
}

func (k *kind[T]) typed(obj any) *entry[T] {
	e, ok := obj.(*entry[T])
	if !ok {
		klog.Background().Error(nil, "Unexpected object from the informer", "resource", k.resource, "type", fmt.Sprintf("%T", obj))
		return nil
	}
	return e
}

// take hands the object over, once.
func (e *entry[T]) take() (object T, ok bool) {
	var none T
	object, ok = e.object, e.fresh
	e.object, e.fresh = none, false
	return object, ok
}
