// SPDX-License-Identifier: Apache-2.0

// Package health serves the health endpoints: whether the proxy programs changes in time
// (/healthz, /livez), whether the node is ready (/readyz), and whether load balancers
// should send traffic for a Service to this node (health check node ports).
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
	// Timeout is how long a change may be pending before the proxy is unhealthy.
	Timeout time.Duration
	// Families are the address families of this node. Each is reported, with the same
	// status, since one sync programs all of them.
	Families []proxier.Family
	// Healthz and Livez count answers; nil counts none.
	Healthz, Livez Counter
	// Clock is set by tests; nil means the real one.
	Clock clock.PassiveClock
}

// Health is the state behind /healthz and /livez. It is safe for concurrent
// use.
type Health struct {
	opts Options

	mu      sync.Mutex
	started bool
	updated time.Time // end of the last successful sync
	// When the oldest and the newest pending change were queued. A sync applies all
	// changes that were queued before it began.
	oldest, newest time.Time
	ineligible     bool
}

var (
	_ proxier.Observer    = (*Health)(nil)
	_ proxier.NodeHandler = (*Health)(nil)
)

// New makes a Health. It is healthy at first, since starting is no failure.
func New(opts Options) *Health {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Health{opts: opts}
}

// SetTimeout changes the timeout.
func (h *Health) SetTimeout(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.opts.Timeout = d
}

// Start records that the sync loop runs. From then on, the families are reported.
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
		return // the changes are still pending
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

// Healthy reports whether no change is pending for longer than the timeout.
func (h *Health) Healthy() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.healthy(h.opts.Clock.Now())
}

func (h *Health) healthy(now time.Time) bool {
	return h.oldest.IsZero() || now.Sub(h.oldest) < h.opts.Timeout
}

// familyStatus and status have the same fields as the answers of upstream's kube-proxy.
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

// Install adds /healthz and /livez. /healthz also reports whether the node should get
// traffic. /livez does not, so that a node being drained does not restart its proxy.
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
		// A healthy proxy is up to date now, even if its last sync was long ago.
		s.LastUpdated = s.CurrentTime
	}
	answerJSON(w, s, ok, count)
}
