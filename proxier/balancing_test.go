// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier/maglev"
)

// decisionOf has backends of these weights in the Cluster set.
func decisionOf(b Balancing, weights ...uint16) *Decision {
	d := &Decision{Balancing: b}
	for i, weight := range weights {
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)}), 8080)
		d.Backends = append(d.Backends, Backend{Addr: addr, Members: InCluster, Weight: weight})
		d.Weighted = d.Weighted || weight != weights[0]
	}
	return d
}

// TestSlotShares: the slots of every algorithm have the asked shares, to within one per cent of a set.
func TestSlotShares(t *testing.T) {
	hundred := make([]uint16, 100)
	for i := range hundred {
		hundred[i] = uint16(50 + i)
	}
	for _, weights := range [][]uint16{{100}, {100, 100, 100}, {100, 200}, {1, 65535}, {7, 11, 13}, {100, 100, 99}, hundred} {
		for _, b := range []Balancing{{Algorithm: Random}, {Algorithm: Maglev}, {Algorithm: Maglev, TableSize: 16381}} {
			t.Run(fmt.Sprintf("%s %d of %v", b.Algorithm, b.TableSize, weights), func(t *testing.T) {
				d := decisionOf(b, weights...)
				slots := d.Slots(V4Cluster, math.MaxInt)
				if size := d.TableSize(V4Cluster); size > 0 && len(slots) != size {
					t.Errorf("%d slots, want %d", len(slots), size)
				}
				counts, sum := make([]int, len(weights)), 0
				for _, i := range slots {
					counts[i]++
				}
				for _, weight := range weights {
					sum += int(weight)
				}
				for i, weight := range weights {
					got, want := float64(counts[i])/float64(len(slots)), float64(weight)/float64(sum)
					if math.Abs(got-want) > 0.01 || counts[i] == 0 {
						t.Errorf("backend %d has %d of %d slots (%.4f), want %.4f", i, counts[i], len(slots), got, want)
					}
				}
			})
		}
	}
}

// TestPlainSlots: without weights and Maglev, each backend has one slot.
func TestPlainSlots(t *testing.T) {
	d := decisionOf(Balancing{Algorithm: Random}, 100, 100, 100)
	d.Backends[1].Members = InLocal
	if got := d.Slots(V4Cluster, math.MaxInt); !d.IsPlain() || !slices.Equal(got, []uint32{0, 2}) {
		t.Errorf("slots %v, plain %v", got, d.IsPlain())
	}
	if got := d.Slots(V6Cluster, math.MaxInt); len(got) > 0 {
		t.Errorf("slots %v of a set without backends", got)
	}
}

// TestSmallerTables: a table that does not fit becomes smaller, and at last there is none.
func TestSmallerTables(t *testing.T) {
	for _, tt := range []struct{ backends, asked, limit, want int }{
		{10, 0, 1 << 20, 1021}, {10, 131071, 1 << 20, 131071}, {10, 131071, 2048, 2039}, {10, 0, 300, 251}, {10, 0, 100, 10}, {300, 251, 1 << 20, 32749}, {300, 0, 300, 300},
	} {
		weights := make([]uint16, tt.backends)
		for i := range weights {
			weights[i] = DefaultWeight
		}
		d := decisionOf(Balancing{Algorithm: Maglev, TableSize: uint32(tt.asked)}, weights...)
		if got := len(d.Slots(V4Cluster, tt.limit)); got != tt.want {
			t.Errorf("%d backends, size %d, at most %d: %d slots, want %d", tt.backends, tt.asked, tt.limit, got, tt.want)
		}
	}
}

// TestSameTablesFromAnyHistory: two nodes that saw the same state have the same Maglev tables, whatever they saw
// before, and in whatever order.
func TestSameTablesFromAnyHistory(t *testing.T) {
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 1))
		last := make([]*discoveryv1.EndpointSlice, 5)
		for i := range last {
			var endpoints []string
			for range random.IntN(6) {
				endpoints = append(endpoints, fmt.Sprintf("10.244.%d.%d", i, random.IntN(20)))
			}
			last[i] = weighted(makeSlice(fmt.Sprint(i), endpoints...), AnnotationWeight, fmt.Sprint(random.IntN(4)))
		}
		node := func(random *rand.Rand) []uint32 {
			tracker, table := NewChangeTracker(fmt.Sprint("node", random.IntN(3)), time.Time{}, nil), NewTable(Facts{}, Policy{})
			tracker.UpdateService(makeService("a", annotations(AnnotationAlgorithm, "maglev")))
			for range random.IntN(20) {
				i := random.IntN(len(last))
				tracker.UpdateEndpointSlice(makeSlice(fmt.Sprint(i), fmt.Sprintf("10.244.%d.%d", i, random.IntN(20))))
				table.Apply(tracker.Take())
			}
			for _, i := range random.Perm(len(last)) {
				tracker.UpdateEndpointSlice(last[i])
			}
			table.Apply(tracker.Take())
			return table.All()[0].New.Slots(V4Cluster, math.MaxInt)
		}
		one, two := node(random), node(random)
		if !slices.Equal(one, two) {
			t.Fatalf("seed %d: two nodes have different tables", seed)
		}
		if len(one) > 0 && !maglev.ValidSize(len(one)) {
			t.Fatalf("seed %d: %d slots", seed, len(one))
		}
	}
}
