// SPDX-License-Identifier: Apache-2.0

// Package delta keeps the difference between what is desired and what is applied,
// for a tier or a part of one: service ports by index, addresses, set members.
//
// A Delta holds, by key, a desired value D, what was applied for it A, and an
// ordered queue of pending keys. It does no I/O and decides no order of writes:
// its owner walks the queue, as often as its steps need (retire, add, publish,
// remove), writes, and reports what came of each key:
//
//	d.Begin()
//	for each change { d.Want(key, value) or d.Drop(key) }
//	if full { d.DropOthers(); d.Retry() }
//	for key, item := range d.Pending() {
//		err := write or remove, by item.Wanted()
//		switch {
//		case err == nil:   d.Done(key, applied)   // or d.Removed(key)
//		case refused(err): d.Refused(key, err)    // asking again would not help
//		default:           d.Failed(key, err)     // pending, tried again by the next walk
//		}
//	}
//
// What each call leaves:
//
//   - Want and Drop make a key pending if that is news. A key that is dropped stays
//     until Removed says that nothing is left of it, and Want may take it up again
//     meanwhile: its item still has what was applied.
//   - Done takes a key out of the queue; Removed also forgets it.
//   - Failed leaves it pending, and what was applied uncertain: the kernel may have
//     the old value, the new one, or a part of either. The owner may widen
//     Item.Applied to all that may be there.
//   - Refused takes it out of the queue until Want brings another value, Retry is
//     called, or the key is touched. What was applied keeps its state: an owner
//     that is unsure of it calls Failed first.
//   - Touch makes a key pending though its desired value is as it was: what it is
//     written as depends on something else that changed.
//   - Forget begins a comparison with the kernel: nothing counts as applied until
//     Adopt (something is there) or Done (just what is desired is) says so. What is
//     adopted and not desired is pending, to be removed.
//
// The queue has keys in the order in which they became pending. A key that fails
// keeps its place. Calls that concern all keys (DropOthers, Retry, TouchAll, Forget)
// append in the order of keys.
package delta

import (
	"cmp"
	"iter"
	"maps"
	"slices"
)

// Delta is for one goroutine at a time. Use New or NewIndexed.
type Delta[K, D comparable, A any] struct {
	compare func(a, b K) int
	items   store[K, D, A]
	queue   []place[K]
	places  uint32 // ever given
	waiting int    // items with a place
	walks   int    // that go on
	refused map[K]struct{}
	errs    map[K]error
	// round is the current one; see Begin.
	round uint32
}

// place is one in the queue. It counts while the item of the key says the same. Each walk
// takes out those that do not count, long before numbers come again.
type place[K comparable] struct {
	key    K
	number uint32
}

// Item is what is known of one key.
type Item[D comparable, A any] struct {
	desired D
	place   uint32 // in the queue; 0 for none
	round   uint32 // in which it was wanted last
	known   bool   // for a dense store
	wanted  bool
	there   bool // Applied is in the kernel, or may be
	unsure  bool // a write failed: it may be there in part, or not at all
	touched bool // to be written, whatever is there
	refused bool

	// Applied is what the last Done or Adopt left. It is the owner's.
	Applied A
}

// Wanted says that something is desired; else what was applied is to be removed.
func (i *Item[D, A]) Wanted() bool { return i.wanted }

// Desired is what is desired; the zero value where nothing is.
func (i *Item[D, A]) Desired() D { return i.desired }

// There says that something was applied: all of Applied, unless Unsure.
func (i *Item[D, A]) There() bool { return i.there }

// Unsure says that a write failed, so that it is not known what is there.
func (i *Item[D, A]) Unsure() bool { return i.unsure }

// dirty reports whether something is to be done.
func (i *Item[D, A]) dirty() bool {
	if i.wanted {
		return i.touched || !i.there || i.unsure
	}
	return i.there
}

// New makes a Delta of which nothing is known. compare orders keys where nothing
// else does; nil where no order matters.
func New[K, D comparable, A any](compare func(a, b K) int) *Delta[K, D, A] {
	return &Delta[K, D, A]{compare: compare, items: anyKey[K, D, A]{}, refused: map[K]struct{}{}, errs: map[K]error{}}
}

// NewIndexed is New for keys that are small numbers and densely used. It takes less memory
// and time: what the largest key ever needed, and no more.
func NewIndexed[D comparable, A any]() *Delta[uint32, D, A] {
	t := New[uint32, D, A](cmp.Compare[uint32])
	t.items = &dense[D, A]{}
	return t
}

