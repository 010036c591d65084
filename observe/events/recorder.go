// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record/util"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Recorder records Events.
type Recorder interface {
	// Eventf records an Event about an object. It does not wait for the API server.
	Eventf(regarding *v1.ObjectReference, eventType, reason, action, note string, args ...any)
}

// Client writes to the API server. Its errors are those of client-go.
type Client interface {
	Create(ctx context.Context, event *eventsv1.Event) error
	// Patch changes an Event by a strategic merge patch.
	Patch(ctx context.Context, event *eventsv1.Event, patch []byte) error
}

const (
	// maxQueued is how many Events wait while the API server is slow; more are dropped.
	maxQueued = 1000
	// maxTries and retryAfter apply to Events that cannot be written because the API server
	// cannot be reached.
	maxTries   = 12
	retryAfter = 10 * time.Second
	// A series ends when no Event was added for finishAfter. Until then, it is written again
	// every refreshAfter.
	finishAfter  = 6 * time.Minute
	refreshAfter = 30 * time.Minute
)

// Writer is a Recorder that writes Events to the API server. Repeated Events become a series.
// It behaves like client-go's tools/events, but without that package's dependencies: all API
// types of Kubernetes, which take time to compile and memory at run time.
type Writer struct {
	client     Client
	controller string
	instance   string
	clock      clock.WithTicker
	retryAfter time.Duration
	queue      chan *eventsv1.Event

	mu     sync.Mutex
	series map[seriesKey]*eventsv1.Event // the first Event, with the count of repetitions
}

var _ Recorder = (*Writer)(nil)

// seriesKey has the fields that all Events of a series share.
type seriesKey struct {
	eventType, action, reason string
	regarding                 v1.ObjectReference
}

// NewWriter makes a Writer for a component. It writes nothing before Run.
func NewWriter(controller string, client Client) *Writer {
	hostname, _ := os.Hostname()
	return &Writer{
		client: client, controller: controller, instance: controller + "-" + hostname,
		clock: clock.RealClock{}, retryAfter: retryAfter,
		queue: make(chan *eventsv1.Event, maxQueued), series: map[seriesKey]*eventsv1.Event{},
	}
}

// Eventf implements Recorder. A nil Writer records nothing.
func (w *Writer) Eventf(regarding *v1.ObjectReference, eventType, reason, action, note string, args ...any) {
	if w == nil {
		return
	}
	now := w.clock.Now()
	namespace := regarding.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	event := &eventsv1.Event{
		ObjectMeta:          metav1.ObjectMeta{Name: util.GenerateEventName(regarding.Name, now.UnixNano()), Namespace: namespace},
		EventTime:           metav1.MicroTime{Time: now},
		ReportingController: w.controller,
		ReportingInstance:   w.instance,
		Action:              action,
		Reason:              reason,
		Regarding:           *regarding,
		Note:                fmt.Sprintf(note, args...),
		Type:                eventType,
	}
	select {
	case w.queue <- event:
	default: // never block the caller for an Event
	}
}

// Run writes until ctx ends.
func (w *Writer) Run(ctx context.Context) {
	var writing sync.WaitGroup
	defer writing.Wait()
	refresh, finish := w.clock.NewTicker(refreshAfter), w.clock.NewTicker(finishAfter)
	defer refresh.Stop()
	defer finish.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-w.queue:
			if event := w.count(event); event != nil {
				writing.Go(func() { w.persist(ctx, event) })
			}
		case <-refresh.C():
			w.eachSeries(func(_ seriesKey, e *eventsv1.Event) {
				if e.Series != nil {
					w.write(ctx, e.DeepCopy())
				}
			})
		case <-finish.C():
			w.finish(ctx)
		}
	}
}

// count returns what to write for an Event: the first of a series unchanged, the second as the
// beginning of the series, and nil for later ones, which are only counted.
func (w *Writer) count(event *eventsv1.Event) *eventsv1.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := seriesKey{event.Type, event.Action, event.Reason, event.Regarding}
	first := w.series[key]
	switch {
	case first == nil:
		w.series[key] = event
		return event.DeepCopy()
	case first.Series == nil:
		first.Series = &eventsv1.EventSeries{Count: 2, LastObservedTime: metav1.MicroTime{Time: w.clock.Now()}}
		return first.DeepCopy()
	default:
		first.Series.Count++
		first.Series.LastObservedTime = metav1.MicroTime{Time: w.clock.Now()}
		return nil
	}
}

// eachSeries calls f for each series with the lock held, so that no Event is lost between
// reading a count and deleting its series.
func (w *Writer) eachSeries(f func(seriesKey, *eventsv1.Event)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for key, event := range w.series {
		f(key, event)
	}
}

// finish writes the final counts of series without new Events, and forgets these series.
func (w *Writer) finish(ctx context.Context) {
	before := w.clock.Now().Add(-finishAfter)
	w.eachSeries(func(key seriesKey, event *eventsv1.Event) {
		switch {
		case event.Series == nil:
			if event.EventTime.Time.Before(before) {
				delete(w.series, key)
			}
		case event.Series.LastObservedTime.Time.Before(before):
			if retry := w.write(ctx, event.DeepCopy()); !retry {
				delete(w.series, key)
			}
		}
	})
}

// persist writes an Event, and retries while the API server cannot be reached.
func (w *Writer) persist(ctx context.Context, event *eventsv1.Event) {
	for range maxTries {
		if retry := w.write(ctx, event); !retry {
			return
		}
		// The jitter keeps nodes from retrying at the same time once the API server is back.
		select {
		case <-ctx.Done():
			return
		case <-w.clock.After(wait.Jitter(w.retryAfter, 0.25)):
		}
	}
	klog.FromContext(ctx).Error(errRetries, "Cannot write Event, dropping it", "event", event)
}

var errRetries = fmt.Errorf("%d attempts failed", maxTries)

// write makes one attempt and reports whether to retry.
func (w *Writer) write(ctx context.Context, event *eventsv1.Event) (retry bool) {
	logger := klog.FromContext(ctx)
	var err error
	if event.Series != nil {
		var patch []byte
		if patch, err = json.Marshal(map[string]any{"series": event.Series}); err != nil {
			logger.Error(err, "Cannot encode Event, dropping it", "event", event)
			return false
		}
		err = w.client.Patch(ctx, event, patch)
	}
	// If the patch finds no Event, it has expired in the meantime.
	if event.Series == nil || util.IsKeyNotFoundError(err) {
		event.ResourceVersion = ""
		err = w.client.Create(ctx, event)
	}
	switch e := err.(type) {
	case nil:
		return false
	case *rest.RequestConstructionError:
		logger.Error(err, "Cannot construct request for Event, dropping it", "event", event)
		return false
	case *apierrors.StatusError:
		if apierrors.IsAlreadyExists(e) {
			// The second Event of a series was patched before the first was written, and the
			// first was written before the second was created.
			if event.Series != nil {
				return true
			}
			logger.V(5).Info("API server rejected Event, dropping it", "event", event, "err", err)
		} else {
			logger.Error(err, "API server rejected Event, dropping it", "event", event)
		}
		return false
	default: // the API server cannot be reached, or another server answers
		logger.Error(err, "Cannot write Event, retrying")
		return true
	}
}
