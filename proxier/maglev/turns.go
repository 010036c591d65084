// SPDX-License-Identifier: Apache-2.0

package maglev

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// class are the backends of one weight, which have their turns one after the other.
type class struct {
	members []uint32
	step    uint64 // the time between two turns: 1<<turnBits divided by the weight
}

const turnBits = 32

// turns says which class is next. The first turn of all is at once, so that each has a slot.
type turns struct {
	classes []class // by weight, the largest first
	// tree has turns of classes: a time, and below it, in indexBits, the index of the class, so that one comparison
	// orders turns by time, and by weight where that is equal. Its second half is the next turn of each class, and
	// any other element the earlier of 2i and 2i+1. A new turn takes a comparison for each level, and no branch that
	// depends on it.
	//
	// Time and index fit: the weights of c classes are c²/2 together at least, so that no time exceeds the slots
	// of the largest table, 1<<17, divided by that, times 1<<turnBits.
	tree      []uint64
	indexBits int
}

func newTurns(backends []Backend) *turns {
	order := make([]uint32, len(backends))
	for i := range order {
		order[i] = uint32(i)
	}
	slices.SortStableFunc(order, func(a, b uint32) int { return cmp.Compare(backends[b].Weight, backends[a].Weight) })
	t := &turns{}
	for len(order) > 0 {
		weight, n := backends[order[0]].Weight, 1
		for n < len(order) && backends[order[n]].Weight == weight {
			n++
		}
		t.classes = append(t.classes, class{order[:n], uint64(1<<turnBits) / uint64(weight)})
		order = order[n:]
	}
	t.indexBits = bits.Len(uint(len(t.classes) - 1))
	half := 1 << t.indexBits
	t.tree = make([]uint64, 2*half)
	for i := range half {
		t.tree[half+i] = uint64(i)
		if i >= len(t.classes) {
			t.tree[half+i] = math.MaxUint64
		}
	}
	for i := half - 1; i > 0; i-- {
		t.tree[i] = min(t.tree[2*i], t.tree[2*i+1])
	}
	return t
}

// current returns the class whose turn it is.
func (t *turns) current() *class { return &t.classes[t.tree[1]&(1<<t.indexBits-1)] }

// pass moves on to the next turn.
func (t *turns) pass() {
	turn := t.tree[1] + t.current().step<<t.indexBits
	i := turn&(1<<t.indexBits-1) | 1<<t.indexBits
	t.tree[i] = turn
	for i > 1 {
		turn = min(turn, t.tree[i^1])
		i /= 2
		t.tree[i] = turn
	}
}
