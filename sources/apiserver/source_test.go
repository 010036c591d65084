// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	clocktesting "k8s.io/utils/clock/testing"
)

func makeService(namespace, name string) *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}},
	}
}

func makeSlice(namespace, name, service string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.1"}}},
	}
}

func makeNode(name string) *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// run starts a source and ends it with the test, checking that it ends.
func run(t *testing.T, s *Source) context.CancelFunc {
	t.Helper()
	return runIn(t, context.Background(), s)
}

func runIn(t *testing.T, ctx context.Context, s *Source) context.CancelFunc {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(deadline):
			t.Error("Run does not end with its context")
		}
	})
	return cancel
}

func TestSource(t *testing.T) {
	for _, streamLists := range []bool{true, false} {
		t.Run(fmt.Sprintf("streamLists=%t", streamLists), func(t *testing.T) {
			api := newFakeAPI(t)
			api.streamLists = streamLists
			api.put(makeService("ns1", "a"))
			api.put(makeService("ns1", "b"))
			api.put(makeSlice("ns1", "a-1", "a"))
			api.put(makeNode("node1"))

			rec := newRecorder()
			run(t, New(api.client(), rec, Options{NodeName: "node1"}))
			rec.waitFor(t, "services synced")
			rec.waitFor(t, "slices synced")
			rec.waitFor(t, "nodes synced")
			got := rec.all()
			slices.Sort(got)
			want := []string{
				"add node node1", "add service ns1/a", "add service ns1/b", "add slice ns1/a-1 of a",
				"nodes synced", "services synced", "slices synced",
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("after the first list (-want +got):\n%s", diff)
			}

			api.put(makeService("ns1", "c"))
			rec.waitFor(t, "add service ns1/c")
			api.put(makeService("ns1", "a"))
			rec.waitFor(t, "update service ns1/a")
			api.remove(makeService("ns1", "b"), false)
			rec.waitFor(t, "delete service ns1/b")
			api.put(makeSlice("ns1", "a-1", "a"))
			rec.waitFor(t, "update slice ns1/a-1 of a")
			api.put(makeNode("node1"))
			rec.waitFor(t, "update node node1")
			api.remove(makeNode("node1"), false)
			rec.waitFor(t, "delete node node1")

			lists := api.seen(func(r request) bool { return r.verb == "list" })
			if streamLists != (len(lists) == 0) {
				t.Errorf("plain lists with streamLists=%t: %+v", streamLists, lists)
			}
			if api.seen(func(r request) bool { return r.streamList }) == nil {
				t.Error("WatchList was never tried")
			}
		})
	}
}

func TestRequests(t *testing.T) {
	api := newFakeAPI(t)
	rec := newRecorder()
	run(t, New(api.client(), rec, Options{NodeName: "node1"}))
	for _, line := range []string{"services synced", "slices synced", "nodes synced"} {
		rec.waitFor(t, line)
	}
	// The plain list has synced them; now every resource opens its watch.
	api.put(makeService("ns1", "a"))
	api.put(makeSlice("ns1", "a-1", "a"))
	api.put(makeNode("node1"))
	for _, line := range []string{"add service ns1/a", "add slice ns1/a-1 of a", "add node node1"} {
		rec.waitFor(t, line)
	}

	want := map[string]struct{ labels, fields string }{
		"services":       {"!service.kubernetes.io/service-proxy-name", "spec.clusterIP!=None"},
		"endpointslices": {"!service.kubernetes.io/headless", ""},
		"nodes":          {"", "metadata.name=node1"},
	}
	seen := map[string]bool{}
	for _, r := range api.seen(func(request) bool { return true }) {
		seen[r.resource+" "+r.verb] = true
		if r.labels != want[r.resource].labels || r.fields != want[r.resource].fields {
			t.Errorf("%s %s: labelSelector %q, fieldSelector %q", r.verb, r.resource, r.labels, r.fields)
		}
		if !strings.HasPrefix(r.accept, "application/vnd.kubernetes.protobuf") || !strings.Contains(r.accept, "application/json") {
			t.Errorf("%s %s: Accept %q, want protobuf first and JSON possible", r.verb, r.resource, r.accept)
		}
		if !strings.HasPrefix(r.agent, "kube-proxy/") || !strings.HasSuffix(r.agent, " tandem") {
			t.Errorf("%s %s: user agent %q", r.verb, r.resource, r.agent)
		}
	}
	for resource := range want {
		for _, verb := range []string{"list", "watch"} {
			if !seen[resource+" "+verb] {
				t.Errorf("no %s of %s was seen", verb, resource)
			}
		}
	}
}

