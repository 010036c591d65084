// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"context"
	"errors"
	"flag"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/kernel"
)

var sequences = flag.Int("sequences", 300, "random event sequences in TestModel")

// TestModel applies random events, with syncs, failures and restarts in between, and compares the
// tables with decisions computed from scratch.
func TestModel(t *testing.T) {
	roomy := lbmap.Sizes{Frontends: 256, Services: 64, Backends: 512, Slots: 1 << 14, Ranges: 256, Locals: 16}
	for seed := range uint64(kernel.Rounds(*sequences)) {
		c := writertest.NewCluster(seed)
		tables := lbmap.NewFakeTables(roomy)
		h := newHarness(t, tables, roomy)
		failing := false
		tables.Frontends.(*lbmap.FakeFrontends).Fail = func(lbmap.FrontendKey) error {
			if failing && c.Rand.IntN(4) == 0 {
				return errors.New("injected")
			}
			return nil
		}
		for step := range 30 {
			for range 1 + c.Rand.IntN(6) {
				c.Event(h)
			}
			if c.Rand.IntN(4) == 0 {
				failing = true
				_ = h.Sync(context.Background())
				failing = false
			}
			if c.Rand.IntN(8) == 0 {
				h = newHarness(t, tables, roomy) // a new process
				for _, s := range c.Services {
					h.OnServiceAdd(s)
				}
				for _, s := range c.Slices {
					h.OnEndpointSliceAdd(s)
				}
			}
			h.sync(t)
			if got, want := writertest.Text(h.writer.tables), writertest.Wanted(c.Decisions()); got != want {
				t.Fatalf("seed %d step %d:\ngot\n%s\nwant\n%s", seed, step, got, want)
			}
			writertest.Check(t, h.writer.tables, h.writer.Usage())
		}
	}
}

// TestModelFull is TestModel with tables that are too small: what is in them must be right, and the
// rest must be written when there is capacity.
func TestModelFull(t *testing.T) {
	for seed := range uint64(kernel.Rounds(*sequences)) {
		c := writertest.NewCluster(seed)
		h := newHarness(t, lbmap.NewFakeTables(smallSizes), smallSizes)
		for range 30 {
			for range 1 + c.Rand.IntN(6) {
				c.Event(h)
			}
			h.sync(t)
			writertest.Check(t, h.writer.tables, h.writer.Usage())
			if text := writertest.Text(h.writer.tables); strings.Contains(text, "STALE") || strings.Contains(text, "NO-MEMBER") || strings.Contains(text, "UNUSED") {
				t.Fatalf("seed %d: %s", seed, text)
			}
		}
		for _, s := range c.Slices {
			h.OnEndpointSliceDelete(s)
		}
		h.sync(t)
		clear(c.Slices)
		h.sync(t)
		if len(h.writer.Unplaced()) > 0 && len(c.Services) < 10 {
			t.Fatalf("seed %d: %d service ports are not placed, although there is capacity", seed, len(h.writer.Unplaced()))
		}
	}
}

// TestRestartWritesNothing: a restart writes nothing if all tables are right.
func TestRestartWritesNothing(t *testing.T) {
	c := writertest.NewCluster(1)
	sizes := lbmap.Sizes{Frontends: 256, Services: 64, Backends: 512, Slots: 1 << 14, Ranges: 256, Locals: 16}
	tables := lbmap.NewFakeTables(sizes)
	h := newHarness(t, tables, sizes)
	for range 200 {
		c.Event(h)
	}
	h.sync(t)
	before := writertest.Text(h.writer.tables)
	h = newHarness(t, tables, sizes)
	for _, s := range c.Services {
		h.OnServiceAdd(s)
	}
	for _, s := range c.Slices {
		h.OnEndpointSliceAdd(s)
	}
	writes := tables.Frontends.(*lbmap.FakeFrontends).Writes
	h.sync(t)
	if h.writer.writes != 0 || tables.Frontends.(*lbmap.FakeFrontends).Writes != writes {
		t.Errorf("%d writes, %d of them frontends", h.writer.writes, tables.Frontends.(*lbmap.FakeFrontends).Writes-writes)
	}
	if got := writertest.Text(h.writer.tables); got != before {
		t.Errorf("got\n%s\nwant\n%s", got, before)
	}
	writertest.Check(t, h.writer.tables, h.writer.Usage())
}
