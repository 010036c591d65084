// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"context"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// RunnerOptions are the intervals of a Runner.
type RunnerOptions struct {
	// MinInterval is the minimum time from the end of one run to the start of
	// the next, unless the first was a periodic one. A request after a quiet
	// period is served at once.
	MinInterval time.Duration
	// MaxInterval is the time after which a run starts without a request.
	MaxInterval time.Duration
	// RetryInterval is the time from a failed run to the next attempt; it doubles
	// with every further failure, up to MaxInterval.
	RetryInterval time.Duration
	// Clock is for tests; nil is the real one.
	Clock clock.Clock
}

// Runner runs one function, never twice at a time: on request, again after a
// failure, and periodically. Requests that come while it runs or waits collapse
// into one.
type Runner struct {
	fn      func(context.Context, RunReason) error
	clock   clock.Clock
	request chan struct{}
	failed  chan error    // of a run in Now
	reset   chan struct{} // the intervals have changed

	mu   sync.Mutex // held during a run
	opts RunnerOptions
	// now runs the function on behalf of Run, in another goroutine; nil while Run is not
	// running.
	now     func() error
	ended   time.Time // of the last run, but for periodic ones
	failing bool
}

// RunReason says why a run was started.
type RunReason uint8

// The reasons of runs.
const (
	Requested RunReason = iota
	Retried
	Periodic
)

func (r RunReason) String() string {
	switch r {
	case Requested:
		return "requested"
	case Retried:
		return "retried"
	}
	return "periodic"
}

// NewRunner makes a runner of fn. It starts nothing.
func NewRunner(fn func(context.Context, RunReason) error, opts RunnerOptions) *Runner {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Runner{fn: fn, clock: opts.Clock, opts: opts, request: make(chan struct{}, 1), failed: make(chan error, 1), reset: make(chan struct{}, 1)}
}

// SetIntervals replaces the intervals by those of opts, after the current run if there is
// one. The time to the next periodic run starts again.
func (r *Runner) SetIntervals(opts RunnerOptions) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.opts = opts
	select {
	case r.reset <- struct{}{}:
	default:
	}
}

func (r *Runner) intervals() RunnerOptions {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.opts
}

// Request requests a run and returns at once.
func (r *Runner) Request() {
	select {
	case r.request <- struct{}{}:
	default:
	}
}

// Now runs the function in the caller's goroutine if one may start at this
// moment, and requests a run otherwise. After a quiet period, waking another
// goroutine takes as long as a small run.
func (r *Runner) Now() {
	if !r.mu.TryLock() {
		r.Request()
		return
	}
	defer r.mu.Unlock()
	if r.now == nil || r.failing || r.wait() > 0 {
		r.Request()
		return
	}
	if err := r.now(); err != nil {
		select {
		case r.failed <- err:
		default: // Run knows of a failure already
		}
	}
}

// wait is how long the next run has to wait for the end of the last one.
func (r *Runner) wait() time.Duration {
	if r.ended.IsZero() {
		return 0
	}
	return r.opts.MinInterval - r.clock.Since(r.ended)
}

func (r *Runner) run(ctx context.Context, reason RunReason) error {
	err := r.fn(ctx, reason)
	r.failing = err != nil
	// A change does not wait because nothing had changed before.
	if reason != Periodic || r.failing {
		r.ended = r.clock.Now()
	}
	return err
}

func (r *Runner) runLocked(ctx context.Context, reason RunReason) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.run(ctx, reason)
}

// Run serves requests until ctx is done.
func (r *Runner) Run(ctx context.Context) {
	logger := klog.FromContext(ctx)
	r.mu.Lock()
	r.now = func() error {
		if ctx.Err() != nil {
			r.Request()
			return nil
		}
		return r.run(ctx, Requested)
	}
	opts := r.opts
	r.mu.Unlock()
	retry := opts.RetryInterval
	next, why := opts.MaxInterval, Periodic
	for {
		timer := r.clock.NewTimer(next)
		reason := why
		var err error
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-r.reset:
			timer.Stop()
			opts = r.intervals()
			retry = opts.RetryInterval
			if next = opts.MaxInterval; why == Retried {
				next = retry
			}
			continue
		case err = <-r.failed:
			timer.Stop()
		case <-r.request:
			timer.Stop()
			reason = Requested
		case <-timer.C():
		}
		if err == nil {
			r.mu.Lock()
			wait := r.wait()
			r.mu.Unlock()
			if wait > 0 {
				timer := r.clock.NewTimer(wait)
				select {
				case <-ctx.Done():
					timer.Stop()
					return
				case <-timer.C():
				}
				// This run serves requests that came meanwhile.
				select {
				case <-r.request:
				default:
				}
			}
			err = r.runLocked(ctx, reason)
		}
		if err == nil {
			next, why, retry = opts.MaxInterval, Periodic, opts.RetryInterval
			continue
		}
		if ctx.Err() != nil {
			return
		}
		logger.Error(err, "Sync failed; retrying", "in", retry)
		next, why = retry, Retried
		retry = min(2*retry, opts.MaxInterval)
	}
}
