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
		const size = 300 // no power of two
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
					t.Fatalf("%d slots for %d", 1<<x.order, n)
				}
				for j := range uint32(1) << x.order {
					if at := x.base + j; owner[at] != 0 {
						t.Fatalf("seed %d: slot %d given out twice", seed, at)
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
		// What is held can be found again, and nothing else is.
		again := newExtents(size, clock, func() {})
		for _, x := range held {
			if !again.reserve(x) {
				t.Fatalf("seed %d: %+v cannot be reserved", seed, x)
			}
			if again.reserve(x) {
				t.Fatalf("seed %d: %+v reserved twice", seed, x)
			}
		}
		if again.used != e.used {
			t.Errorf("seed %d: used %d, %d after adoption", seed, e.used, again.used)
		}
		// All grows together again.
		for _, x := range held {
			e.release(x)
			again.release(x)
		}
		for _, e := range []*extents{e, again} {
			if _, ok := e.alloc(256); !ok || e.used != 256 {
				t.Errorf("seed %d: fragmented: %d used", seed, e.used)
			}
		}
		if waits == 0 {
			t.Error("never waited for programs: the sequence is too tame")
		}
	}
}

// A number that was given back is not given out before programs that may read
// it have ended.
func TestIDsRest(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Unix(1700000000, 0))
	waits := 0
	a := newIDs(1, 4, clock, func() { waits++ })
	for want := uint32(1); want < 4; want++ {
		if id, ok := a.alloc(); !ok || id != want {
			t.Fatalf("%d %v", id, ok)
		}
	}
	if _, ok := a.alloc(); ok {
		t.Error("more than there are")
	}
	a.release(2)
	if id, ok := a.alloc(); !ok || id != 2 || waits != 1 {
		t.Errorf("%d %v after %d waits", id, ok, waits)
	}
	a.release(3)
	a.resting.take(false) // a look
	clock.SetTime(clock.Now().Add(2 * ripeAfter))
	if id, ok := a.alloc(); !ok || id != 3 || waits != 1 {
		t.Errorf("%d %v after %d waits, though it was long enough", id, ok, waits)
	}
}
