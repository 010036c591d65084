// SPDX-License-Identifier: Apache-2.0

package maglev

import (
	"cmp"
	"slices"
)

// class are the backends of one weight, which have their turns one after the other.
type class struct {
	members []uint32
	// next is when the turn is, and step the time between two: 1<<turnBits divided by the weight. The
	// first turn of all is at once, so that each has a slot.
	next, step uint64
}

const turnBits = 32

// turns is a heap of classes by their next turn, and by weight where that is equal.
type turns []class

func newTurns(backends []Backend) turns {
	order := make([]uint32, len(backends))
	for i := range order {
		order[i] = uint32(i)
	}
	slices.SortStableFunc(order, func(a, b uint32) int { return cmp.Compare(backends[b].Weight, backends[a].Weight) })
	var t turns
	for len(order) > 0 {
		weight, n := backends[order[0]].Weight, 1
		for n < len(order) && backends[order[n]].Weight == weight {
			n++
		}
		step := uint64(1<<turnBits) / uint64(weight)
		t = append(t, class{order[:n], 0, step})
		order = order[n:]
	}
	return t // sorted, and so a heap
}

// pass moves on to the next turn; the present one is that of the first class.
func (t turns) pass() {
	t[0].next += t[0].step
	moving, i := t[0], 0
	for {
		child := 2*i + 1
		if child >= len(t) {
			break
		}
		if child+1 < len(t) && t[child+1].before(&t[child]) {
			child++
		}
		if !t[child].before(&moving) {
			break
		}
		t[i] = t[child]
		i = child
	}
	t[i] = moving
}

func (c *class) before(o *class) bool { return c.next < o.next || c.next == o.next && c.step < o.step }
