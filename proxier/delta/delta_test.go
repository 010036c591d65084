// SPDX-License-Identifier: Apache-2.0

package delta

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

var errFails = errors.New("fails")

// kernel has values by key, and fails now and then, before a write or after it. One
// of the values it always refuses.
type kernel struct {
	random *rand.Rand
	fails  bool
	has    map[uint32]int
}

const refusedValue = 3

// spread has keys lie in several chunks of a dense store.
const spread = chunkLength / 4

func (k *kernel) write(change func()) error {
	switch {
	case !k.fails || k.random.IntN(3) > 0:
		change()
		return nil
	case k.random.IntN(2) == 0:
		change()
	}
	return errFails
}

// walk writes what is pending, and checks what a walk promises.
func walk(t *testing.T, d *Delta[uint32, int, int], k *kernel) {
	t.Helper()
	seen := map[uint32]bool{}
	for key, item := range d.Pending() {
		if seen[key] {
			t.Errorf("key %d is pending twice", key)
		}
		seen[key] = true
		switch value := item.Desired(); {
		case !item.Wanted():
			if err := k.write(func() { delete(k.has, key) }); err != nil {
				d.Failed(key, err)
				continue
			}
			d.Removed(key)
		case value == refusedValue:
			d.Refused(key, errFails)
		default:
			if err := k.write(func() { k.has[key] = value }); err != nil {
				d.Failed(key, err)
				continue
			}
			d.Done(key, value)
		}
	}
}

