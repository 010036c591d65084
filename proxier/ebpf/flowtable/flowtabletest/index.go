// SPDX-License-Identifier: Apache-2.0

// Package flowtabletest shows tests what is in the maps of flows.
package flowtabletest

import (
	"fmt"
	"sync/atomic"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Index is the memory of all entries and of their filter.
type Index struct {
	List   []lbmap.FlowEntry
	Filter []uint64
}

// OpenIndex maps the entries in these maps until the test ends.
func OpenIndex(t testing.TB, maps lbmap.Maps) *Index {
	t.Helper()
	return &Index{memory[lbmap.FlowEntry](t, maps["tdm_flow_entry"]), memory[uint64](t, maps["tdm_flow_filter"])}
}

func memory[V any](t testing.TB, m *ciliumebpf.Map) []V {
	t.Helper()
	list, memory, err := lbmap.Memory[V](m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(memory) })
	return list
}

// Each calls fn with all live entries.
func (x *Index) Each(fn func(place uint32, e *lbmap.FlowEntry)) {
	for i := range x.List {
		if e := &x.List[i]; int(atomic.LoadUint64(&e.Word)&lbmap.EntryState) == lbmap.EntryLive {
			fn(uint32(i), e)
		}
	}
}

// CheckFilter returns the first home of which the filter does not say whether it has entries.
func (x *Index) CheckFilter() error {
	for home := range len(x.List) - (lbmap.FlowNear - 1) {
		said := x.Filter[home/64]>>(home%64)&1 == 1
		if near := x.List[home].Near; said != (near != 0) {
			return fmt.Errorf("filter of home %d: %v, but near is %#x", home, said, near)
		}
	}
	return nil
}

// Free are the ids on top of the lists of free ones, and the numbers of changes of the lists.
func Free(t testing.TB, maps lbmap.Maps) (ids []uint32, changes uint64) {
	t.Helper()
	m := maps["tdm_flow_free"]
	for i := range m.MaxEntries() {
		var list lbmap.FlowList
		if err := m.Lookup(i, &list); err != nil {
			t.Fatal(err)
		}
		ids, changes = append(ids, uint32(list.Top)), changes+(list.Top>>32)
	}
	return ids, changes
}
