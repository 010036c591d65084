// SPDX-License-Identifier: Apache-2.0

// Package fakeapi is an API server for programs that watch one. It lists objects in JSON and
// streams them in the requested format, JSON or protobuf, as far as client-go's informers need
// it. It validates nothing. It keeps Events that clients write, says that clients may do what
// it serves, and accepts and ignores all other writes.
package fakeapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"

	authorizationv1 "k8s.io/api/authorization/v1"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
)

// Object is what is served: a typed object, such as *v1.Service.
type Object interface {
	runtime.Object
	metav1.Object
}

// scheme has the kinds that can be served; client-go's has all of Kubernetes, and takes a minute to
// compile.
var (
	scheme = newScheme()
	codecs = serializer.NewCodecFactory(scheme)
)

func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	for _, add := range []func(*runtime.Scheme) error{v1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme, eventsv1.AddToScheme, authorizationv1.AddToScheme} {
		utilruntime.Must(add(s))
	}
	return s
}

// API is an http.Handler.
type API struct {
	mu        sync.Mutex           // guards all fields below
	changed   chan struct{}        // closed and replaced with every change
	version   int                  // of the newest change
	resources map[string]*resource // by URL path
	written   []eventsv1.Event     // by clients
}

// resource is a kind of objects with the history of their changes.
type resource struct {
	kind    schema.GroupVersionKind
	objects map[string]*object // by namespace and name
	events  []event            // oldest first
}

// object is encoded once, and not looked at again but for selectors.
type object struct {
	labels labels.Set
	fields fields.Set
	in     encodings
}

// encodings are an object in each format.
type encodings [formats][]byte

type format int

const (
	asJSON format = iota
	asProtobuf
	formats
)

// event is a change of an object. Whether a watch sees it as addition, change or
// deletion is up to its selectors.
type event struct {
	version       int
	before, after *object // nil for none
	in            encodings
}

// New makes an API with those objects. Kinds that a kube-proxy watches can be
// listed even if there are no objects of them.
func New(objects ...Object) *API {
	a := &API{changed: make(chan struct{}), version: 1, resources: map[string]*resource{}}
	for _, o := range []Object{&v1.Service{}, &v1.Node{}, &discoveryv1.EndpointSlice{}, &networkingv1.ServiceCIDR{}} {
		a.resource(o)
	}
	a.Put(objects...)
	return a
}

// Put adds objects, or replaces them.
func (a *API) Put(objects ...Object) { a.change(objects, true) }

// Delete removes objects; only their names matter.
func (a *API) Delete(objects ...Object) { a.change(objects, false) }

func (a *API) change(objects []Object, stay bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, o := range objects {
		r, key := a.resource(o), o.GetNamespace()+"/"+o.GetName()
		a.version++
		e := event{version: a.version, before: r.objects[key]}
		made := encode(o, r.kind, a.version)
		e.in = made.in
		if stay {
			e.after, r.objects[key] = made, made
		} else {
			delete(r.objects, key)
		}
		r.events = append(r.events, e)
	}
	close(a.changed)
	a.changed = make(chan struct{})
}

// resource of an object, made when it is the first of its kind.
func (a *API) resource(o Object) *resource {
	kinds, _, err := scheme.ObjectKinds(o)
	if err != nil {
		panic(fmt.Sprintf("fakeapi: %v", err)) // not a type of the scheme
	}
	path := pathOf(kinds[0])
	if a.resources[path] == nil {
		a.resources[path] = &resource{kind: kinds[0], objects: map[string]*object{}}
	}
	return a.resources[path]
}

func pathOf(kind schema.GroupVersionKind) string {
	plural, _ := meta.UnsafeGuessKindToResource(kind)
	if kind.Group == "" {
		return "/api/" + kind.Version + "/" + plural.Resource
	}
	return "/apis/" + kind.Group + "/" + kind.Version + "/" + plural.Resource
}

// encode leaves the caller's object as it is.
func encode(o Object, kind schema.GroupVersionKind, version int) *object {
	o = o.DeepCopyObject().(Object)
	o.GetObjectKind().SetGroupVersionKind(kind)
	o.SetResourceVersion(strconv.Itoa(version))
	return &object{
		labels: o.GetLabels(), in: encodingsOf(o),
		fields: fieldsOf(o),
	}
}

// fieldsOf are the fields that selectors can name.
func fieldsOf(o Object) fields.Set {
	set := fields.Set{"metadata.name": o.GetName(), "metadata.namespace": o.GetNamespace()}
	if pod, ok := o.(*v1.Pod); ok {
		set["spec.nodeName"] = pod.Spec.NodeName
	}
	return set
}

func encodingsOf(o runtime.Object) (in encodings) {
	var err error
	if in[asJSON], err = json.Marshal(o); err == nil {
		in[asProtobuf], err = runtime.Encode(protobuf.NewSerializer(scheme, scheme), o)
	}
	if err != nil {
		panic(fmt.Sprintf("fakeapi: %v", err)) // types of Kubernetes can be encoded
	}
	return in
}

// selected are the encoded objects a client wants, sorted by name.
func (r *resource) selected(s selector) []encodings {
	list := []encodings{}
	for _, key := range slices.Sorted(maps.Keys(r.objects)) {
		if o := r.objects[key]; s.matches(o) {
			list = append(list, o.in)
		}
	}
	return list
}

// selector is what a client wants to see.
type selector struct {
	labels labels.Selector
	fields fields.Selector
}

func (s selector) matches(o *object) bool {
	return o != nil && s.labels.Matches(o.labels) && s.fields.Matches(o.fields)
}

// seenBy returns the type of an event for a client with a selector, or empty if the client does
// not see it.
func (e event) seenBy(s selector) string {
	was, is := s.matches(e.before), s.matches(e.after)
	switch {
	case was && is:
		return "MODIFIED"
	case is:
		return "ADDED"
	case was:
		return "DELETED"
	}
	return ""
}
