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

// entry is what an informer's store keeps of an object: enough to recognise it when it changes
// or is deleted. The object itself is dropped once the handler has received it. Keeping 10,000
// Services and their slices would take as much memory as the rest of the process.
type entry[T runtime.Object] struct {
	metav1.Object            // emptyMeta, for all but the methods below: an ObjectMeta of its own would be the largest part
	namespace, name, version string
	service                  string // of an EndpointSlice; a map of labels would be large, too
	object                   T
	fresh                    bool
}

func (e *entry[T]) GetNamespace() string       { return e.namespace }
func (e *entry[T]) GetName() string            { return e.name }
func (e *entry[T]) GetResourceVersion() string { return e.version }

// emptyMeta is shared by all entries, and never changed.
var emptyMeta metav1.Object = &metav1.ObjectMeta{}

func (e *entry[T]) meta() metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: e.namespace, Name: e.name, ResourceVersion: e.version}
}

// object is what informers have.
type object interface {
	runtime.Object
	metav1.Object
}

// kind passes one kind of object from an informer to the handler.
type kind[T object] struct {
	logger   klog.Logger
	resource string
	// identity makes an object with only its name and what a delete needs.
	identity func(m metav1.ObjectMeta, service string) T
	add      func(T)
	update   func(old, new T)
	delete   func(T)
}

// wrap makes an entry for a trimmed object.
func (k *kind[T]) wrap(obj any) any {
	object, ok := obj.(T)
	if !ok {
		return obj // a tombstone, or an unexpected type, which typed reports
	}
	return &entry[T]{
		Object: emptyMeta, namespace: object.GetNamespace(), name: object.GetName(), version: object.GetResourceVersion(),
		service: object.GetLabels()[discoveryv1.LabelServiceName], object: object, fresh: true,
	}
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
		k.update(k.identity(was.meta(), was.service), object)
	}
}

// OnDelete implements cache.ResourceEventHandler.
func (k *kind[T]) OnDelete(obj any) {
	// The watch missed the delete, but a new list lacks the object. The tombstone has
	// its last known state.
	if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = tombstone.Obj
	}
	if e := k.typed(obj); e != nil {
		k.delete(k.identity(e.meta(), e.service))
	}
}

func (k *kind[T]) typed(obj any) *entry[T] {
	e, ok := obj.(*entry[T])
	if !ok {
		k.logger.Error(fmt.Errorf("unexpected type %T", obj), "Ignoring an object from the informer", "resource", k.resource)
		return nil
	}
	return e
}

// take returns the object, once.
func (e *entry[T]) take() (object T, ok bool) {
	var none T
	object, ok = e.object, e.fresh
	e.object, e.fresh = none, false
	return object, ok
}
