// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Table are the maps of flows. The programs create flows, and evict young ones when they need
// room; user space removes those that timed out.
type Table struct {
	Flows  *ciliumebpf.Map
	Keys   *ciliumebpf.Map
	counts []lbmap.FlowCounter
	tables *lbmap.Tables // of the services that flows are of; nil if they are not known
	memory []byte        // of counts
}

// Open opens the flows in these maps, which stay the caller's.
func Open(maps lbmap.Maps) (*Table, error) {
	t := &Table{Flows: maps["tdm_flow"], Keys: maps["tdm_flow_key"]}
	var err error
	t.counts, t.memory, err = lbmap.Memory[lbmap.FlowCounter](maps["tdm_flow_count"])
	if err != nil {
		return nil, err
	}
	return t, nil
}

// Close unmaps memory; the maps stay open.
func (t *Table) Close() {
	if t.memory != nil {
		_ = unix.Munmap(t.memory) // fails only for what was never mapped
	}
	*t = Table{}
}

// Count is one of the programs' counters.
func (t *Table) Count(which int) uint64 { return atomic.LoadUint64(&t.counts[which].Value) }

// Limit is the number of flows that fit. Id 0 is none.
func (t *Table) Limit() int { return int(t.Flows.MaxEntries()) - 1 }

// Used counts the flows there are.
func (t *Table) Used() int { return min(int(t.Count(lbmap.FlowUsed)), t.Limit()) }

// give returns an id to the stack of free ones, as flow_give() of bpf/flow.h
// does.
func (t *Table) give(id uint32, f *lbmap.Flow) {
	for top := &t.counts[lbmap.FlowTop].Value; ; {
		old := atomic.LoadUint64(top)
		atomic.StoreUint32(&f.Next, uint32(old))
		if atomic.CompareAndSwapUint64(top, old, (old>>32+1)<<32|uint64(id)) {
			atomic.AddUint64(&t.counts[lbmap.FlowUsed].Value, ^uint64(0))
			return
		}
	}
}

// take is a free id, or 0, as flow_take() of bpf/flow.h finds it.
func (t *Table) take(list []lbmap.Flow) uint32 {
	used := &t.counts[lbmap.FlowUsed].Value
	for top := &t.counts[lbmap.FlowTop].Value; ; {
		old := atomic.LoadUint64(top)
		id := uint32(old)
		if id == 0 || int(id) >= len(list) {
			break
		}
		next := atomic.LoadUint32(&list[id].Next)
		if atomic.CompareAndSwapUint64(top, old, (old>>32+1)<<32|uint64(next)) {
			atomic.AddUint64(used, 1)
			return id
		}
	}
	fresh := &t.counts[lbmap.FlowFresh].Value
	if atomic.LoadUint64(fresh) >= uint64(len(list)) {
		return 0
	}
	id := atomic.AddUint64(fresh, 1)
	if id >= uint64(len(list)) {
		return 0
	}
	atomic.AddUint64(used, 1)
	return uint32(id)
}

// flowsPerWindow is how many flows are mapped at a time: mapping all would
// count as memory of this process. Whole pages hold whole flows.
var flowsPerWindow = 16 * os.Getpagesize() / pageShare

// pageShare is the largest power of two that divides the size of a flow.
const pageShare = int(unsafe.Sizeof(lbmap.Flow{})) & -int(unsafe.Sizeof(lbmap.Flow{}))

// window calls fn with the flows from that id on. Their memory is unmapped afterwards.
func (t *Table) window(first int, fn func(list []lbmap.Flow)) error {
	const size = int(unsafe.Sizeof(lbmap.Flow{}))
	n := min(flowsPerWindow, int(t.Flows.MaxEntries())-first)
	page := os.Getpagesize()
	length := (n*size + page - 1) &^ (page - 1)
	b, err := unix.Mmap(t.Flows.FD(), int64(first*size), length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map the memory of %s: %w", t.Flows, err)
	}
	fn(unsafe.Slice((*lbmap.Flow)(unsafe.Pointer(unsafe.SliceData(b))), n))
	if err := unix.Munmap(b); err != nil {
		return fmt.Errorf("unmap the memory of %s: %w", t.Flows, err)
	}
	return nil
}

// Each calls fn with all flows, window after window.
func (t *Table) Each(fn func(first int, list []lbmap.Flow) error) error {
	for first := 0; first < int(t.Flows.MaxEntries()); first += flowsPerWindow {
		var stop error
		if err := t.window(first, func(list []lbmap.Flow) { stop = fn(first, list) }); err != nil || stop != nil {
			return errors.Join(err, stop)
		}
	}
	return nil
}

// deleteKeys deletes keys, of which some may be gone.
func (t *Table) deleteKeys(keys []lbmap.FlowKey) error {
	for len(keys) > 0 {
		n, err := t.Keys.BatchDelete(keys, nil)
		switch {
		case err == nil:
		case errors.Is(err, ciliumebpf.ErrKeyNotExist):
			n++ // that one is gone already
		case errors.Is(err, ciliumebpf.ErrNotSupported):
			for i := range keys {
				if err := t.Keys.Delete(&keys[i]); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
					return fmt.Errorf("delete the key of a flow: %w", err)
				}
			}
			return nil
		default:
			return fmt.Errorf("delete the keys of flows: %w", err)
		}
		keys = keys[min(n, len(keys)):]
	}
	return nil
}

// CountFor has the traffic of removed flows added to the statistics in these tables.
func (t *Table) CountFor(tables *lbmap.Tables) { t.tables = tables }
