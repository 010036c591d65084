// SPDX-License-Identifier: Apache-2.0

// Package health answers whether this proxy keeps up with the cluster, and
// whether load balancers should send new traffic to this node.
package health

import (
	"net/http"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
)

// taintToBeDeleted is set by the cluster autoscaler on a node it is about to
// remove.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// Counter counts answers by HTTP status code.
type Counter func(code int)

// Options of a Health.
type Options struct {
	// Timeout is how long a change may wait to be programmed before the proxy
	// counts as unhealthy.
	Timeout time.Duration
	// Families are the address families this node has; each is reported, and
	// as all are programmed together they share one fate.
	Families []proxier.Family
	// Healthz and Livez count answers; nil for not at all.
	Healthz, Livez Counter
	// Clock is for tests; nil is the real one.
	Clock clock.PassiveClock
}

// Health is the state behind /healthz and /livez. It is safe for concurrent
// use.
type Health struct {
	opts Options

	mu      sync.Mutex
	started bool
	updated time.Time // end of the last good sync
	// What waits: since when the first, and since when the newest of it. A
	// sync serves what was queued before it began.
	oldest, newest time.Time
	ineligible     bool
}

var (
	_ proxier.Observer    = (*Health)(nil)
	_ proxier.NodeHandler = (*Health)(nil)
)

// New makes a Health that is healthy: starting up is no failure.
func New(opts Options) *Health {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Health{opts: opts}
}

// SetTimeout takes over another one while it runs.
func (h *Health) SetTimeout(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.opts.Timeout = d
}

// Start notes that the sync loop runs: from now on the families are reported.
func (h *Health) Start() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.started, h.updated = true, h.opts.Clock.Now()
}

// Queued implements proxier.Observer.
func (h *Health) Queued(at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.oldest.IsZero() {
		h.oldest = at
	}
	h.newest = at
}

// Synced implements proxier.Observer.
func (h *Health) Synced(info proxier.SyncInfo) {
	if info.Err != nil {
		return // what waited still waits
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.updated = info.End
	if h.newest.After(info.Start) {
		h.oldest = h.newest
	} else {
		h.oldest, h.newest = time.Time{}, time.Time{}
	}
}

// OnNodeAdd implements proxier.NodeHandler.
func (h *Health) OnNodeAdd(node *v1.Node) { h.OnNodeUpdate(nil, node) }

// OnNodeUpdate implements proxier.NodeHandler.
func (h *Health) OnNodeUpdate(_, node *v1.Node) {
	leaving := node.DeletionTimestamp != nil
	for i := range node.Spec.Taints {
		leaving = leaving || node.Spec.Taints[i].Key == taintToBeDeleted
	}
	h.setIneligible(leaving)
}

// OnNodeDelete implements proxier.NodeHandler.
func (h *Health) OnNodeDelete(*v1.Node) { h.setIneligible(true) }

// OnNodeSynced implements proxier.NodeHandler.
func (h *Health) OnNodeSynced() {}

func (h *Health) setIneligible(ineligible bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ineligible = ineligible
}

// Healthy says whether the proxy keeps up.
func (h *Health) Healthy() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.healthy(h.opts.Clock.Now())
}

func (h *Health) healthy(now time.Time) bool {
	return h.oldest.IsZero() || now.Sub(h.oldest) < h.opts.Timeout
}

// familyStatus and status are what upstream's proxy answers, field by field.
type familyStatus struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

type status struct {
	LastUpdated  time.Time               `json:"lastUpdated"`
	CurrentTime  time.Time               `json:"currentTime"`
	NodeEligible *bool                   `json:"nodeEligible,omitempty"`
	Healthy      bool                    `json:"healthy"`
	Status       map[string]familyStatus `json:"status"`
}

func (h *Health) status() (s status, eligible bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.opts.Clock.Now()
	s = status{LastUpdated: h.updated, CurrentTime: now, Healthy: h.healthy(now), Status: map[string]familyStatus{}}
	if h.started {
		for _, f := range h.opts.Families {
			s.Status[f.String()] = familyStatus{LastUpdated: h.updated, Healthy: s.Healthy}
		}
	}
	return s, !h.ineligible
}

// Install adds /healthz, which also says whether the node should get traffic,
// and /livez, which does not and so never restarts the proxy of a node that is
// being drained.
func (h *Health) Install(mux *http.ServeMux) {
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		s, eligible := h.status()
		s.NodeEligible = &eligible
		answer(w, s, s.Healthy && eligible, h.opts.Healthz)
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) {
		s, _ := h.status()
		answer(w, s, s.Healthy, h.opts.Livez)
	})
}

func answer(w http.ResponseWriter, s status, ok bool, count Counter) {
	if ok {
		// Whoever is well is up to date as of now, though nothing had to be done for long.
		s.LastUpdated = s.CurrentTime
	}
	answerJSON(w, s, ok, count)
}
