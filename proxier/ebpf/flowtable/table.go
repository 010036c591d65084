// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Table are the maps of flows. The programs create flows, and evict young ones when they need
// room; user space removes those that timed out.
type Table struct {
	Flows   *ciliumebpf.Map
	Entries *ciliumebpf.Map
	counts  []lbmap.FlowCounter
	tables  *lbmap.Tables // of the services that flows are of; nil if they are not known
	lists   []lbmap.FlowList
	filter  filter
	memory  [][]byte // of counts, lists and filter
	// stale are claimed flows that Sweep saw, by id.
	stale map[uint32]claim
}

// Open opens the flows in these maps, which stay the caller's.
func Open(maps lbmap.Maps) (*Table, error) {
	t := &Table{Flows: maps["tdm_flow"], Entries: maps["tdm_flow_entry"]}
	var bits []uint64
	if err := errors.Join(mapTo(&t.memory, &t.counts, maps["tdm_flow_count"]), mapTo(&t.memory, &t.lists, maps["tdm_flow_free"]), mapTo(&t.memory, &bits, maps["tdm_flow_filter"])); err != nil {
		unmap(&t.memory)
		return nil, err
	}
	t.filter = bits
	// Of new maps: before programs use them.
	atomic.CompareAndSwapUint64(&t.counts[lbmap.FlowSeed].Value, 0, rand.Uint64()|1)
	return t, nil
}

// Close unmaps memory; the maps stay open.
func (t *Table) Close() {
	unmap(&t.memory)
	*t = Table{}
}

// Count is one of the programs' counters.
func (t *Table) Count(which int) uint64 { return atomic.LoadUint64(&t.counts[which].Value) }

// Limit is the number of flows that fit. Id 0 is none.
func (t *Table) Limit() int { return int(t.Flows.MaxEntries()) - 1 }

// Used counts the flows there are.
func (t *Table) Used() int { return usedIn(t.lists, t.Limit()) }

// usedIn sums the ids in use over all lists. An id may be taken by one CPU and given back by
// another one.
func usedIn(lists []lbmap.FlowList, limit int) int {
	var sum uint64
	for i := range lists {
		sum += atomic.LoadUint64(&lists[i].Used)
	}
	return max(0, min(int(int64(sum)), limit))
}

// UsedIn counts the flows in these maps, which may be read-only.
func UsedIn(maps lbmap.Maps) (int, error) {
	m := maps["tdm_flow_free"]
	lists := make([]lbmap.FlowList, m.MaxEntries())
	for i := range lists {
		if err := m.Lookup(uint32(i), &lists[i]); err != nil {
			return 0, fmt.Errorf("read the free flow ids: %w", err)
		}
	}
	return usedIn(lists, int(maps["tdm_flow"].MaxEntries())-1), nil
}

// give returns an id to a list of free ones, as flow_give() of bpf/flow_pool.h does.
func (t *Table) give(id uint32, f *lbmap.Flow) {
	for list := &t.lists[int(id)%len(t.lists)]; ; {
		old := atomic.LoadUint64(&list.Top)
		atomic.StoreUint32(&f.Place[0], uint32(old))
		if atomic.CompareAndSwapUint64(&list.Top, old, (old>>32+1)<<32|uint64(id)) {
			atomic.AddUint64(&list.Used, ^uint64(0))
			return
		}
	}
}

// take is a free id, or 0, as flow_take() of bpf/flow_pool.h finds it.
func (t *Table) take(flows []lbmap.Flow) uint32 {
	for i := range t.lists {
		list := &t.lists[i]
		for {
			old := atomic.LoadUint64(&list.Top)
			id := uint32(old)
			if id == 0 || int(id) >= len(flows) {
				break
			}
			next := atomic.LoadUint32(&flows[id].Place[0])
			if atomic.CompareAndSwapUint64(&list.Top, old, (old>>32+1)<<32|uint64(next)) {
				atomic.AddUint64(&list.Used, 1)
				return id
			}
		}
	}
	fresh := &t.counts[lbmap.FlowFresh].Value
	if atomic.LoadUint64(fresh) >= uint64(len(flows)) {
		return 0
	}
	id := atomic.AddUint64(fresh, 1)
	if id >= uint64(len(flows)) {
		return 0
	}
	atomic.AddUint64(&t.lists[0].Used, 1)
	return uint32(id)
}

// Each calls fn with all flows, window after window.
func (t *Table) Each(fn func(first int, list []lbmap.Flow) error) error {
	return eachWindow(t.Flows, true, func(s span[lbmap.Flow]) error { return fn(int(s.first), s.list) })
}

// CountFor has the traffic of removed flows added to the statistics in these tables.
func (t *Table) CountFor(tables *lbmap.Tables) { t.tables = tables }
