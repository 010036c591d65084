// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/sizing"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/kernel"
)

// grow moves to tables of these sizes.
func (h *harness) grow(t testing.TB, s lbmap.Sizes) {
	t.Helper()
	err := h.writer.Move(func(from *lbmap.Tables) (*lbmap.Tables, error) {
		to := lbmap.NewFakeTables(s)
		to.Ranges, to.Locals, to.VIPs, to.Targets, to.Ports, to.Meta, to.Nodes = from.Ranges, from.Locals, from.VIPs, from.Targets, from.Ports, from.Meta, from.Nodes
		larger := lbmap.Maps{}
		for _, name := range []string{"tdm_frontend", "tdm_set", "tdm_slot", "tdm_backend", "tdm_service", "tdm_svc_stats", "tdm_be_stats"} {
			larger[name] = &ciliumebpf.Map{}
		}
		c, err := lbmap.CopyTables(lbmap.Maps{}, larger, from, to)
		if err != nil {
			return nil, err
		}
		return to, c.Finish()
	})
	if err != nil {
		t.Fatalf("move to larger tables: %v", err)
	}
}

// TestModelGrowing is TestModel with tables that start too small. Nothing is reported that fits once they have grown, and
// everything is in them then.
func TestModelGrowing(t *testing.T) {
	roomy := lbmap.Sizes{Frontends: 512, Services: 128, Backends: 1000, Slots: 1<<14 + 100, Ranges: 256, Locals: 16, Affinity: 2, UDPPeers: 2, OptOuts: 2}
	small := roomy
	small.Frontends, small.Services, small.Backends, small.Slots = 8, 4, 8, 8
	limits := sizing.Limits{Start: small, Most: roomy}
	most := 0
	for seed := range uint64(kernel.Rounds(*sequences)) {
		c := writertest.NewCluster(seed)
		h, now := newHarness(t, lbmap.NewFakeTables(small), small), small
		h.writer.SetReach(roomy)
		steps := 0
		for step := range 30 {
			for range 1 + c.Rand.IntN(6) {
				c.Event(h)
			}
			h.sync(t)
			for round := 0; ; round++ {
				wants, short := h.writer.Wants()
				next := limits.Next(now, wants, func(lbmap.Sizes) uint64 { return 0 })
				if short && next == now || round > 4 {
					t.Fatalf("seed %d step %d round %d: %+v are not large enough, and do not grow", seed, step, round, now)
				}
				if next == now {
					break
				}
				h.grow(t, next)
				now, steps = next, steps+1
				if _, err := h.writer.Sync(proxier.Update{}); err != nil {
					t.Fatal(err)
				}
			}
			if got, want := writertest.Text(h.writer.tables), writertest.Wanted(c.Decisions()); got != want {
				t.Fatalf("seed %d step %d:\ngot\n%s\nwant\n%s", seed, step, got, want)
			}
			writertest.Check(t, h.writer.tables, h.writer.Usage())
		}
		for _, p := range h.problems {
			if p.Reason == proxier.ReasonCapacity {
				t.Fatalf("seed %d: reported %+v, which fits", seed, p)
			}
		}
		most = max(most, steps)
	}
	if most < 3 {
		t.Errorf("tables grew %d times at most", most)
	}
}

// TestExtentsGrow allocates all slots, adds some, and allocates those.
func TestExtentsGrow(t *testing.T) {
	for _, size := range []uint32{1, 7, 64, 100} {
		for _, larger := range []uint32{size, size + 1, 2 * size, 3*size + 5} {
			e := newExtents(size, clock.RealClock{}, func() {})
			e.grow(larger)
			taken := make([]bool, larger)
			for range larger {
				x, ok := e.alloc(1)
				if !ok || int(x.base) >= len(taken) || taken[x.base] {
					t.Fatalf("%d grown to %d: %+v, %v", size, larger, x, ok)
				}
				taken[x.base] = true
			}
			if x, ok := e.alloc(1); ok {
				t.Fatalf("%d grown to %d: one more is %+v", size, larger, x)
			}
		}
	}
}
