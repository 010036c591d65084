// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/maglev"
)

// comparedHashes is how many hashes are compared of two tables of different sizes.
const comparedHashes = 1 << 13

// tellDisruption compares a Maglev table that was filled with the one that is still published.
func (w *Writer) tellDisruption(id uint32, s proxier.Set, d *proxier.Decision, plan *setPlan) {
	base, size := lbmap.SplitSetWord(w.tables.Sets[id*lbmap.SetsPerService+uint32(s)])
	if w.disrupted == nil || d.Balancing.Algorithm != proxier.Maglev || size == 0 {
		return
	}
	before, after := w.tables.Slots[base:][:size], w.tables.Slots[plan.extent.base:][:plan.size]
	w.disrupted(proxier.Disruption{Name: d.Name, Set: s, Slots: plan.size, Moved: movedShare(before, after), At: w.clock.Now()})
}

// movedShare is the share of hashes that lead to other slot words.
func movedShare(before, after []uint32) float64 {
	moved := 0
	if len(before) == len(after) {
		for i := range before {
			if before[i] != after[i] {
				moved++
			}
		}
		return float64(moved) / float64(len(before))
	}
	for i := range uint32(comparedHashes) {
		hash := i << 19 // all of a hash's range
		if before[maglev.Slot(hash, len(before))] != after[maglev.Slot(hash, len(after))] {
			moved++
		}
	}
	return float64(moved) / comparedHashes
}
