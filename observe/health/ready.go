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
	// probeInterval is how long an answer stands: however often anybody asks, the kernel
	// is not asked more often.
	probeInterval = 5 * time.Second
	// probeLimit is for a machine that is very busy.
	probeLimit = 2 * time.Second
)

// Check is a condition of being ready.
type Check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail,omitempty"`
}

// ReadinessOptions are those of a Readiness.
type ReadinessOptions struct {
	// Healthy says whether the proxy keeps up.
	Healthy func() bool
	// Probe asks the kernel.
	Probe func(context.Context) []Check
	// Count counts answers; nil for not at all.
	Count Counter
	// Clock is for tests; nil is the real one.
	Clock clock.PassiveClock
}

// Readiness is the state behind /readyz: whether this node's kernel serves what the cluster
// has. Unlike health, it begins with no. It is safe for concurrent use.
type Readiness struct {
	opts ReadinessOptions

	syncMu sync.Mutex
	synced bool // once

	mu     sync.Mutex // held while the kernel is asked
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

// checks are all conditions. Nothing is probed before it is programmed.
func (r *Readiness) checks(ctx context.Context) []Check {
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

// Install adds /readyz, which upstream has not.
func (r *Readiness) Install(mux *http.ServeMux) {
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, request *http.Request) {
		// Who asks may be gone before the answer, which is for the next one, too.
		body := struct {
			Ready  bool    `json:"ready"`
			Checks []Check `json:"checks"`
		}{true, r.checks(context.WithoutCancel(request.Context()))}
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
		return // not with these fields
	}
	// The client is gone if this fails, and nobody is left to be told.
	_, _ = w.Write(text)
}
