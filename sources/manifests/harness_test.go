// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/proxier"
)

// deadline bounds every wait; a test that passes never gets near it.
const deadline = 20 * time.Second

// recorder is a proxier.Handler and a proxier.Reporter that writes down what
// it is told.
type recorder struct {
	mu      sync.Mutex
	lines   []string
	taken   int // lines already returned by news
	changed chan struct{}
}

func newRecorder() *recorder { return &recorder{changed: make(chan struct{})} }

func (r *recorder) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, fmt.Sprintf(format, args...))
	close(r.changed)
	r.changed = make(chan struct{})
}

// news returns what was recorded since the last call.
func (r *recorder) news() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	lines := slices.Clone(r.lines[r.taken:])
	r.taken = len(r.lines)
	return lines
}

// waitFor returns when the line is recorded, counting from the last news.
func (r *recorder) waitFor(t testing.TB, line string) {
	t.Helper()
	timeout := time.After(deadline)
	for {
		r.mu.Lock()
		lines, changed := r.lines[r.taken:], r.changed
		r.mu.Unlock()
		if slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, line) }) {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("timed out waiting for %q; recorded:\n%s", line, strings.Join(lines, "\n"))
		}
	}
}

func addresses(s *discoveryv1.EndpointSlice) string {
	var all []string
	for _, e := range s.Endpoints {
		all = append(all, e.Addresses...)
	}
	return strings.Join(all, ",")
}

func (r *recorder) Report(p proxier.Problem) {
	r.note("problem %s %s %s [%s] %s", p.Reason, p.Kind, p.Object, p.Field, p.Message)
}

func (r *recorder) OnServiceAdd(s *v1.Service) {
	r.note("add service %s/%s %s", s.Namespace, s.Name, s.Spec.ClusterIP)
}
func (r *recorder) OnServiceUpdate(old, s *v1.Service) {
	r.note("update service %s/%s %s", old.Namespace, old.Name, s.Spec.ClusterIP)
}
func (r *recorder) OnServiceDelete(s *v1.Service) {
	r.note("delete service %s/%s", s.Namespace, s.Name)
}
func (r *recorder) OnServiceSynced() { r.note("services synced") }

func (r *recorder) OnEndpointSliceAdd(s *discoveryv1.EndpointSlice) {
	r.note("add slice %s/%s of %s %s", s.Namespace, s.Name, s.Labels[discoveryv1.LabelServiceName], addresses(s))
}
func (r *recorder) OnEndpointSliceUpdate(old, s *discoveryv1.EndpointSlice) {
	r.note("update slice %s/%s of %s %s", old.Namespace, old.Name, old.Labels[discoveryv1.LabelServiceName], addresses(s))
}
func (r *recorder) OnEndpointSliceDelete(s *discoveryv1.EndpointSlice) {
	r.note("delete slice %s/%s of %s", s.Namespace, s.Name, s.Labels[discoveryv1.LabelServiceName])
}
func (r *recorder) OnEndpointSlicesSynced() { r.note("slices synced") }

func (r *recorder) OnNodeAdd(n *v1.Node) { r.note("add node %s %s", n.Name, n.Spec.PodCIDR) }
func (r *recorder) OnNodeUpdate(old, n *v1.Node) {
	r.note("update node %s %s", old.Name, n.Spec.PodCIDR)
}
func (r *recorder) OnNodeDelete(n *v1.Node) { r.note("delete node %s", n.Name) }
func (r *recorder) OnNodeSynced()           { r.note("nodes synced") }

func (r *recorder) onServiceCIDR(name string, cidrs []string) {
	r.note("service CIDR %s %v", name, cidrs)
}

// harness drives passes by hand, on a clock that moves by hand.
type harness struct {
	t      *testing.T
	dir    string
	clock  *clocktesting.FakeClock
	source *Source
	*recorder
}

func newHarness(t *testing.T) *harness {
	// A clock about as old as the files makes every pass read them all: the
	// tests write faster than file systems stamp.
	clock := clocktesting.NewFakeClock(time.Now())
	rec := newRecorder()
	dir := t.TempDir()
	return &harness{t, dir, clock, New(dir, rec, rec, Options{NodeName: "node1", OnServiceCIDR: rec.onServiceCIDR, Clock: clock}), rec}
}

func (h *harness) write(name, text string) {
	h.t.Helper()
	if err := os.WriteFile(filepath.Join(h.dir, name), []byte(text), 0o600); err != nil {
		h.t.Fatal(err)
	}
}

func (h *harness) remove(name string) {
	h.t.Helper()
	if err := os.Remove(filepath.Join(h.dir, name)); err != nil {
		h.t.Fatal(err)
	}
}

// pass makes one pass and compares what came of it. The first one counts as
// the first full list.
func (h *harness) pass(want ...string) {
	h.t.Helper()
	if err := h.source.pass(h.t.Context()); err != nil {
		h.t.Fatal(err)
	}
	h.source.synced = true
	h.compare(want)
}

// settled lets the files settle and makes another pass.
func (h *harness) settled(want ...string) {
	h.t.Helper()
	h.clock.Step(h.source.opts.Settle)
	h.pass(want...)
}

func (h *harness) compare(want []string) {
	h.t.Helper()
	got := h.news()
	for i := range got {
		got[i] = strings.ReplaceAll(got[i], h.dir, "DIR")
	}
	if diff := cmp.Diff(want, got, cmp.Transformer("nil", func(s []string) []string { return append([]string{}, s...) })); diff != "" {
		h.t.Errorf("(-want +got):\n%s", diff)
	}
}

// service is a manifest of a Service whose last octet is n.
func service(name string, n int) string {
	return fmt.Sprintf("---\napiVersion: v1\nkind: Service\nmetadata:\n  name: %s\nspec:\n  clusterIP: 10.96.0.%d\n  ports:\n  - port: 80\n", name, n)
}

// slice is a manifest of an EndpointSlice.
func slice(name, service string, ips ...string) string {
	text := fmt.Sprintf("---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: %s\n  labels:\n    kubernetes.io/service-name: %s\n"+
		"addressType: IPv4\nports:\n- port: 8080\nendpoints:\n", name, service)
	for _, ip := range ips {
		text += "- addresses: [" + ip + "]\n"
	}
	return text
}

var errNoWatcher = errors.New("no watches for this test")

// run starts a source with a real watcher, or none, and ends it with the test.
func run(t *testing.T, s *Source, watch bool) {
	t.Helper()
	if !watch {
		s.newWatcher = func() (*fsnotify.Watcher, error) { return nil, errNoWatcher }
	}
	ctx, cancel := context.WithCancel(context.Background())
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
}