func makeServiceCIDR(name string, cidrs ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs}}
}

func TestServiceCIDRs(t *testing.T) {
	api := newFakeAPI(t)
	api.put(makeServiceCIDR("kubernetes", "10.96.0.0/16", "fd00:10:96::/112"))
	rec := newRecorder()
	run(t, New(api.client(), rec, Options{OnServiceCIDR: rec.onServiceCIDR}))
	rec.waitFor(t, "service CIDR kubernetes [10.96.0.0/16 fd00:10:96::/112]")
	api.put(makeServiceCIDR("more", "10.97.0.0/24"))
	rec.waitFor(t, "service CIDR more [10.97.0.0/24]")
	api.put(makeServiceCIDR("more", "10.98.0.0/24"))
	rec.waitFor(t, "service CIDR more [10.98.0.0/24]")
	api.remove(makeServiceCIDR("more"), false)
	rec.waitFor(t, "service CIDR more []")
}

// An old API server, or a role without them: said once, not asked often, and
// nothing else waits. Once they are there they count.
func TestNoServiceCIDRs(t *testing.T) {
	for _, code := range []int{http.StatusNotFound, http.StatusForbidden} {
		for _, streamLists := range []bool{true, false} {
			t.Run(fmt.Sprintf("%d streamLists=%t", code, streamLists), func(t *testing.T) {
				t.Parallel() // the informer's own pause takes a second
				logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
				api := newFakeAPI(t)
				api.lacks["servicecidrs"], api.streamLists = code, streamLists
				rec := newRecorder()
				s := New(api.client(), rec, Options{OnServiceCIDR: rec.onServiceCIDR})
				s.absentInterval = time.Millisecond
				runIn(t, klog.NewContext(t.Context(), logger), s)
				rec.waitFor(t, "services synced")
				rec.waitFor(t, "slices synced")
				api.waitForRequests(1, listsServiceCIDRs)
				api.update(func() { delete(api.lacks, "servicecidrs") })
				api.put(makeServiceCIDR("kubernetes", "10.96.0.0/16"))
				rec.waitFor(t, "service CIDR kubernetes [10.96.0.0/16]")
				text := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
				if n := strings.Count(text, "continuing without it"); n != 1 || strings.Contains(text, "Cannot list") {
					t.Errorf("said %d times, want once:\n%s", n, text)
				}
			})
		}
	}
}

// During the pause, there is no other request, and the end of Run does not wait for it.
func TestNoServiceCIDRsPause(t *testing.T) {
	api := newFakeAPI(t)
	api.lacks["servicecidrs"] = http.StatusNotFound
	rec := newRecorder()
	run(t, New(api.client(), rec, Options{OnServiceCIDR: rec.onServiceCIDR}))
	rec.waitFor(t, "services synced")
	api.waitForRequests(1, listsServiceCIDRs)
}

func listsServiceCIDRs(r request) bool { return r.resource == "servicecidrs" && r.verb == "list" }

func TestNoNodeName(t *testing.T) {
	api := newFakeAPI(t)
	rec := newRecorder()
	run(t, New(api.client(), rec, Options{}))
	rec.waitFor(t, "services synced")
	rec.waitFor(t, "slices synced")
	if nodes := api.seen(func(r request) bool { return r.resource == "nodes" }); nodes != nil {
		t.Errorf("asked for nodes without a node name: %+v", nodes)
	}
}

// The gate opens only when the handler has seen everything, not when the
// informer's store is full.
func TestSyncedAfterHandler(t *testing.T) {
	api := newFakeAPI(t)
	for i := range 10 {
		api.put(makeService("ns1", fmt.Sprintf("svc%d", i)))
	}
	rec := newRecorder()
	rec.block = make(chan struct{})
	run(t, New(api.client(), rec, Options{}))
	rec.waitFor(t, "slices synced") // the other resource is not held up
	for range 9 {
		rec.block <- struct{}{}
	}
	rec.wait(t, "nine Services", func(lines []string) bool { return len(lines) == 10 })
	if slices.Contains(rec.all(), "services synced") {
		t.Error("synced before the handler returned from the last Service")
	}
	close(rec.block)
	rec.waitFor(t, "services synced")
	if got := rec.all(); got[len(got)-1] != "services synced" || len(got) != 12 {
		t.Errorf("synced is not last of all: %q", got)
	}
}

