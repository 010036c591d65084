// SPDX-License-Identifier: Apache-2.0

// Package events reports problems with objects in the log, in a metric and as Events. It
// limits the rate, so that a hostile object cannot flood any of them. It also has a small
// client that writes Events to the API server.
package events

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
)

// Counter counts problems by kind of object and reason.
type Counter func(kind, reason string)

// Options of a Reporter.
type Options struct {
	// NodeName is the node whose object gets the Events about the node itself.
	NodeName string
	// Recorder records Events; nil records none.
	Recorder Recorder
	// Counter counts every problem, including repetitions that are not logged; nil
	// counts none.
	Counter Counter
	// Clock is set by tests; nil means the real one.
	Clock clock.PassiveClock
}

const (
	// repeatAfter is how long a problem is not reported again. The log of the last
	// hour still shows it, with at most six lines.
	repeatAfter = 10 * time.Minute
	// objectBurst and objectRefill limit the reports about one object, however often
	// it changes.
	objectBurst  = 5
	objectRefill = time.Minute
	// allBurst and allRefill limit the reports about all objects together. They are
	// enough for many broken objects in a large cluster.
	allBurst  = 100
	allRefill = time.Second
	// maxRemembered bounds the number of remembered objects, and that of problems.
	maxRemembered = 4096
)

// Reporter implements proxier.Reporter with a log, a counter and Events.
type Reporter struct {
	opts   Options
	logger klog.Logger

	mu         sync.Mutex
	reported   map[proxier.Problem]time.Time // when it was last reported
	objects    map[object]*bucket
	all        bucket
	suppressed int // by the rate limits, since the last report
}

var _ proxier.Reporter = (*Reporter)(nil)

type object struct {
	kind string
	name types.NamespacedName
}

// bucket is a token bucket: each report takes a token, and each refill interval adds one.
type bucket struct {
	left     int
	refilled time.Time
}

func (b *bucket) take(now time.Time, burst int, refill time.Duration) bool {
	if n := int(now.Sub(b.refilled) / refill); n > 0 || b.refilled.IsZero() {
		if b.refilled.IsZero() || n >= burst {
			b.left, b.refilled = burst, now
		} else {
			b.left = min(burst, b.left+n)
			b.refilled = b.refilled.Add(time.Duration(n) * refill)
		}
	}
	if b.left == 0 {
		return false
	}
	b.left--
	return true
}

// New makes a Reporter that logs with the context's logger.
func New(ctx context.Context, opts Options) *Reporter {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Reporter{
		opts: opts, logger: klog.FromContext(ctx),
		reported: map[proxier.Problem]time.Time{}, objects: map[object]*bucket{},
	}
}

// Report implements proxier.Reporter.
func (r *Reporter) Report(p proxier.Problem) {
	if r.opts.Counter != nil {
		r.opts.Counter(known(kinds, p.Kind), known(reasons, p.Reason))
	}
	// Both can contain text of the object, of any length.
	p.Field, p.Message = shorten(p.Field, maxField-len(": ")), shorten(p.Message, maxNote-maxField)
	report, suppressed := r.admit(p)
	if !report {
		return
	}
	args := []any{"kind", p.Kind}
	switch {
	case p.Kind == "File":
		args = append(args, "file", p.Object.Name)
	case p.Object != (types.NamespacedName{}):
		args = append(args, "object", klog.KRef(p.Object.Namespace, p.Object.Name))
	}
	if p.Field != "" {
		args = append(args, "field", p.Field)
	}
	args = append(args, "reason", p.Reason)
	if suppressed > 0 {
		args = append(args, "suppressed", suppressed)
	}
	r.logger.Error(errors.New(p.Message), "Problem with an object", args...)
	r.event(p)
}

// admit decides whether to report a problem. It also returns how many problems the rate
// limits suppressed since the last report.
func (r *Reporter) admit(p proxier.Problem) (report bool, suppressed int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.opts.Clock.Now()
	if at, again := r.reported[p]; again && now.Sub(at) < repeatAfter {
		return false, 0
	}
	who := object{p.Kind, p.Object}
	b := r.objects[who]
	if b == nil {
		if len(r.objects) >= maxRemembered {
			forget(r.objects, func(b *bucket) bool { return now.Sub(b.refilled) >= objectBurst*objectRefill })
		}
		b = &bucket{}
		r.objects[who] = b
	}
	if !b.take(now, objectBurst, objectRefill) || !r.all.take(now, allBurst, allRefill) {
		r.suppressed++
		return false, 0
	}
	if len(r.reported) >= maxRemembered {
		forget(r.reported, func(at time.Time) bool { return now.Sub(at) >= repeatAfter })
	}
	r.reported[p] = now
	suppressed, r.suppressed = r.suppressed, 0
	return true, suppressed
}

// forget removes stale entries and, if too many remain, an arbitrary half. The rate limit
// for all objects together holds in any case.
func forget[K comparable, V any](m map[K]V, stale func(V) bool) {
	for k, v := range m {
		if stale(v) {
			delete(m, k)
		}
	}
	for k := range m {
		if len(m) <= maxRemembered/2 {
			return
		}
		delete(m, k)
	}
}

const (
	// maxNote is the API's limit for the note of an Event.
	maxNote = 1024
	// maxField is the part of it for a field path with its separator.
	maxField = 128
)

// shorten truncates text between characters.
func shorten(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	const end = "…"
	return strings.ToValidUTF8(text[:limit-len(end)], "") + end
}

func (r *Reporter) event(p proxier.Problem) {
	if r.opts.Recorder == nil {
		return
	}
	regarding := reference(p, r.opts.NodeName)
	if regarding == nil {
		return
	}
	note := p.Message
	if p.Field != "" {
		note = p.Field + ": " + note
	}
	r.opts.Recorder.Eventf(regarding, v1.EventTypeWarning, p.Reason, "Sync", "%s", note)
}

// reference returns a reference to the object for an Event, or nil if it is not an API
// object.
func reference(p proxier.Problem, node string) *v1.ObjectReference {
	switch p.Kind {
	case "Service", "Pod", "Namespace":
		return &v1.ObjectReference{APIVersion: "v1", Kind: p.Kind, Namespace: p.Object.Namespace, Name: p.Object.Name, UID: p.UID}
	case "EndpointSlice":
		return &v1.ObjectReference{APIVersion: "discovery.k8s.io/v1", Kind: p.Kind, Namespace: p.Object.Namespace, Name: p.Object.Name, UID: p.UID}
	case "Node":
		return NodeReference(node)
	}
	return nil
}

// NodeReference returns a reference to a Node for an Event. As in kubelet and kube-proxy,
// the UID is the name: kubectl finds the Event by it.
func NodeReference(name string) *v1.ObjectReference {
	return &v1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(name)}
}

var (
	kinds   = []string{"Service", "EndpointSlice", "Node", "Pod", "Namespace", "File"}
	reasons = []string{
		proxier.ReasonInvalidConfig, proxier.ReasonIncompleteNode,
		proxier.ReasonInvalidObject, proxier.ReasonConflict, proxier.ReasonCapacity, proxier.ReasonInvalidFile,
		proxier.ReasonDuplicateName, proxier.ReasonUnsupported, proxier.ReasonUnguarded, proxier.ReasonFlowsNotClosed, proxier.ReasonFiltersBeforeDNAT, proxier.ReasonNoHealthCheck,
		proxier.ReasonRepaired, proxier.ReasonBypassed,
	}
)

// known maps other words to Other, which bounds the number of time series.
func known(list []string, word string) string {
	if slices.Contains(list, word) {
		return word
	}
	return "Other"
}
