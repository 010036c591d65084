// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"cmp"
	"slices"
	"sync/atomic"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// entries are all entries of a table, or a part of them.
type entries = span[lbmap.FlowEntry]

// Homes is the number of places of a map of entries where a search may begin.
func Homes(m *ciliumebpf.Map) uint32 { return m.MaxEntries() - (lbmap.FlowNear - 1) }

// EntryLimit is the number of entries that there may be: two for each flow.
func EntryLimit(m *ciliumebpf.Map) int { return int(Homes(m) / homesPerEntry) }

func entryState(word uint64) int { return int(word & lbmap.EntryState) }

// freeWord is the word of an entry after its use.
func freeWord(word uint64) uint64 { return word>>32<<32 | lbmap.EntryFree }

// remove removes an entry of a flow that the caller has claimed, and returns what it counted, as
// key_delete() of bpf/flow_index.h does. Nothing happens if the place is another flow's. The
// places before it, as far as homes of its entries may be, have to be there, too.
func remove(s entries, f filter, place, id, generation uint32) (t Traffic) {
	if !s.has(place) {
		return t
	}
	e := s.at(place)
	word := atomic.LoadUint64(&e.Word)
	if e.Id != id || e.Generation != generation || entryState(word) < lbmap.EntryNew {
		return t
	}
	t = Traffic{Packets: e.Packets, Bytes: e.Bytes}
	release(s, f, place)
	return t
}

// release frees a place that no program frees.
func release(s entries, f filter, place uint32) {
	e := s.at(place)
	if home := place - uint32(e.Distance); e.Distance < lbmap.FlowNear && s.has(home) {
		near, bit := &s.at(home).Near, uint32(1)<<e.Distance
		if atomic.AndUint32(near, ^bit) == bit {
			f.clear(home, near)
		}
	}
	atomic.StoreUint64(&e.Word, freeWord(e.Word))
}

// use is the place of an entry of a flow.
type use struct{ place, id, generation uint32 }

// usesOf are the places of both entries of a flow.
func usesOf(id uint32, f *lbmap.Flow) [2]use {
	generation := uint32(f.Life >> 32)
	return [2]use{{f.Place[0], id, generation}, {f.Place[1], id, generation}}
}

// removeAll removes entries of flows that the caller has claimed, and calls fn for each.
func removeAll(m *ciliumebpf.Map, f filter, list []use, fn func(use, Traffic)) error {
	slices.SortFunc(list, func(a, b use) int { return cmp.Compare(a.place, b.place) })
	for len(list) > 0 {
		if list[0].place >= m.MaxEntries() { // in a record that is not filled in yet
			return nil
		}
		err := window(m, list[0].place, lbmap.FlowNear-1, true, func(s entries) error {
			for len(list) > 0 && s.has(list[0].place) {
				fn(list[0], remove(s, f, list[0].place, list[0].id, list[0].generation))
				list = list[1:]
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
