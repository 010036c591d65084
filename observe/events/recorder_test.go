// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
)

// apiServer answers each request with the next of its answers, and then with none.
type apiServer struct {
	mu      sync.Mutex
	answers []error
	asked   []string
}

func (a *apiServer) answer(format string, args ...any) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked = append(a.asked, fmt.Sprintf(format, args...))
	if len(a.answers) == 0 {
		return nil
	}
	err := a.answers[0]
	a.answers = a.answers[1:]
	return err
}

func (a *apiServer) Create(_ context.Context, e *eventsv1.Event) error {
	count := int32(1)
	if e.Series != nil {
		count = e.Series.Count
	}
	return a.answer("create %s/%s %s %s %d", e.Namespace, e.Name, e.Reason, e.Note, count)
}

func (a *apiServer) Patch(_ context.Context, e *eventsv1.Event, patch []byte) error {
	return a.answer("patch %s/%s %s", e.Namespace, e.Name, patch)
}

func (a *apiServer) took() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]string(nil), a.asked...)
}

var (
	events   = schema.GroupResource{Group: "events.k8s.io", Resource: "events"}
	absent   = apierrors.NewNotFound(events, "")
	present  = apierrors.NewAlreadyExists(events, "")
	rejected = apierrors.NewForbidden(events, "", nil)
	errAway  = errors.New("connection refused")
)

func newTestWriter(answers ...error) (*Writer, *apiServer, *clocktesting.FakeClock) {
	api, fake := &apiServer{answers: answers}, clocktesting.NewFakeClock(begin)
	w := NewWriter("test", api)
	w.clock, w.instance = fake, "test-node1"
	return w, api, fake
}

// drain makes a Writer write the queued Events.
func (w *Writer) drain(ctx context.Context) {
	for len(w.queue) > 0 {
		if event := w.count(<-w.queue); event != nil {
			w.persist(ctx, event)
		}
	}
}

const first = "create default/node1.1886caf21c963200 One said 1 1" // the name ends with the time

func TestSeries(t *testing.T) {
	ctx := t.Context()
	w, api, clock := newTestWriter()
	node := NodeReference("node1")
	var want []string
	check := func(lines ...string) {
		t.Helper()
		want = append(want, lines...)
		if diff := cmp.Diff(want, api.took()); diff != "" {
			t.Fatalf("requests (-want +got):\n%s", diff)
		}
	}
	w.Eventf(node, v1.EventTypeNormal, "One", "Do", "said %d", 1)
	w.drain(ctx)
	check(first)

	clock.Step(time.Minute)
	w.Eventf(node, v1.EventTypeNormal, "One", "Do", "said %d", 2)
	w.drain(ctx)
	check(`patch default/node1.1886caf21c963200 {"series":{"count":2,"lastObservedTime":"2026-01-02T03:05:05.000000Z"}}`)

	// Later ones are written when the series ends.
	clock.Step(time.Minute)
	w.Eventf(node, v1.EventTypeNormal, "One", "Do", "said %d", 3)
	w.drain(ctx)
	w.finish(ctx)
	check()
	clock.Step(finishAfter + 1)
	w.finish(ctx)
	check(`patch default/node1.1886caf21c963200 {"series":{"count":3,"lastObservedTime":"2026-01-02T03:06:05.000000Z"}}`)
	if len(w.series) != 0 {
		t.Errorf("%d series are left", len(w.series))
	}

	// An Event about an object in a namespace is written there, and is not part of another series.
	w.Eventf(&v1.ObjectReference{Kind: "Service", Namespace: "shop", Name: "web"}, v1.EventTypeWarning, "Two", "Do", "said")
	w.Eventf(&v1.ObjectReference{Kind: "Service", Namespace: "shop", Name: "db"}, v1.EventTypeWarning, "Two", "Do", "said")
	w.drain(ctx)
	if got := api.took()[len(want):]; len(got) != 2 || !strings.HasPrefix(got[0], "create shop/web.") || !strings.HasPrefix(got[1], "create shop/db.") {
		t.Errorf("wrote %q", got)
	}
}

func TestAnswers(t *testing.T) {
	event := func(series bool) *eventsv1.Event {
		e := &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "e"}, Reason: "R", Note: "n"}
		if series {
			e.Series = &eventsv1.EventSeries{Count: 2, LastObservedTime: metav1.MicroTime{Time: begin}}
		}
		return e
	}
	const create, patch = "create ns/e R n 1", `patch ns/e {"series":{"count":2,"lastObservedTime":"2026-01-02T03:04:05.000000Z"}}`
	const again = "create ns/e R n 2"
	for _, test := range []struct {
		name    string
		series  bool
		answers []error
		want    []string
	}{
		{"taken", false, nil, []string{create}},
		{"away for a moment", false, []error{errAway, errAway}, []string{create, create, create}},
		{"rejected", false, []error{rejected}, []string{create}},
		{"there already", false, []error{present}, []string{create}},
		{"server error", false, []error{apierrors.NewGenericServerResponse(http.StatusInternalServerError, "post", events, "", "", 0, true)}, []string{create}},
		{"series", true, nil, []string{patch}},
		{"series of an Event that expired", true, []error{absent}, []string{patch, again}},
		{"series that overtook its first", true, []error{absent, present}, []string{patch, again, patch}},
		{"away for long", true, slices.Repeat([]error{errAway}, 20), slices.Repeat([]string{patch}, maxTries)},
	} {
		t.Run(test.name, func(t *testing.T) {
			w, api, _ := newTestWriter(test.answers...)
			w.retryAfter = 0
			w.clock = clock.RealClock{}
			w.persist(t.Context(), event(test.series))
			if diff := cmp.Diff(test.want, api.took()); diff != "" {
				t.Errorf("requests (-want +got):\n%s", diff)
			}
		})
	}
}

// TestFull: recording does not wait for an API server that takes no Events.
func TestFull(t *testing.T) {
	w, _, _ := newTestWriter()
	for i := range 2 * maxQueued {
		w.Eventf(NodeReference("node1"), v1.EventTypeNormal, "R", "A", "%d", i)
	}
	if len(w.queue) != maxQueued {
		t.Errorf("%d are queued", len(w.queue))
	}
	var none *Writer
	none.Eventf(NodeReference("node1"), v1.EventTypeNormal, "R", "A", "")
}

// TestRun: Events recorded before Run are written, series are refreshed, and Run ends.
func TestRun(t *testing.T) {
	w, api, clock := newTestWriter()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 2 {
		w.Eventf(NodeReference("node1"), v1.EventTypeNormal, "One", "Do", "said 1")
	}
	done := make(chan struct{})
	go func() { w.Run(ctx); close(done) }()
	await := func(n int) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); len(api.took()) < n; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("asked %q", api.took())
			}
		}
	}
	await(2)
	// Both tickers are due: the series is refreshed, or ended with a last word.
	clock.Step(refreshAfter)
	await(3)
	cancel()
	<-done
}
