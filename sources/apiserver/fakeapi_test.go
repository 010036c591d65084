// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// deadline bounds every wait; a test that passes never gets near it.
const deadline = 20 * time.Second

// fakeAPI speaks as much of the list and watch protocol, in JSON, as the
// client needs. It does not filter: tests look at the selectors it was sent.
type fakeAPI struct {
	t      testing.TB
	server *httptest.Server

	mu          sync.Mutex
	changed     chan struct{}  // closed and replaced on every change
	asked       chan struct{}  // the same for requests
	streamLists bool           // serve WatchList
	down        bool           // answer 503
	lacks       map[string]int // answer that to requests for resources
	epoch       int            // watches of an older epoch end, and their history is gone
	version     int
	objects     map[string]map[string]metav1.Object // by resource, then key
	events      map[string][]event
	requests    []request
}

type event struct {
	version int
	data    []byte
}

type request struct {
	resource, verb, labels, fields, accept, agent string
	streamList                                    bool
}

var apiPaths = map[string]struct{ resource, kind, apiVersion string }{
	"/api/v1/services":   {"services", "Service", "v1"},
	"/api/v1/nodes":      {"nodes", "Node", "v1"},
	"/api/v1/pods":       {"pods", "Pod", "v1"},
	"/api/v1/namespaces": {"namespaces", "Namespace", "v1"},
	"/apis/discovery.k8s.io/v1/endpointslices": {"endpointslices", "EndpointSlice", "discovery.k8s.io/v1"},
	"/apis/networking.k8s.io/v1/servicecidrs":  {"servicecidrs", "ServiceCIDR", "networking.k8s.io/v1"},
}

func newFakeAPI(t testing.TB) *fakeAPI {
	api := &fakeAPI{
		t:       t,
		changed: make(chan struct{}),
		asked:   make(chan struct{}),
		version: 1,
		objects: map[string]map[string]metav1.Object{"services": {}, "nodes": {}, "endpointslices": {}, "servicecidrs": {}, "pods": {}, "namespaces": {}},
		lacks:   map[string]int{},
		events:  map[string][]event{},
	}
	api.server = httptest.NewServer(api)
	t.Cleanup(api.server.Close)
	return api
}

func (a *fakeAPI) client() *Client {
	client, err := NewClient(ClientConfig{Master: a.server.URL, QPS: -1})
	if err != nil {
		a.t.Fatal(err)
	}
	return client
}

func (a *fakeAPI) update(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	close(a.changed)
	a.changed = make(chan struct{})
}

func resourceOf(object metav1.Object) (resource, kind, apiVersion string) {
	switch object.(type) {
	case *v1.Service:
		return "services", "Service", "v1"
	case *v1.Node:
		return "nodes", "Node", "v1"
	case *v1.Pod:
		return "pods", "Pod", "v1"
	case *v1.Namespace:
		return "namespaces", "Namespace", "v1"
	case *networkingv1.ServiceCIDR:
		return "servicecidrs", "ServiceCIDR", "networking.k8s.io/v1"
	default:
		return "endpointslices", "EndpointSlice", "discovery.k8s.io/v1"
	}
}

// put adds or replaces an object and tells the watches.
func (a *fakeAPI) put(object metav1.Object) {
	a.update(func() {
		resource, _, _ := resourceOf(object)
		what := "ADDED"
		key := object.GetNamespace() + "/" + object.GetName()
		if a.objects[resource][key] != nil {
			what = "MODIFIED"
		}
		a.version++
		object.SetResourceVersion(strconv.Itoa(a.version))
		a.objects[resource][key] = object
		a.event(what, object)
	})
}

// remove deletes an object; a quiet removal reaches no watch.
func (a *fakeAPI) remove(object metav1.Object, quiet bool) {
	a.update(func() {
		resource, _, _ := resourceOf(object)
		a.version++
		delete(a.objects[resource], object.GetNamespace()+"/"+object.GetName())
		if !quiet {
			a.event("DELETED", object)
		}
	})
}

func (a *fakeAPI) event(what string, object metav1.Object) {
	resource, _, _ := resourceOf(object)
	a.events[resource] = append(a.events[resource], event{a.version, a.encode(what, object)})
}

func (a *fakeAPI) encode(what string, object metav1.Object) []byte {
	data, err := json.Marshal(map[string]any{"type": what, "object": a.typed(object)})
	if err != nil {
		panic(err)
	}
	return data
}

