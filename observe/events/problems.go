// SPDX-License-Identifier: Apache-2.0

// Package problems takes what is wrong with objects to where people look: the
// log, a metric and Events, without letting a hostile object flood any of
// them.
package events

import (
	"context"
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
	// NodeName is the node to whose object problems of the node itself go.
	NodeName string
	// Recorder takes Events; nil for none.
	Recorder Recorder
	// Counter counts every problem, also those that are not told again; nil
	// for nobody.
	Counter Counter
	// Clock is for tests; nil is the real one.
	Clock clock.PassiveClock
}

const (
	// repeatAfter is when the same problem is told again: an hour's log has
	// it, and six lines an hour hurt nobody.
	repeatAfter = 10 * time.Minute
	// objectBurst and objectRefill bound what one object can have told,
	// whatever it changes about itself.
	objectBurst  = 5
	objectRefill = time.Minute
	// allBurst and allRefill bound what all objects together can have told:
	// a bad day of a big cluster, but not a flood.
	allBurst  = 100
	allRefill = time.Second
	// maxRemembered bounds the memory for objects and problems, each.
	maxRemembered = 4096
)

// Reporter implements proxier.Reporter.
type Reporter struct {
	opts   Options
	logger klog.Logger

	mu      sync.Mutex
	told    map[proxier.Problem]time.Time
	objects map[object]*bucket
	all     bucket
	silent  int // problems not told since the last that was
}

var _ proxier.Reporter = (*Reporter)(nil)

type object struct {
	kind string
	name types.NamespacedName
}

// bucket holds what may be told at once; one more comes back with every refill.
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
		told: map[proxier.Problem]time.Time{}, objects: map[object]*bucket{},
	}
}

// Report implements proxier.Reporter.
func (r *Reporter) Report(p proxier.Problem) {
	if r.opts.Counter != nil {
		r.opts.Counter(known(kinds, p.Kind), known(reasons, p.Reason))
	}
	// What an object says of itself may be in there, at any length.
	p.Field, p.Message = shorten(p.Field, maxField-len(": ")), shorten(p.Message, maxNote-maxField)
	tell, silent := r.admit(p)
	if !tell {
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
	args = append(args, "reason", p.Reason, "message", p.Message)
	if silent > 0 {
		args = append(args, "notTold", silent)
	}
	r.logger.Error(nil, "Problem with an object", args...)
	r.event(p)
}

// admit says whether a problem is to be told, and how many were not since.
func (r *Reporter) admit(p proxier.Problem) (tell bool, silent int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.opts.Clock.Now()
	if at, again := r.told[p]; again && now.Sub(at) < repeatAfter {
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
		r.silent++
		return false, 0
	}
	if len(r.told) >= maxRemembered {
		forget(r.told, func(at time.Time) bool { return now.Sub(at) >= repeatAfter })
	}
	r.told[p] = now
	silent, r.silent = r.silent, 0
	return true, silent
}

// forget makes room: what does not matter any more goes, or, where all of it
// does, an arbitrary half. The bound on everything together still holds then.
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
	// maxNote is the limit of the API for the text of an Event.
	maxNote = 1024
	// maxField is what of it a field path may take, with its separator.
	maxField = 128
)

// shorten cuts between characters.
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

// reference names the object for an Event; nil if it is none of the API's.
func reference(p proxier.Problem, node string) *v1.ObjectReference {
	switch p.Kind {
	case "Service":
		return &v1.ObjectReference{APIVersion: "v1", Kind: p.Kind, Namespace: p.Object.Namespace, Name: p.Object.Name, UID: p.UID}
	case "EndpointSlice":
		return &v1.ObjectReference{APIVersion: "discovery.k8s.io/v1", Kind: p.Kind, Namespace: p.Object.Namespace, Name: p.Object.Name, UID: p.UID}
	case "Node":
		return NodeReference(node)
	}
	return nil
}

// NodeReference names a Node for an Event, as kubelet and kube-proxy do: with
// the name for its UID, by which kubectl finds it.
func NodeReference(name string) *v1.ObjectReference {
	return &v1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(name)}
}

var (
	kinds   = []string{"Service", "EndpointSlice", "Node", "File"}
	reasons = []string{
		proxier.ReasonInvalidConfig, proxier.ReasonIncompleteNode,
		proxier.ReasonInvalidObject, proxier.ReasonConflict, proxier.ReasonCapacity, proxier.ReasonInvalidFile,
		proxier.ReasonDuplicateName, proxier.ReasonUnsupported, proxier.ReasonUnguarded, proxier.ReasonFlowsNotClosed, proxier.ReasonNoHealthCheck,
	}
)

// known keeps the number of time series within what this package lists.
func known(list []string, word string) string {
	if slices.Contains(list, word) {
		return word
	}
	return "Other"
}
