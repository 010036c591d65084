// SPDX-License-Identifier: Apache-2.0

package staleudp

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/proxier"
)

// maxDumps bounds the attempts at an undisturbed dump.
const maxDumps = 5

// Options are those of a Reconciler.
type Options struct {
	// Table is the conntrack to keep right.
	Table conntrack.Table
	// Opening lists TCP connections that were not answered, as conntrack.Kernel does; optional.
	Opening func(context.Context, proxier.Family) iter.Seq2[conntrack.Flow, error]
	// Exclusive says that no other proxy translates ClusterIPs on this node. Entries
	// of ClusterIPs that no Service has are then left over from the time before
	// this process, and go. It must not be set beside a proxy that has Services
	// of its own, or while its connections are to be kept.
	Exclusive bool
	// Observer is called after each reconciliation of a family; optional.
	Observer func(Result)
	// Ended is called with the flows whose entries were deleted, afterwards; optional.
	// What is sent on such a flow now is translated anew, or not at all.
	Ended func([]conntrack.Flow)
}

// Result is the outcome for one family.
type Result struct {
	Family  proxier.Family
	Took    time.Duration
	Deleted int
	Err     error
}

// Reconciler keeps the UDP entries of conntrack right, and at the start those of TCP connections
// that began too early. It is not for concurrent use.
type Reconciler struct {
	table     conntrack.Table
	opening   func(context.Context, proxier.Family) iter.Seq2[conntrack.Flow, error]
	exclusive bool
	observer  func(Result)
	ended     func([]conntrack.Flow)
	index     *index
}

// New makes a Reconciler that knows no frontends.
func New(opts Options) *Reconciler {
	r := &Reconciler{table: opts.Table, opening: opts.Opening, exclusive: opts.Exclusive, observer: opts.Observer, ended: opts.Ended, index: newIndex()}
	if r.observer == nil {
		r.observer = func(Result) {}
	}
	if r.ended == nil {
		r.ended = func([]conntrack.Flow) {}
	}
	return r
}

// Observe takes over an update of the decisions that are served. It costs what the
// changes cost, and does no I/O.
func (r *Reconciler) Observe(u *proxier.Update) {
	first := u.Full && !r.index.whole
	r.index.observe(u)
	if !first {
		return
	}
	for f := range r.index.dirty {
		if r.exclusive {
			// Of what ended before this process there is no other trace.
			r.index.dirty[f] = true
		}
	}
	if r.opening != nil {
		r.index.open(u)
	}
}

// Reconcile deletes the entries of a family that the rules of now would not have made.
// It is to be called when those rules are in the kernel, or old ones would make the same
// entries again. Where nothing changed that matters it does nothing, and before a full
// update neither: what is not known yet must not be taken for gone. What failed is tried
// again by the next call.
func (r *Reconciler) Reconcile(ctx context.Context, family proxier.Family) (deleted int, err error) {
	if deleted, err = r.Try(ctx, family); err == nil {
		r.index.clean(family)
	}
	return deleted, err
}

// Try is Reconcile where it is not known whether the rules of now are in the kernel: the
// next call looks for the same entries again.
func (r *Reconciler) Try(ctx context.Context, family proxier.Family) (deleted int, err error) {
	if !r.index.whole || !r.index.dirty[family] {
		return 0, nil
	}
	start := time.Now()
	if deleted, err = r.reconcile(ctx, family); err != nil {
		err = fmt.Errorf("reconcile %s conntrack: %w", family, err)
	}
	r.observer(Result{Family: family, Took: time.Since(start), Deleted: deleted, Err: err})
	return deleted, err
}

func (r *Reconciler) reconcile(ctx context.Context, family proxier.Family) (deleted int, err error) {
	var stale []conntrack.Flow
	for range maxDumps {
		stale, err = r.find(ctx, family)
		if !errors.Is(err, conntrack.ErrInterrupted) {
			break
		}
	}
	// What an interrupted dump showed is wrong nevertheless.
	if err != nil && !errors.Is(err, conntrack.ErrInterrupted) {
		return 0, fmt.Errorf("list: %w", err)
	}
	ended := len(stale)
	if len(r.index.opening[family]) > 0 && !errors.Is(err, conntrack.ErrInterrupted) {
		// Once, and a few that are not seen end by themselves: no second attempt.
		for f, err := range r.opening(ctx, family) {
			if err == nil && r.index.tooEarly(&f) {
				stale = append(stale, f)
			}
		}
	}
	if len(stale) > 0 {
		if logger := klog.FromContext(ctx).V(4); logger.Enabled() {
			for _, f := range stale {
				logger.Info("Deleting stale conntrack entry", "flow", f.String())
			}
		}
		var derr error
		if deleted, derr = r.table.Delete(ctx, stale); derr != nil {
			err = errors.Join(err, fmt.Errorf("delete: %w", derr))
		}
		// Also of those that could not be deleted: they lead nowhere all the same.
		if ended > 0 {
			r.ended(stale[:ended])
		}
	}
	return deleted, err
}

// find lists the entries that have to go.
func (r *Reconciler) find(ctx context.Context, family proxier.Family) (stale []conntrack.Flow, err error) {
	for f, err := range r.table.Flows(ctx, family) {
		if err != nil {
			return stale, err
		}
		if r.index.stale(&f, r.exclusive) {
			stale = append(stale, f)
		}
	}
	return stale, nil
}
