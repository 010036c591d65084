// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

// prepare gives the fallback what the fast tier is about to let go of. It reports whether
// that was everything the fallback is to have.
func (t *Tier) prepare(ctx context.Context, order []uint32) (refilled bool, err error) {
	switch {
	case t.state == active:
		return false, t.sync(ctx, onFallback, nil, t.gains(order))
	case t.served && t.slow > 0:
		return true, t.fill(ctx)
	}
	return false, nil
}

// hold leaves with the fast tier what the fallback could not be given. When it ends, what
// should have moved is pending, and moves with the next sync.
func (t *Tier) hold(order []uint32, held bool) {
	for _, index := range order {
		if p := t.ports[index]; p.held || p.decision != nil {
			p.held = held
			t.assign(index, p)
		}
	}
}

// move has the fallback serve what the fast tier does not, before that lets go of it. If
// that fails, it is pending.
func (t *Tier) move(ctx context.Context, moved []uint32) (refilled bool, err error) {
	if refilled = t.state != active; refilled {
		err = t.fill(ctx)
	} else {
		err = t.sync(ctx, onFallback, nil, t.additions(moved))
	}
	if err != nil {
		return refilled, err
	}
	// Remove outdated state from the fast tier: it takes precedence over the fallback.
	if changes := t.changes(onFast, moved); len(changes) > 0 {
		err = t.sync(ctx, onFast, t.fastRules(), changes)
	}
	return refilled, err
}

// fill gives the fallback all it is to have: it removes what else there is of its kind.
// What the fast tier is still to get it has until then, as others may have served it.
func (t *Tier) fill(ctx context.Context) error {
	t.cleaning.end()
	rules := t.rules
	u := proxier.Update{Full: true, NodeRules: &rules}
	for _, index := range slices.Sorted(maps.Keys(t.ports)) {
		d := t.want(onFallback, index)
		if decision := t.ports[index].decision; d != decision && t.has(onFast, index) != t.want(onFast, index) {
			d = decision
		}
		if d == nil {
			t.forget(onFallback, index)
			continue
		}
		u.Changes = append(u.Changes, proxier.PortChange{Old: t.has(onFallback, index), New: d})
	}
	t.state = unknown
	if err := t.give(ctx, onFallback, u); err != nil {
		return err
	}
	t.state = active
	return nil
}

// syncFallback takes out of the fallback what the fast tier has had for a while. A fallback
// that serves nothing leaves nothing in the kernel, also not what others of its kind left
// there, once the fast tier serves.
func (t *Tier) syncFallback(ctx context.Context, u *proxier.Update, refilled bool) error {
	if t.cleaning.due.Swap(false) {
		t.state = unknown
	}
	if t.state == active {
		if err := t.sync(ctx, onFallback, u.NodeRules, t.losses()); err != nil {
			return err
		}
	}
	switch {
	case len(t.leaving) > 0 || refilled:
		return nil
	case t.slow > 0 && (u.Full || t.state != active):
		return t.fill(ctx)
	case t.slow > 0 || t.state == idle || t.state == unknown && !u.Full:
		return nil
	}
	t.state = idle
	for index := range t.ports {
		t.forget(onFallback, index)
	}
	t.cleaning.begin(ctx, t.grace, t.fallback)
	return nil
}

// OtherEnded is called when another proxy that ran beside this one has ended. The next full sync removes
// what it left of the fallback's kind.
func (t *Tier) OtherEnded() { t.cleaning.due.Store(true) }

// losses are what goes from the fallback: at once what is not desired, and what
// the fast tier has got after a while.
func (t *Tier) losses() (list []proxier.PortChange) {
	now := time.Now()
	for index := range t.leaving {
		if !t.differs(onFallback, index) {
			delete(t.leaving, index)
		}
	}
	for index := range t.parts[onFallback].Pending() {
		if !t.differs(onFallback, index) {
			continue
		}
		old, next := t.has(onFallback, index), t.want(onFallback, index)
		if t.ports[index].decision == nil {
			delete(t.leaving, index)
			list = append(list, proxier.PortChange{Old: old})
			continue
		}
		since, known := t.leaving[index]
		if !known || t.failed[onFast] { // it may not be there
			since = now
			t.leaving[index] = now
		}
		if now.Sub(since) >= t.grace && !t.failed[onFast] {
			list = append(list, proxier.PortChange{Old: old, New: next})
			delete(t.leaving, index)
		}
	}
	return list
}