// Grow makes room for that many more keys to become pending at once.
func (t *Delta[K, D, A]) Grow(n int) { t.queue = slices.Grow(t.queue, n) }

func (t *Delta[K, D, A]) item(k K) *Item[D, A] {
	if i := t.items.get(k); i != nil {
		return i
	}
	return t.items.add(k)
}

// Get returns the item of a key; nil if nothing is known of it.
func (t *Delta[K, D, A]) Get(k K) *Item[D, A] { return t.items.get(k) }

// Len counts the keys that are wanted or applied.
func (t *Delta[K, D, A]) Len() int { return t.items.len() }

// All yields every item: in the order of keys with NewIndexed, else in no order.
func (t *Delta[K, D, A]) All() iter.Seq2[K, *Item[D, A]] { return t.items.all() }

// Begin begins to record an update; see DropOthers.
func (t *Delta[K, D, A]) Begin() { t.round++ }

// Want records what is desired, and returns the item.
func (t *Delta[K, D, A]) Want(k K, d D) *Item[D, A] {
	i := t.item(k)
	i.round = t.round
	if i.wanted && i.desired == d {
		return i
	}
	i.wanted, i.desired, i.touched = true, d, true
	t.accept(k, i)
	t.enqueue(k, i)
	return i
}

// Drop records that nothing is desired.
func (t *Delta[K, D, A]) Drop(k K) {
	if i := t.items.get(k); i != nil && i.wanted {
		t.drop(k, i)
	}
}

func (t *Delta[K, D, A]) drop(k K, i *Item[D, A]) {
	i.wanted, i.desired, i.touched = false, *new(D), false
	t.accept(k, i)
	if !i.there {
		t.forget(k, i)
		return
	}
	t.enqueue(k, i)
}

// DropOthers drops all that was not wanted since Begin.
func (t *Delta[K, D, A]) DropOthers() {
	var others []K
	for k, i := range t.items.all() {
		if i.wanted && i.round != t.round {
			others = append(others, k)
		}
	}
	for _, k := range t.sorted(others) {
		t.drop(k, t.items.get(k))
	}
}

// Touch makes a wanted key pending.
func (t *Delta[K, D, A]) Touch(k K) {
	if i := t.items.get(k); i != nil && i.wanted {
		i.touched = true
		t.accept(k, i)
		t.enqueue(k, i)
	}
}

// TouchAll makes everything that is wanted pending.
func (t *Delta[K, D, A]) TouchAll() {
	for _, k := range t.keys() {
		t.Touch(k)
	}
}

// Retry makes pending what was refused.
func (t *Delta[K, D, A]) Retry() {
	if len(t.refused) == 0 {
		return
	}
	for _, k := range t.sorted(slices.Collect(maps.Keys(t.refused))) {
		i := t.items.get(k)
		t.accept(k, i)
		t.enqueue(k, i)
	}
}

// Pending yields what is to be done, in order. The owner may call anything
// meanwhile; what becomes pending comes with the next walk.
func (t *Delta[K, D, A]) Pending() iter.Seq2[K, *Item[D, A]] {
	return func(yield func(K, *Item[D, A]) bool) {
		if len(t.queue) > t.waiting {
			t.tidy()
		}
		t.walks++
		defer func() { t.walks-- }()
		for _, at := range t.queue {
			if i := t.items.get(at.key); t.counts(at, i) && !yield(at.key, i) {
				return
			}
		}
	}
}

// IsPending reports whether something is to be done about a key.
func (t *Delta[K, D, A]) IsPending(k K) bool {
	i := t.items.get(k)
	return i != nil && i.place != 0 && !i.refused && i.dirty()
}

// counts reports whether a place in the queue is that of something pending.
func (t *Delta[K, D, A]) counts(at place[K], i *Item[D, A]) bool {
	return i != nil && i.place == at.number && !i.refused && i.dirty()
}

// Done says that the desired value is in the kernel, as applied.
func (t *Delta[K, D, A]) Done(k K, applied A) {
	i := t.items.get(k)
	i.Applied, i.there, i.unsure, i.touched = applied, true, false, false
	t.accept(k, i)
	if i.wanted {
		t.leave(i)
	} else {
		t.enqueue(k, i) // to be removed
	}
}