// Random histories, with writes that fail, values that are refused, and other programs
// that change the kernel's: when nothing fails any more, the kernel has what is
// desired and nothing else.
func TestConverges(t *testing.T) {
	for seed := range uint64(500) {
		random := rand.New(rand.NewPCG(seed, 0))
		k := &kernel{random: random, has: map[uint32]int{}}
		d := New[uint32, int, int](cmp.Compare[uint32])
		if seed%2 != 0 {
			d = NewIndexed[int, int]()
		}
		desired := map[uint32]int{}
		anyKey := func() uint32 { return random.Uint32N(10) * spread }
		read := func() {
			d.Forget()
			for key, value := range k.has {
				if item := d.Get(key); item != nil && item.Wanted() && item.Desired() == value {
					d.Done(key, value)
				} else {
					d.Adopt(key, value)
				}
			}
		}
		for range 60 {
			k.fails = random.IntN(2) == 0
			d.Begin()
			for range random.IntN(5) {
				key, value := anyKey(), random.IntN(5)
				if random.IntN(3) == 0 {
					delete(desired, key)
					d.Drop(key)
				} else {
					desired[key] = value
					d.Want(key, value)
				}
			}
			switch random.IntN(6) {
			case 0: // full, without what was dropped silently
				d.Begin()
				delete(desired, anyKey())
				for _, key := range slices.Sorted(maps.Keys(desired)) {
					d.Want(key, desired[key])
				}
				d.DropOthers()
				d.Retry()
			case 1:
				k.has[anyKey()] = random.IntN(refusedValue)
				delete(k.has, anyKey())
				read()
			case 2:
				d.TouchAll()
			}
			walk(t, d, k)
			check(t, d, k, desired)
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
		k.fails = false
		d.Retry()
		walk(t, d, k)
		check(t, d, k, desired)
		for key := range d.Pending() {
			t.Errorf("key %d is pending though nothing fails", key)
		}
		for key, value := range desired {
			if value == refusedValue {
				if d.Err(key) == nil {
					t.Errorf("key %d was refused, and nothing tells why", key)
				}
				continue
			}
			if got, there := k.has[key]; !there || got != value {
				t.Errorf("key %d is %d (%v), want %d", key, got, there, value)
			}
			if d.Err(key) != nil {
				t.Errorf("key %d succeeded, and has an error", key)
			}
		}
		for key := range k.has {
			if _, wanted := desired[key]; !wanted {
				t.Errorf("key %d is left", key)
			}
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// check reports whether the difference between what is desired and what is in the kernel
// is pending, refused, or at least uncertain: nothing is lost.
func check(t *testing.T, d *Delta[uint32, int, int], k *kernel, desired map[uint32]int) {
	t.Helper()
	refused := map[uint32]bool{}
	for key := range d.AllRefused() {
		refused[key] = true
	}
	for key := range uint32(10 * spread) {
		want, wanted := desired[key]
		has, there := k.has[key]
		item := d.Get(key)
		if (item != nil && item.Wanted()) != wanted || wanted && item.Desired() != want {
			t.Errorf("key %d: what is desired is forgotten", key)
		}
		if (wanted != there || want != has) && !d.IsPending(key) && !refused[key] {
			t.Errorf("key %d: is %d (%v), want %d (%v), and nothing is pending", key, has, there, want, wanted)
		}
		if item != nil && item.There() && !item.Unsure() && (!there || has != item.Applied) {
			t.Errorf("key %d: said to be %d, is %d (%v)", key, item.Applied, has, there)
		}
	}
}

// What becomes pending first comes first; what fails keeps its place.
func TestOrder(t *testing.T) {
	d := New[int, int, int](cmp.Compare[int])
	pending := func() (list []int) {
		for k := range d.Pending() {
			list = append(list, k)
		}
		return list
	}
	expect := func(want ...int) {
		t.Helper()
		if got := pending(); !slices.Equal(got, want) {
			t.Errorf("pending %v, want %v", got, want)
		}
	}
	d.Begin()
	for _, k := range []int{5, 2, 9} {
		d.Want(k, 1)
	}
	expect(5, 2, 9)
	d.Failed(5, errFails)
	d.Done(2, 1)
	d.Refused(9, errFails)
	d.Want(1, 1)
	expect(5, 1)
	d.Retry()
	expect(5, 1, 9)
	d.Done(5, 1)
	d.Done(9, 1)
	d.Done(1, 1)
	d.TouchAll()
	expect(1, 2, 5, 9)
	for _, k := range pending() {
		d.Done(k, 1)
	}
	d.Begin()
	d.Want(5, 1)
	d.DropOthers()
	expect(1, 2, 9)
	for k := range d.Pending() {
		d.Removed(k)
		d.Want(10-k, 2) // in the middle of a walk: comes with the next
	}
	expect(9, 8, 1)
	d.Done(9, 2)
	d.Removed(9) // it is wanted, and another program removed it
	expect(8, 1, 9)
}

// Several users of one key.
func TestSet(t *testing.T) {
	s := NewSet[string]()
	text := func() string {
		var list []string
		for k, item := range s.Pending() {
			list = append(list, fmt.Sprint(k, " ", item.Wanted()))
		}
		slices.Sort(list)
		return fmt.Sprint(list)
	}
	expect := func(want string) {
		t.Helper()
		if got := text(); got != want {
			t.Errorf("pending %s, want %s", got, want)
		}
	}
	s.Use([]string{"a", "b"}, 1)
	s.Use([]string{"a"}, 1)
	expect("[a true b true]")
	s.Added("a")
	s.Failed("b", errFails)
	s.Use([]string{"a", "b"}, -1)
	expect("[b false]") // it may be there
	if s.users["a"] != 1 || s.users["b"] != 0 {
		t.Errorf("users %v", s.users)
	}
	s.Found([]string{"c"})
	expect("[a true c false]")
	s.Use([]string{"c"}, 1)
	expect("[a true]") // the kernel has c
	s.Use([]string{"c"}, -1)
	expect("[a true c false]")
}

func BenchmarkFull(b *testing.B) {
	const keys = 10000
	values := make([]int, keys)
	d := New[uint32, *int, *int](cmp.Compare[uint32])
	for b.Loop() {
		d.Begin()
		for i := range values {
			d.Want(uint32(i), &values[i])
		}
		d.DropOthers()
		d.Retry()
		for k, item := range d.Pending() {
			d.Done(k, item.Desired())
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/keys, "ns/key")
}