func TestDeleteMissedByWatch(t *testing.T) {
	api := newFakeAPI(t)
	api.put(makeService("ns1", "a"))
	api.put(makeSlice("ns1", "a-1", "a"))
	rec := newRecorder()
	run(t, New(api.client(), rec, Options{}))
	rec.waitFor(t, "services synced")
	rec.waitFor(t, "slices synced")
	// The deletes happen unseen; the next list leaves only tombstones.
	api.remove(makeService("ns1", "a"), true)
	api.remove(makeSlice("ns1", "a-1", "a"), true)
	api.expire()
	rec.waitFor(t, "delete service ns1/a")
	rec.waitFor(t, "delete slice ns1/a-1 of a")
}

func TestSliceMovesToOtherService(t *testing.T) {
	api := newFakeAPI(t)
	api.put(makeSlice("ns1", "x", "a"))
	rec := newRecorder()
	run(t, New(api.client(), rec, Options{}))
	rec.waitFor(t, "slices synced")
	api.put(makeSlice("ns1", "x", "b"))
	rec.waitFor(t, "add slice ns1/x of b")
	got := slices.DeleteFunc(rec.all(), func(l string) bool { return strings.HasSuffix(l, "synced") })
	want := []string{"add slice ns1/x of a", "delete slice ns1/x of a", "add slice ns1/x of b"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestLastEvents: each event of a watch counts, and only for its own resource.
func TestLastEvents(t *testing.T) {
	api := newFakeAPI(t)
	rec, client := newRecorder(), api.client()
	run(t, New(client, rec, Options{}))
	rec.waitFor(t, "services synced")
	rec.waitFor(t, "slices synced")
	for end := time.Now().Add(deadline); len(client.LastEvents()) < 2; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not each resource is watched: %v", client.LastEvents())
		}
	}
	before := client.LastEvents()
	api.put(makeService("ns1", "a"))
	rec.waitFor(t, "add service ns1/a")
	after := client.LastEvents()
	if !after["services"].After(before["services"]) || after["endpointslices"] != before["endpointslices"] {
		t.Errorf("before the event %v, afterwards %v", before, after)
	}
}

// State stays as it is while the API server is away, and goes on after.
func TestAPIServerAway(t *testing.T) {
	api := newFakeAPI(t)
	api.put(makeService("ns1", "a"))
	rec := newRecorder()
	run(t, New(api.client(), rec, Options{}))
	rec.waitFor(t, "services synced")
	rec.waitFor(t, "slices synced")
	api.update(func() { api.down = true })
	api.waitForRequest()
	if slices.Contains(rec.all(), "delete service ns1/a") {
		t.Error("a Service was deleted because the API server is away")
	}
	api.update(func() { api.down = false })
	api.put(makeService("ns1", "b"))
	rec.waitFor(t, "add service ns1/b")
}

func TestRunTwice(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	s := New(newFakeAPI(t).client(), newRecorder(), Options{})
	if err := s.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.Run(ctx); err == nil {
		t.Error("a second Run succeeded")
	}
}