// Removed says that nothing is in the kernel.
func (t *Delta[K, D, A]) Removed(k K) {
	i := t.items.get(k)
	i.Applied, i.there, i.unsure = *new(A), false, false
	t.accept(k, i)
	if !i.wanted {
		t.forget(k, i)
		return
	}
	t.enqueue(k, i)
}

// Failed says that a write or removal failed; it is to be tried again.
func (t *Delta[K, D, A]) Failed(k K, err error) {
	i := t.items.get(k)
	i.there, i.unsure = true, true
	t.errs[k] = err
	t.enqueue(k, i)
}

// Refused says that a write or removal would fail again.
func (t *Delta[K, D, A]) Refused(k K, err error) {
	i := t.items.get(k)
	t.errs[k] = err
	i.refused = true
	t.leave(i)
	t.refused[k] = struct{}{}
}

// Err is why the last write or removal of a key did not succeed; nil if it did.
func (t *Delta[K, D, A]) Err(k K) error { return t.errs[k] }

// CountRefused counts the keys that were refused.
func (t *Delta[K, D, A]) CountRefused() int { return len(t.refused) }

// AllRefused yields the keys that were refused, in order.
func (t *Delta[K, D, A]) AllRefused() iter.Seq2[K, *Item[D, A]] {
	return func(yield func(K, *Item[D, A]) bool) {
		if len(t.refused) == 0 {
			return
		}
		for _, k := range t.sorted(slices.Collect(maps.Keys(t.refused))) {
			if !yield(k, t.items.get(k)) {
				return
			}
		}
	}
}

// Forget has nothing count as applied until Adopt or Done says so.
func (t *Delta[K, D, A]) Forget() {
	for _, k := range t.keys() {
		i := t.items.get(k)
		i.Applied, i.there, i.unsure = *new(A), false, false
		t.accept(k, i)
		if !i.wanted {
			t.forget(k, i)
			continue
		}
		t.enqueue(k, i)
	}
}

// Adopt says that something is in the kernel, whether or not that is desired. What
// is wanted stays pending; Done says that it is just that.
func (t *Delta[K, D, A]) Adopt(k K, applied A) *Item[D, A] {
	i := t.item(k)
	i.Applied, i.there, i.unsure = applied, true, false
	if i.wanted {
		i.touched = true
	}
	t.enqueue(k, i)
	return i
}

func (t *Delta[K, D, A]) keys() []K {
	keys := make([]K, 0, t.items.len())
	for k := range t.items.all() {
		keys = append(keys, k)
	}
	return t.sorted(keys)
}

func (t *Delta[K, D, A]) sorted(keys []K) []K {
	if t.compare != nil {
		slices.SortFunc(keys, t.compare)
	}
	return keys
}

func (t *Delta[K, D, A]) enqueue(k K, i *Item[D, A]) {
	if i.place == 0 {
		t.places = max(t.places+1, 1)
		i.place = t.places
		t.waiting++
		t.queue = append(t.queue, place[K]{k, i.place})
	}
}

// leave takes an item out of the queue. Its place goes with the last one, or is tidied up.
func (t *Delta[K, D, A]) leave(i *Item[D, A]) {
	if i.place == 0 {
		return
	}
	i.place = 0
	if t.waiting--; t.waiting == 0 && t.walks == 0 {
		t.queue = t.queue[:0]
	}
}

// accept ends a failure.
func (t *Delta[K, D, A]) accept(k K, i *Item[D, A]) {
	if len(t.errs) > 0 {
		delete(t.errs, k)
	}
	if i.refused {
		i.refused = false
		delete(t.refused, k)
	}
}

// forget drops all that is known of a key.
func (t *Delta[K, D, A]) forget(k K, i *Item[D, A]) {
	t.accept(k, i)
	t.leave(i)
	t.items.remove(k)
}

// tidy takes outdated places out of the queue. A walk that goes on
// keeps the queue that it began with.
func (t *Delta[K, D, A]) tidy() {
	first := slices.IndexFunc(t.queue, func(at place[K]) bool { return !t.counts(at, t.items.get(at.key)) })
	if first < 0 {
		return
	}
	kept := t.queue[:first]
	if t.walks > 0 {
		kept = slices.Clone(kept)
	}
	for _, at := range t.queue[first:] {
		if i := t.items.get(at.key); t.counts(at, i) {
			kept = append(kept, at)
		} else if i != nil && i.place == at.number {
			i.place = 0
			t.waiting--
		}
	}
	t.queue = kept
}
