// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"flag"
	"strings"
	"testing"
)

var sequences = flag.Int("sequences", 300, "random event sequences in TestModel")

// TestModel applies random events, with syncs, failures and restarts between
// them, and compares the tables with a computation from scratch.
func TestModel(t *testing.T) {
	roomy := Sizes{Frontends: 256, Services: 64, Backends: 512, Slots: 1024, Ranges: 256, Locals: 16}
	for seed := range uint64(*sequences) {
		c := newCluster(seed)
		tables := fakeTables(roomy)
		h := newHarness(t, tables, roomy)
		failing := false
		tables.frontends.(*fakeFrontends).fail = func(frontendKey) error {
			if failing && c.rand.IntN(4) == 0 {
				return errors.New("injected")
			}
			return nil
		}
		for step := range 30 {
			for range 1 + c.rand.IntN(6) {
				c.event(h)
			}
			if c.rand.IntN(4) == 0 {
				failing = true
				_ = h.Sync(context.Background())
				failing = false
			}
			if c.rand.IntN(8) == 0 {
				h = newHarness(t, tables, roomy) // the process died
				for _, s := range c.services {
					h.OnServiceAdd(s)
				}
				for _, s := range c.slices {
					h.OnEndpointSliceAdd(s)
				}
			}
			h.sync(t)
			if got, want := Text(h.writer.tables), Wanted(c.decisions()); got != want {
				t.Fatalf("seed %d step %d:\ngot\n%s\nwant\n%s", seed, step, got, want)
			}
			Check(t, h.writer.tables, h.writer.usage())
		}
	}
}

// TestModelFull does the same where not everything fits: what is there must be
// right, and everything must come once there is room.
func TestModelFull(t *testing.T) {
	for seed := range uint64(*sequences) {
		c := newCluster(seed)
		h := newHarness(t, fakeTables(smallSizes), smallSizes)
		for range 30 {
			for range 1 + c.rand.IntN(6) {
				c.event(h)
			}
			h.sync(t)
			Check(t, h.writer.tables, h.writer.usage())
			if text := Text(h.writer.tables); strings.Contains(text, "STALE") || strings.Contains(text, "NO-MEMBER") || strings.Contains(text, "UNUSED") {
				t.Fatalf("seed %d: %s", seed, text)
			}
		}
		for _, s := range c.slices {
			h.OnEndpointSliceDelete(s)
		}
		h.sync(t)
		clear(c.slices)
		h.sync(t)
		if len(h.writer.unplaced) > 0 && len(c.services) < 10 {
			t.Fatalf("seed %d: %d unplaced though there is room", seed, len(h.writer.unplaced))
		}
	}
}

// A restart that finds everything as it should be writes nothing.
func TestRestartWritesNothing(t *testing.T) {
	c := newCluster(1)
	sizes := Sizes{Frontends: 256, Services: 64, Backends: 512, Slots: 1024, Ranges: 256, Locals: 16}
	tables := fakeTables(sizes)
	h := newHarness(t, tables, sizes)
	for range 200 {
		c.event(h)
	}
	h.sync(t)
	before := Text(h.writer.tables)
	h = newHarness(t, tables, sizes)
	for _, s := range c.services {
		h.OnServiceAdd(s)
	}
	for _, s := range c.slices {
		h.OnEndpointSliceAdd(s)
	}
	writes := tables.frontends.(*fakeFrontends).writes
	h.sync(t)
	if h.writer.writes != 0 || tables.frontends.(*fakeFrontends).writes != writes {
		t.Errorf("%d stores, %d frontends written", h.writer.writes, tables.frontends.(*fakeFrontends).writes-writes)
	}
	if got := Text(h.writer.tables); got != before {
		t.Errorf("got\n%s\nwant\n%s", got, before)
	}
	Check(t, h.writer.tables, h.writer.usage())
}
