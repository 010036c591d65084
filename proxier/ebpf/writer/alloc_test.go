// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"math/rand/v2"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"
)

func TestExtents(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Unix(1700000000, 0))
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 2))
		const size = 300 // not a power of two
		waits := 0
		e := newExtents(size, clock, func() { waits++ })
		owner := make([]int, size)
		held := map[int]extent{}
		for i := 1; i < 400; i++ {
			if r.IntN(3) > 0 {
				n := 1 + r.IntN(40)
				x, ok := e.alloc(n)
				if !ok {
					continue
				}
				if 1<<x.order < n {
					t.Fatalf("an extent of %d slots for %d", 1<<x.order, n)
				}
				for j := range uint32(1) << x.order {
					if at := x.base + j; owner[at] != 0 {
						t.Fatalf("seed %d: slot %d was allocated twice", seed, at)
					} else {
						owner[at] = i
					}
				}
				held[i] = x
			} else {
				for k, x := range held {
					e.release(x)
					for j := range uint32(1) << x.order {
						owner[x.base+j] = 0
					}
					delete(held, k)
					break
				}
			}
		}
		// Allocated extents can be reserved again, and only once.
		again := newExtents(size, clock, func() {})
		for _, x := range held {
			if !again.reserve(x) {
				t.Fatalf("seed %d: %+v cannot be reserved", seed, x)
			}
			if again.reserve(x) {
				t.Fatalf("seed %d: %+v was reserved twice", seed, x)
			}
		}
		if again.used != e.used {
			t.Errorf("seed %d: %d slots in use, %d after adoption", seed, e.used, again.used)
		}
		// After the release, neighbours are merged again.
		for _, x := range held {
			e.release(x)
			again.release(x)
		}
		for _, e := range []*extents{e, again} {
			if _, ok := e.alloc(256); !ok || e.used != 256 {
				t.Errorf("seed %d: fragmented: %d slots in use", seed, e.used)
			}
		}
		if waits == 0 {
			t.Error("the allocator never waited for programs: the sequence is too simple")
		}
	}
}

// TestIDsRest: a released id is not allocated again before programs have ended that may use it.
func TestIDsRest(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Unix(1700000000, 0))
	waits := 0
	a := newIDs(1, 4, clock, func() { waits++ })
	for want := uint32(1); want < 4; want++ {
		if id, ok := a.alloc(); !ok || id != want {
			t.Fatalf("got id %d, %v", id, ok)
		}
	}
	if _, ok := a.alloc(); ok {
		t.Error("an id beyond the limit was allocated")
	}
	a.release(2)
	if id, ok := a.alloc(); !ok || id != 2 || waits != 1 {
		t.Errorf("got id %d, %v, after %d waits", id, ok, waits)
	}
	a.release(3)
	a.resting.take(false) // notes the time of the release
	clock.SetTime(clock.Now().Add(2 * ripeAfter))
	if id, ok := a.alloc(); !ok || id != 3 || waits != 1 {
		t.Errorf("got id %d, %v, after %d waits; no wait was necessary", id, ok, waits)
	}
}