func TestKind(t *testing.T) {
	rec := newRecorder()
	k := &kind[*v1.Service]{
		resource: "services", add: rec.OnServiceAdd, update: rec.OnServiceUpdate, delete: rec.OnServiceDelete,
		identity: func(m metav1.ObjectMeta, _ string) *v1.Service { return &v1.Service{ObjectMeta: m} },
	}
	k.OnDelete(cache.DeletedFinalStateUnknown{Key: "ns1/gone", Obj: k.wrap(makeService("ns1", "gone"))})
	k.OnDelete(k.wrap(makeService("ns1", "seen")))
	k.OnDelete(cache.DeletedFinalStateUnknown{Key: "ns1/odd", Obj: makeNode("odd")})
	k.OnDelete(cache.DeletedFinalStateUnknown{Key: "ns1/nil"})
	k.OnAdd(makeNode("odd"), true)
	k.OnUpdate(makeNode("odd"), k.wrap(makeService("ns1", "a")))
	k.OnUpdate(k.wrap(makeService("ns1", "a")), makeNode("odd"))
	if diff := cmp.Diff([]string{"delete service ns1/gone", "delete service ns1/seen"}, rec.all()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// The store keeps no object that was handed over, and repeats none.
	e := k.wrap(makeService("ns1", "b"))
	k.OnAdd(e, false)
	k.OnAdd(e, false)
	if got := rec.all(); len(got) != 3 || e.(*entry[*v1.Service]).object != nil {
		t.Errorf("%q %+v", got, e)
	}
}

func TestRefusedStreamedListFallsBack(t *testing.T) {
	refused := &url.Error{Op: "Get", URL: "https://api", Err: &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}}
	f := subscription{resource: "services", tweak: func(*metav1.ListOptions) {}, watch: func(context.Context, metav1.ListOptions) (watch.Interface, error) {
		return nil, refused
	}}
	lw := cache.ToListerWatcherWithContext(f.listWatch(nil, &connection{clock: clocktesting.NewFakePassiveClock(time.Time{})}))
	stream := true
	if _, err := lw.WatchWithContext(t.Context(), metav1.ListOptions{SendInitialEvents: &stream}); err == nil || utilnet.IsConnectionRefused(err) {
		t.Errorf("the reflector would sleep on %v", err)
	}
	if _, err := lw.WatchWithContext(t.Context(), metav1.ListOptions{}); !utilnet.IsConnectionRefused(err) {
		t.Errorf("a plain watch must stay retriable without a list, got %v", err)
	}
}

func TestConnectionLogsChanges(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(2)))
	ctx := klog.NewContext(t.Context(), logger)
	clk := clocktesting.NewFakePassiveClock(time.Unix(1_000_000, 0))
	conn := &connection{resource: "services", clock: clk}

	refused := func(port int) error {
		return &url.Error{Op: "Get", URL: fmt.Sprintf("https://api/?timeoutSeconds=%d", port), Err: &net.OpError{
			Op: "dial", Addr: &net.TCPAddr{Port: port}, Err: syscall.ECONNREFUSED}}
	}
	conn.succeeded(ctx) // nothing failed: nothing to say
	for i := range 100 {
		conn.failed(ctx, refused(i))
	}
	clk.SetTime(clk.Now().Add(time.Minute))
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "services"}, "", errors.New("no"))
	conn.failed(ctx, forbidden)
	conn.failed(ctx, forbidden)
	clk.SetTime(clk.Now().Add(reminder))
	conn.failed(ctx, forbidden)
	conn.succeeded(ctx)
	conn.succeeded(ctx)
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	conn.failed(cancelled, context.Canceled)

	text := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if n := strings.Count(text, "Cannot list or watch"); n != 3 {
		t.Errorf("%d errors logged, want 3 (refused, forbidden, reminder):\n%s", n, text)
	}
	if n := strings.Count(text, "Watch recovered"); n != 1 {
		t.Errorf("%d recoveries logged, want 1:\n%s", n, text)
	}
	if !strings.Contains(text, "failedFor=\"11m0s\"") {
		t.Errorf("the recovery does not say how long it took:\n%s", text)
	}
}

func TestErrorClass(t *testing.T) {
	class := func(err error) string { return errorClass(err) }
	reset := func(port int) error {
		return &url.Error{Op: "Get", URL: "https://api", Err: &net.OpError{Op: "read", Source: &net.TCPAddr{Port: port}, Err: errors.New("odd")}}
	}
	if class(reset(1)) != class(reset(2)) {
		t.Error("the local port makes a difference")
	}
	if class(reset(1)) == class(syscall.ECONNREFUSED) {
		t.Error("two kinds of failure are one")
	}
	if got := class(&url.Error{Op: "Get", Err: context.DeadlineExceeded}); got != "timeout" {
		t.Errorf("deadline: %q", got)
	}
	if got := class(errors.New("x")); got != "x" {
		t.Errorf("plain error: %q", got)
	}
	if got := class(&url.Error{Op: "Get", URL: "u1", Err: errors.New("x")}); got != "x" {
		t.Errorf("error of a request: %q", got)
	}
}
