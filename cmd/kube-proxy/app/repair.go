// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
)

// repaired tells of kernel state that another process removed or made ineffective, once it is
// restored.
func (p *proxy) repaired(ctx context.Context, r proxier.Repair) {
	klog.FromContext(ctx).Info("Restored kernel state that another process removed or made ineffective", "state", r.State, "what", r.What)
	p.metrics.Repaired(r.State)
	p.problems.Report(proxier.Problem{Kind: "Node", Reason: proxier.ReasonRepaired, Message: r.What})
}

const (
	// firstResync is the pause after a full sync that a failed probe requested. It doubles
	// up to lastResync while probes fail: what a full sync does not mend, more of them do
	// not either.
	firstResync = 5 * time.Second
	lastResync  = 5 * time.Minute
)

// resync requests a full sync when a probe of the kernel state fails.
type resync struct {
	mu      sync.Mutex
	request func() // nil before the proxier runs
	next    time.Time
	pause   time.Duration
}

func (r *resync) use(request func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.request = request
}

// probed is called with the result of each probe.
func (r *resync) probed(ctx context.Context, failed bool, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !failed {
		r.pause = 0
		return
	}
	if r.request == nil || now.Before(r.next) {
		return
	}
	r.pause = min(max(2*r.pause, firstResync), lastResync)
	r.next = now.Add(r.pause)
	klog.FromContext(ctx).Info("A probe of this node's Services failed; comparing everything with the kernel", "nextIn", r.pause)
	r.request()
}
