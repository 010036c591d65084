// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/proxier"
)

// leftovers are what other modes left in the kernel. They are removed once this mode serves
// everything; until then they do.
type leftovers struct {
	once   sync.Once
	synced chan struct{} // closed when this mode serves everything
	mu     sync.Mutex
	again  chan struct{} // closed when another kube-proxy has ended, which may have left more; then it is another one
	list   []leftover
	parts  parts
	// draining is told what takes long to remove, and since when; the zero time at the end.
	draining func(what string, since time.Time)
}

// drainsAfter is how long the removal of something takes that has connections left.
const drainsAfter = 10 * time.Second

// leftoversOf are those of all modes that a mode does not manage itself.
func leftoversOf(m mode, h *host, p *parts, draining func(string, time.Time)) *leftovers {
	l := &leftovers{synced: make(chan struct{}), again: make(chan struct{}), parts: *p, draining: draining}
	if h.isShared() {
		return l // what other modes have here may be the other kube-proxy's
	}
	l.list = append(l.list, nftables{})
	for _, other := range modesOf(h) {
		if other.name() != m.name() && !m.uses(other.name()) {
			l.list = append(l.list, other)
		}
	}
	// This process serves already: it does not give up its source for another one.
	l.parts.waiting = func() {}
	return l
}

// replacer is a leftover that something has to stand in for before the first sync of another mode.
type replacer interface {
	replace(context.Context) error
}

// replace does so. What fails costs those clients alone, so it is logged.
func (l *leftovers) replace(ctx context.Context) {
	for _, each := range l.list {
		if r, ok := each.(replacer); ok {
			if err := r.replace(ctx); err != nil {
				klog.FromContext(ctx).Error(err, "Cannot prepare to replace another mode; some new connections of this host may fail until it is cleaned up", "what", each.what())
			}
		}
	}
}

// Queued implements proxier.Observer.
func (l *leftovers) Queued(time.Time) {}

// Synced implements proxier.Observer.
func (l *leftovers) Synced(info proxier.SyncInfo) {
	if info.Full && info.Err == nil {
		l.once.Do(func() { close(l.synced) })
	}
}

// removalBackoff is how often a removal that failed is tried again.
var removalBackoff = wait.Backoff{Duration: time.Second, Factor: 2, Steps: 7, Cap: time.Minute}

// otherEnded has them removed once more.
func (l *leftovers) otherEnded() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.again)
	l.again = make(chan struct{})
}

func (l *leftovers) nextEnd() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.again
}

// run removes them beside the syncs until ctx is done, first when this mode serves everything. Some take as long as the connections
// they serve, which holds up no other.
func (l *leftovers) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, each := range l.list {
		wg.Go(func() {
			for next := (<-chan struct{})(l.synced); ; {
				select {
				case <-ctx.Done():
					return
				case <-next:
					next = l.nextEnd() // of now: another one can end meanwhile
					l.remove(ctx, each)
				}
			}
		})
	}
}

// remove returns when it is gone, or ctx is done.
func (l *leftovers) remove(ctx context.Context, each leftover) {
	var telling sync.WaitGroup
	defer telling.Wait()
	began, done := time.Now(), make(chan struct{})
	defer close(done)
	telling.Go(func() {
		select {
		case <-done:
		case <-time.After(drainsAfter):
			l.draining(each.what(), began)
			<-done
			l.draining(each.what(), time.Time{})
		}
	})
	_ = removalBackoff.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) { // ends with ctx
		err := each.retire(ctx, &l.parts)
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Cannot clean up after another mode; retrying", "what", each.what())
		}
		return err == nil, nil
	})
}

// cleanup removes what any process left in the kernel, in any mode: this proxy's state and
// upstream's. While a kube-proxy serves the node it touches nothing: Services would be down until
// that one repairs them. Where another kube-proxy is to stay, only programs are removed.
func cleanup(ctx context.Context, h *host) error {
	if running := runningProxy(ctx, h); running != "" {
		return fmt.Errorf("a kube-proxy serves this node, so nothing was cleaned up: %s; stop it first, or remove the eBPF programs alone by 'tandemctl detach'", running)
	}
	if h.isShared() {
		return modeNamed(h, capabilities.ModeEBPF).cleanup(ctx)
	}
	errs := []error{nftables{}.cleanup(ctx)}
	// Rules before virtual servers: sets that a rule uses cannot be removed.
	for _, m := range slices.Backward(modesOf(h)) {
		errs = append(errs, m.cleanup(ctx))
	}
	return errors.Join(errs...)
}
