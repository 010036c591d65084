// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
)

const (
	// probeInterval is how long a result is reused, which limits the rate of probes.
	probeInterval = 5 * time.Second
	// probeLimit is the timeout of a probe, long enough for a very busy machine.
	probeLimit = 2 * time.Second
)

// Check is a condition of readiness.
type Check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail,omitempty"`
}

// ReadinessOptions are those of a Readiness.
type ReadinessOptions struct {
	// Healthy reports whether the proxy programs changes in time.
	Healthy func() bool
	// Probe checks the state of the kernel.
	Probe func(context.Context) []Check
	// Count counts answers; nil counts none.
	Count Counter
	// Clock is set by tests; nil means the real one.
	Clock clock.PassiveClock
}

// Readiness is the state behind /readyz: whether this node's kernel serves the Services of the
// cluster. Unlike Health, it is negative at first. It is safe for concurrent use.
type Readiness struct {
	opts ReadinessOptions

	syncMu sync.Mutex
	synced bool // at least one sync succeeded

	mu     sync.Mutex // held while the probe runs
	asked  time.Time
	probes []Check
}

var _ proxier.Observer = (*Readiness)(nil)

// NewReadiness makes a Readiness.
func NewReadiness(opts ReadinessOptions) *Readiness {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Readiness{opts: opts}
}

// Queued implements proxier.Observer.
func (*Readiness) Queued(time.Time) {}

// Synced implements proxier.Observer.
func (r *Readiness) Synced(info proxier.SyncInfo) {
	r.syncMu.Lock()
	defer r.syncMu.Unlock()
	r.synced = r.synced || info.Err == nil
}

// Checks returns all conditions. The probe runs only after the first successful sync.
func (r *Readiness) Checks(ctx context.Context) []Check {
	r.syncMu.Lock()
	synced := r.synced
	r.syncMu.Unlock()
	list := []Check{{Name: "programmed", OK: synced}, {Name: "keeps-up", OK: r.opts.Healthy()}}
	if !synced {
		return list
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := r.opts.Clock.Now(); r.asked.IsZero() || now.Sub(r.asked) >= probeInterval {
		ctx, cancel := context.WithTimeout(ctx, probeLimit)
		defer cancel()
		r.asked, r.probes = now, r.opts.Probe(ctx)
	}
	return append(list, r.probes...)
}

// Install adds /readyz, which upstream does not have.
func (r *Readiness) Install(mux *http.ServeMux) {
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, request *http.Request) {
		// The probe is not cancelled with the request: its result is reused for others.
		body := struct {
			Ready  bool    `json:"ready"`
			Checks []Check `json:"checks"`
		}{true, r.Checks(context.WithoutCancel(request.Context()))}
		for _, c := range body.Checks {
			body.Ready = body.Ready && c.OK
		}
		answerJSON(w, body, body.Ready, r.opts.Count)
	})
}

// answerJSON answers 200 or 503.
func answerJSON(w http.ResponseWriter, body any, ok bool, count Counter) {
	code := http.StatusOK
	if !ok {
		code = http.StatusServiceUnavailable
	}
	if count != nil {
		count(code)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	text, err := json.Marshal(body)
	if err != nil {
		return // impossible with these fields
	}
	// An error means that the client closed the connection.
	_, _ = w.Write(text)
}
