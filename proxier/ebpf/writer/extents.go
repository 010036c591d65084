// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"math/bits"

	"k8s.io/utils/clock"
)

// extent is a run of slots: 1<<order of them from base on.
type extent struct {
	base  uint32
	order uint8
}

// orderOf is the smallest order whose extents hold n slots; n is at least 1.
func orderOf(n int) uint8 { return uint8(bits.Len(uint(n - 1))) }

// extents divides the slots among backend sets. It is a buddy allocator: sets have all sizes, and
// freed neighbours must be merged again.
type extents struct {
	size   uint32
	levels []level
	rest   resting[extent]
	used   int // slots
}

// level has the free extents of one order. The stack may contain extents that were merged since; the
// bits in free decide.
type level struct {
	free  []uint64
	stack []uint32
}

func (l *level) has(i uint32) bool { return l.free[i/64]&(1<<(i%64)) != 0 }

func (l *level) put(i uint32) {
	l.free[i/64] |= 1 << (i % 64)
	l.stack = append(l.stack, i)
}

func (l *level) drop(i uint32) { l.free[i/64] &^= 1 << (i % 64) }

func (l *level) pop() (uint32, bool) {
	for n := len(l.stack); n > 0; n = len(l.stack) {
		i := l.stack[n-1]
		l.stack = l.stack[:n-1]
		if l.has(i) {
			l.drop(i)
			return i, true
		}
	}
	return 0, false
}

func newExtents(size uint32, c clock.PassiveClock, g grace) *extents {
	e := &extents{rest: resting[extent]{clock: c, grace: g}}
	e.grow(size)
	return e
}

// grow adds slots behind those there are.
func (e *extents) grow(size uint32) {
	for o := 0; size>>o > 0; o++ {
		if o == len(e.levels) {
			e.levels = append(e.levels, level{})
		}
		l := &e.levels[o]
		l.free = append(l.free, make([]uint64, int(size>>o+63)/64-len(l.free))...)
	}
	// What is no power of two, or begins at none, is several blocks.
	for base := e.size; base < size; {
		o := bits.Len32(size-base) - 1
		if base != 0 {
			o = min(o, bits.TrailingZeros32(base))
		}
		e.merge(extent{base: base, order: uint8(o)})
		base += 1 << o
	}
	e.size = max(e.size, size)
}

// alloc returns an extent for n slots.
func (e *extents) alloc(n int) (extent, bool) {
	if n < 1 || n > int(e.size) {
		return extent{}, false
	}
	order := orderOf(n)
	got, ok := e.carve(order)
	for _, now := range []bool{false, true} {
		if ok {
			break
		}
		for _, x := range e.rest.take(now) {
			e.merge(x)
		}
		got, ok = e.carve(order)
	}
	if ok {
		e.used += 1 << order
	}
	return got, ok
}

func (e *extents) carve(order uint8) (extent, bool) {
	for o := int(order); o < len(e.levels); o++ {
		i, ok := e.levels[o].pop()
		if !ok {
			continue
		}
		for o > int(order) {
			o--
			i *= 2
			e.levels[o].put(i + 1)
		}
		return extent{base: i << order, order: order}, true
	}
	return extent{}, false
}

// reserve takes one particular extent, while adopting what is in use.
func (e *extents) reserve(x extent) bool {
	if int(x.order) >= len(e.levels) || x.base&(1<<x.order-1) != 0 {
		return false
	}
	for o := int(x.order); o < len(e.levels); o++ {
		i := x.base >> o
		if int(i/64) >= len(e.levels[o].free) || !e.levels[o].has(i) {
			continue
		}
		e.levels[o].drop(i)
		for o > int(x.order) {
			o--
			half := x.base >> o
			e.levels[o].put(half ^ 1)
		}
		e.used += 1 << x.order
		return true
	}
	return false
}

// release gives an extent back, to be used again when no program can be
// reading it any more.
func (e *extents) release(x extent) {
	e.used -= 1 << x.order
	e.rest.add(x)
}

func (e *extents) merge(x extent) {
	i, o := x.base>>x.order, int(x.order)
	for o+1 < len(e.levels) {
		l := &e.levels[o]
		buddy := i ^ 1
		if int(buddy/64) >= len(l.free) || !l.has(buddy) {
			break
		}
		l.drop(buddy)
		i /= 2
		o++
	}
	e.levels[o].put(i)
}