func (a *fakeAPI) typed(object metav1.Object) map[string]any {
	_, kind, apiVersion := resourceOf(object)
	data, err := json.Marshal(object)
	if err != nil {
		panic(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(data, &fields); err != nil {
		panic(err)
	}
	fields["kind"], fields["apiVersion"] = kind, apiVersion
	return fields
}

// expire ends all watches and forgets history, so that clients list again.
func (a *fakeAPI) expire() {
	a.update(func() { a.epoch++; a.events = map[string][]event{} })
}

func (a *fakeAPI) seen(match func(request) bool) []request {
	a.mu.Lock()
	defer a.mu.Unlock()
	var found []request
	for _, r := range a.requests {
		if match(r) {
			found = append(found, r)
		}
	}
	return found
}

func (a *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews" {
		a.review(w, r)
		return
	}
	path, ok := apiPaths[r.URL.Path]
	if !ok {
		http.NotFound(w, r)
		return
	}
	query := r.URL.Query()
	req := request{
		resource: path.resource, verb: "list",
		labels: query.Get("labelSelector"), fields: query.Get("fieldSelector"),
		accept: r.Header.Get("Accept"), agent: r.UserAgent(),
		streamList: query.Get("sendInitialEvents") == "true",
	}
	if query.Get("watch") != "" {
		req.verb = "watch"
	}
	w.Header().Set("Content-Type", "application/json")

	a.mu.Lock()
	a.requests = append(a.requests, req)
	close(a.asked)
	a.asked = make(chan struct{})
	since, _ := strconv.Atoi(query.Get("resourceVersion"))
	switch {
	case a.down:
		a.mu.Unlock()
		writeStatus(w, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable)
		return
	case a.lacks[path.resource] != 0:
		code := a.lacks[path.resource]
		a.mu.Unlock()
		writeStatus(w, code, map[int]metav1.StatusReason{http.StatusNotFound: metav1.StatusReasonNotFound, http.StatusForbidden: metav1.StatusReasonForbidden}[code])
		return
	case req.streamList && !a.streamLists:
		a.mu.Unlock()
		writeStatus(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
		return
	case req.verb == "list":
		items := []map[string]any{}
		for _, key := range a.keys(path.resource) {
			item := a.typed(a.objects[path.resource][key])
			delete(item, "kind")
			delete(item, "apiVersion")
			items = append(items, item)
		}
		list := map[string]any{
			"kind": path.kind + "List", "apiVersion": path.apiVersion,
			"metadata": map[string]any{"resourceVersion": strconv.Itoa(a.version)}, "items": items,
		}
		a.mu.Unlock()
		_ = json.NewEncoder(w).Encode(list)
		return
	case !req.streamList && a.epoch > 0 && len(a.events[path.resource]) == 0 && since < a.version:
		a.mu.Unlock()
		writeStatus(w, http.StatusGone, metav1.StatusReasonExpired)
		return
	}

	var backlog [][]byte
	if req.streamList {
		for _, key := range a.keys(path.resource) {
			backlog = append(backlog, a.encode("ADDED", a.objects[path.resource][key]))
		}
		backlog = append(backlog, []byte(fmt.Sprintf(
			`{"type":"BOOKMARK","object":{"kind":%q,"apiVersion":%q,"metadata":{"resourceVersion":"%d","annotations":{%q:"true"}}}}`,
			path.kind, path.apiVersion, a.version, metav1.InitialEventsAnnotationKey)))
		since = a.version
	}
	epoch := a.epoch
	a.mu.Unlock()

	for {
		for _, data := range backlog {
			if _, err := w.Write(append(data, '\n')); err != nil {
				return
			}
		}
		w.(http.Flusher).Flush()
		a.mu.Lock()
		backlog = nil
		for _, e := range a.events[path.resource] {
			if e.version > since {
				since = e.version
				backlog = append(backlog, e.data)
			}
		}
		changed, over := a.changed, a.epoch != epoch || a.down
		a.mu.Unlock()
		if over {
			return
		}
		if len(backlog) > 0 {
			continue
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// review answers whether a resource may be watched, which is a request of verb review.
func (a *fakeAPI) review(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	object, _, err := codecs.UniversalDeserializer().Decode(body, nil, nil)
	review, ok := object.(*authorizationv1.SelfSubjectAccessReview)
	if err != nil || !ok {
		a.t.Errorf("%T for a SelfSubjectAccessReview: %v", object, err)
		return
	}
	asked := review.Spec.ResourceAttributes
	req := request{resource: asked.Resource, verb: "review"}
	if asked.FieldSelector != nil {
		req.fields = asked.FieldSelector.RawSelector
	}
	a.mu.Lock()
	a.requests = append(a.requests, req)
	close(a.asked)
	a.asked = make(chan struct{})
	review.Status.Allowed = a.lacks[asked.Resource] != http.StatusForbidden
	a.mu.Unlock()
	review.Kind, review.APIVersion = "SelfSubjectAccessReview", "authorization.k8s.io/v1"
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(review)
}

func (a *fakeAPI) keys(resource string) []string {
	var keys []string
	for key := range a.objects[resource] {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

func writeStatus(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status:   metav1.StatusFailure, Code: int32(code), Reason: reason, Message: "from the fake API",
	})
}

// waitForRequest returns when the client has asked for something after now.
func (a *fakeAPI) waitForRequest() {
	a.t.Helper()
	a.mu.Lock()
	asked := a.asked
	a.mu.Unlock()
	select {
	case <-asked:
	case <-time.After(deadline):
		a.t.Fatal("timed out waiting for a request")
	}
}

// waitForRequests returns when the client has asked so often.
func (a *fakeAPI) waitForRequests(n int, match func(request) bool) {
	a.t.Helper()
	timeout := time.After(deadline)
	for {
		a.mu.Lock()
		asked := a.asked
		a.mu.Unlock()
		if len(a.seen(match)) >= n {
			return
		}
		select {
		case <-asked:
		case <-timeout:
			a.t.Fatalf("timed out waiting for %d requests", n)
		}
	}
}

// recorder is a proxier.Handler that writes down what it is told.
type recorder struct {
	mu      sync.Mutex
	lines   []string
	changed chan struct{}
	// block, when set, holds up every add.
	block chan struct{}
}

func newRecorder() *recorder { return &recorder{changed: make(chan struct{})} }

func (r *recorder) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, fmt.Sprintf(format, args...))
	close(r.changed)
	r.changed = make(chan struct{})
}

// wait returns when cond holds of the lines.
func (r *recorder) wait(t testing.TB, what string, cond func([]string) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	for {
		r.mu.Lock()
		lines, changed := slices.Clone(r.lines), r.changed
		r.mu.Unlock()
		if cond(lines) {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("timed out waiting for %s; recorded:\n%s", what, strings.Join(lines, "\n"))
		}
	}
}

func (r *recorder) waitFor(t testing.TB, line string) {
	t.Helper()
	r.wait(t, line, func(lines []string) bool { return slices.Contains(lines, line) })
}

func (r *recorder) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.lines)
}

func (r *recorder) OnServiceAdd(s *v1.Service) {
	if r.block != nil {
		<-r.block
	}
	r.note("add service %s/%s", s.Namespace, s.Name)
}
func (r *recorder) OnServiceUpdate(_, s *v1.Service) {
	r.note("update service %s/%s", s.Namespace, s.Name)
}
func (r *recorder) OnServiceDelete(s *v1.Service) {
	r.note("delete service %s/%s", s.Namespace, s.Name)
}
func (r *recorder) OnServiceSynced() { r.note("services synced") }

func (r *recorder) OnEndpointSliceAdd(s *discoveryv1.EndpointSlice) {
	r.note("add slice %s/%s of %s", s.Namespace, s.Name, s.Labels[discoveryv1.LabelServiceName])
}
func (r *recorder) OnEndpointSliceUpdate(_, s *discoveryv1.EndpointSlice) {
	r.note("update slice %s/%s of %s", s.Namespace, s.Name, s.Labels[discoveryv1.LabelServiceName])
}
func (r *recorder) OnEndpointSliceDelete(s *discoveryv1.EndpointSlice) {
	r.note("delete slice %s/%s of %s", s.Namespace, s.Name, s.Labels[discoveryv1.LabelServiceName])
}
func (r *recorder) OnEndpointSlicesSynced() { r.note("slices synced") }

func (r *recorder) OnNodeAdd(n *v1.Node)       { r.note("add node %s", n.Name) }
func (r *recorder) OnNodeUpdate(_, n *v1.Node) { r.note("update node %s", n.Name) }
func (r *recorder) OnNodeDelete(n *v1.Node)    { r.note("delete node %s", n.Name) }
func (r *recorder) OnNodeSynced()              { r.note("nodes synced") }

func (r *recorder) onServiceCIDR(name string, cidrs []string) {
	r.note("service CIDR %s %v", name, cidrs)
}
