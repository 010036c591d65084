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
	// Eventf records one about an object. It does not wait for the API server.
	Eventf(regarding *v1.ObjectReference, eventType, reason, action, note string, args ...any)
}

// Client writes to the API server. Its errors are those of client-go.
type Client interface {
	Create(ctx context.Context, event *eventsv1.Event) error
	// Patch changes one by a strategic merge patch.
	Patch(ctx context.Context, event *eventsv1.Event, patch []byte) error
}

const (
	// maxQueued Events wait while the API server is slow to take them; more are dropped.
	maxQueued = 1000
	// maxTries and retryAfter are how often, and how soon, an Event is written again that the
	// API server could not be reached for.
	maxTries   = 12
	retryAfter = 10 * time.Second
	// A series ends that nothing was added to for finishAfter. Until then, the API server is
	// told of it again every refreshAfter.
	finishAfter  = 6 * time.Minute
	refreshAfter = 30 * time.Minute
)

// Writer is a Recorder that writes Events to the API server: one that comes again becomes a
// series. It does what client-go's tools/events does, whose package brings the types of all of
// Kubernetes with it: to compile, to link and to keep in memory.
type Writer struct {
	client     Client
	controller string
	instance   string
	clock      clock.WithTicker
	retryAfter time.Duration
	queue      chan *eventsv1.Event

	mu     sync.Mutex
	series map[seriesKey]*eventsv1.Event // as first told, and with how often since
}

var _ Recorder = (*Writer)(nil)

// seriesKey is what Events of one series have in common.
type seriesKey struct {
	eventType, action, reason string
	regarding                 v1.ObjectReference
}

// NewWriter makes a Writer for the component of that name. Nothing is written before Run.
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
	default: // Events are a help, and must not hold anything up
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

// count says what is to be written of an Event: the first of its kind as it is, the second as
// the beginning of a series. Later ones only count.
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

// eachSeries holds new Events up, as the last of a series must not be lost between two counts.
func (w *Writer) eachSeries(f func(seriesKey, *eventsv1.Event)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for key, event := range w.series {
		f(key, event)
	}
}

// finish forgets the series that nothing was added to, with a last word on how many there were.
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

// persist writes an Event, again and again while the API server cannot be reached.
func (w *Writer) persist(ctx context.Context, event *eventsv1.Event) {
	for range maxTries {
		if retry := w.write(ctx, event); !retry {
			return
		}
		// Not all nodes at the same time, once the API server is back.
		select {
		case <-ctx.Done():
			return
		case <-w.clock.After(wait.Jitter(w.retryAfter, 0.25)):
		}
	}
	klog.FromContext(ctx).Error(nil, "Unable to write event (retry limit exceeded!)", "event", event)
}

// write makes one attempt and says whether another one makes sense.
func (w *Writer) write(ctx context.Context, event *eventsv1.Event) (retry bool) {
	logger := klog.FromContext(ctx)
	var err error
	if event.Series != nil {
		var patch []byte
		if patch, err = json.Marshal(map[string]any{"series": event.Series}); err != nil {
			logger.Error(err, "Unable to encode event (will not retry!)", "event", event)
			return false
		}
		err = w.client.Patch(ctx, event, patch)
	}
	// What a patch does not find has expired meanwhile.
	if event.Series == nil || util.IsKeyNotFoundError(err) {
		event.ResourceVersion = ""
		err = w.client.Create(ctx, event)
	}
	switch e := err.(type) {
	case nil:
		return false
	case *rest.RequestConstructionError:
		logger.Error(err, "Unable to construct event (will not retry!)", "event", event)
		return false
	case *apierrors.StatusError:
		if apierrors.IsAlreadyExists(e) {
			// The second of a series came before the first was written: its patch found nothing,
			// and then the first was there.
			if event.Series != nil {
				return true
			}
			logger.V(5).Info("Server rejected event (will not retry!)", "event", event, "err", err)
		} else {
			logger.Error(err, "Server rejected event (will not retry!)", "event", event)
		}
		return false
	default: // the API server cannot be reached, or does not answer as one does
		logger.Error(err, "Unable to write event (may retry after sleeping)")
		return true
	}
}
