// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"slices"
	"time"

	"k8s.io/utils/clock"
)

// ripeAfter is the time before a released number is used again. Programs that may still use it run for
// microseconds.
const ripeAfter = time.Second

// grace returns when every program that runs at the call has ended.
type grace func()

// resting holds released numbers that programs may still be using.
type resting[T any] struct {
	items []T
	fresh bool // items were added since the last call of take
	last  time.Time
	clock clock.PassiveClock
	grace grace
}

func (r *resting[T]) add(item T) {
	r.items = append(r.items, item)
	r.fresh = true
}

// take returns the numbers that may be used again; with now, all of them, after a grace period.
func (r *resting[T]) take(now bool) []T {
	if len(r.items) == 0 {
		return nil
	}
	if r.fresh { // releases are frequent, so only take reads the clock
		r.fresh, r.last = false, r.clock.Now()
	}
	if r.clock.Since(r.last) < ripeAfter {
		if !now {
			return nil
		}
		r.grace()
	}
	ripe := r.items
	r.items = nil
	return ripe
}

// ids allocates numbers below a limit.
type ids struct {
	next, limit uint32 // never given out: [next, limit)
	free        []uint32
	resting     resting[uint32]
	used        int
}

func newIDs(first, limit uint32, c clock.PassiveClock, g grace) *ids {
	return &ids{next: first, limit: limit, resting: resting[uint32]{clock: c, grace: g}}
}

// adopt marks the numbers that are in use already. It may be called once,
// before any other method.
func (a *ids) adopt(used []uint32) {
	slices.Sort(used)
	for _, id := range used {
		for ; a.next < id; a.next++ {
			a.free = append(a.free, a.next)
		}
		a.next = id + 1
	}
	a.used = len(used)
}

// room counts the numbers that can still be given out.
func (a *ids) room() int {
	return int(a.limit-a.next) + len(a.free) + len(a.resting.items)
}

func (a *ids) alloc() (uint32, bool) {
	if len(a.free) == 0 {
		a.free = append(a.free, a.resting.take(a.next == a.limit)...)
	}
	switch n := len(a.free); {
	case n > 0:
		id := a.free[n-1]
		a.free = a.free[:n-1]
		a.used++
		return id, true
	case a.next < a.limit:
		a.next++
		a.used++
		return a.next - 1, true
	}
	return 0, false
}

func (a *ids) release(id uint32) {
	a.used--
	a.resting.add(id)
}
