// SPDX-License-Identifier: Apache-2.0

package maglev

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// somePods returns backends with consecutive addresses, as pods have.
func somePods(n int, weight func(i int) uint32) []Backend {
	list := make([]Backend, n)
	for i := range list {
		list[i] = Backend{netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)}), 8080), weight(i)}
	}
	return list
}

func equally(int) uint32 { return 100 }

// filled checks a table, and returns it with how many slots each backend has.
func filled(t *testing.T, size int, list []Backend) (table []uint32, counts []int) {
	t.Helper()
	table, counts = make([]uint32, size), make([]int, len(list))
	Fill(table, list, 1)
	for slot, b := range table {
		if int(b) >= len(list) {
			t.Fatalf("slot %d has backend %d of %d", slot, b, len(list))
		}
		counts[b]++
	}
	return table, counts
}

// TestShares: slots are in proportion to weights, to within one turn of each backend.
func TestShares(t *testing.T) {
	for _, tt := range []struct {
		name   string
		n      int
		weight func(i int) uint32
	}{
		{"one", 1, equally},
		{"equal", 100, equally},
		{"one of double weight", 10, func(i int) uint32 { return 100 << (i / 9) }},
		{"1 to 10", 10, func(i int) uint32 { return uint32(i + 1) }},
		{"least and most", 2, func(i int) uint32 { return 1 + uint32(i)*65534 }},
	} {
		for _, size := range []int{1021, 16381, 131071} {
			t.Run(fmt.Sprintf("%s/%d", tt.name, size), func(t *testing.T) {
				list := somePods(tt.n, tt.weight)
				sum := 0.0
				for _, b := range list {
					sum += float64(b.Weight)
				}
				_, counts := filled(t, size, list)
				for i, b := range list {
					if want := float64(size) * float64(b.Weight) / sum; math.Abs(float64(counts[i])-want) > 2 {
						t.Errorf("backend %d of weight %d has %d slots, want %.1f", i, b.Weight, counts[i], want)
					}
				}
			})
		}
	}
}

// TestDisruption: a backend that leaves, or a weight that changes, moves few slots of others.
func TestDisruption(t *testing.T) {
	const size = 16381
	list := somePods(100, equally)
	before, counts := filled(t, size, list)
	t.Run("leaves", func(t *testing.T) {
		rest := slices.Delete(slices.Clone(list), 50, 51)
		after, _ := filled(t, size, rest)
		moved := 0
		for i := range before {
			was, is := list[before[i]].Addr, rest[after[i]].Addr
			if was != is {
				moved++
			}
		}
		if own := counts[50]; moved > own*5/2 || moved < own {
			t.Errorf("%d of %d slots moved (%.2f %%), the backend had %d", moved, size, 100*float64(moved)/size, own)
		}
		t.Logf("%.2f %% moved, %.2f %% are those of the backend", 100*float64(moved)/size, 100*float64(counts[50])/size)
	})
	t.Run("weight", func(t *testing.T) {
		heavier := slices.Clone(list)
		heavier[50].Weight = 110
		after, _ := filled(t, size, heavier)
		moved := 0
		for i := range before {
			if before[i] != after[i] {
				moved++
			}
		}
		if moved > size/10 {
			t.Errorf("%d of %d slots moved (%.2f %%)", moved, size, 100*float64(moved)/size)
		}
		t.Logf("%.2f %% moved", 100*float64(moved)/size)
	})
}

// TestGolden: tables stay as they are from one version to the next, so that nodes with different versions
// agree.
func TestGolden(t *testing.T) {
	for _, tt := range []struct {
		list []Backend
		want uint64
	}{
		{somePods(3, equally), goldenEqual},
		{somePods(7, func(i int) uint32 { return uint32(i*i + 1) }), goldenWeighted},
	} {
		table, _ := filled(t, 251, tt.list)
		sum := uint64(0)
		for _, b := range table {
			sum = mix(sum ^ uint64(b))
		}
		if sum != tt.want {
			t.Errorf("the table of %v has the check sum %#x, want %#x", tt.list, sum, tt.want)
		}
	}
}

// TestSizes: the size follows from the number of backends.
func TestSizes(t *testing.T) {
	for n, want := range map[int]int{0: 251, 1: 251, 2: 251, 3: 509, 10: 1021, 100: 16381, 1310: 131071, 1311: 131071, 1 << 20: 131071} {
		if got := SizeFor(n); got != want {
			t.Errorf("%d backends: %d slots, want %d", n, got, want)
		}
	}
	for _, size := range Sizes() {
		for d := 2; d*d <= size; d++ {
			if size%d == 0 {
				t.Errorf("%d is no prime", size)
			}
		}
		if !ValidSize(size) || ValidSize(size+1) {
			t.Errorf("%d is not told from %d", size, size+1)
		}
	}
	if Smaller(509) != 251 || Smaller(251) != 0 || Smaller(131071) != 65521 {
		t.Error("wrong smaller sizes")
	}
}

// TestRandom: every mixture of weights fills the table.
func TestRandom(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		list := somePods(1+random.IntN(300), func(int) uint32 { return 1 + uint32(random.IntN(1<<uint(1+random.IntN(16)))) })
		filled(t, Sizes()[1+random.IntN(4)], list)
	}
}

func BenchmarkFill(b *testing.B) {
	for _, bb := range []struct {
		size, backends int
		weight         func(i int) uint32
	}{
		{65521, 100, equally}, {65521, 100, func(i int) uint32 { return uint32(i + 1) }}, {16381, 10, equally}, {1021, 10, equally}, {131071, 1310, equally},
	} {
		name := "equal"
		if bb.weight(1) != bb.weight(2) {
			name = "weighted"
		}
		b.Run(fmt.Sprintf("%s/size=%d/backends=%d", name, bb.size, bb.backends), func(b *testing.B) {
			list, table := somePods(bb.backends, bb.weight), make([]uint32, bb.size)
			b.ReportAllocs()
			for b.Loop() {
				Fill(table, list, 1)
			}
		})
	}
}

const (
	goldenEqual    = 0x2995db96152b6184
	goldenWeighted = 0x1d3b89f642617aee
)
