// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// flowTable are the maps of flows. The programs make flows, and end those that
// are young when they need room; user space ends what is over.
type flowTable struct {
	flows  *ciliumebpf.Map
	keys   *ciliumebpf.Map
	counts []flowCounter
	tables *tables // of the services that flows are of; nil if they are not known
	memory []byte  // of counts
}

func openFlowTable(maps Maps) (*flowTable, error) {
	t := &flowTable{flows: maps["tdm_flow"], keys: maps["tdm_flow_key"]}
	var err error
	t.counts, t.memory, err = mapping[flowCounter](maps["tdm_flow_count"])
	if err != nil {
		return nil, err
	}
	return t, nil
}

func (t *flowTable) unmap() {
	if t.memory != nil {
		_ = unix.Munmap(t.memory) // fails only for what was never mapped
	}
	*t = flowTable{}
}

// count of the programs' counters.
func (t *flowTable) count(which int) uint64 { return atomic.LoadUint64(&t.counts[which].Value) }

// limit counts the flows there can be. Id 0 is none.
func (t *flowTable) limit() int { return int(t.flows.MaxEntries()) - 1 }

// used counts the flows there are.
func (t *flowTable) used() int { return min(int(t.count(FlowUsed)), t.limit()) }

// give returns an id to the stack of free ones, as flow_give() of bpf/flow.h
// does.
func (t *flowTable) give(id uint32, f *flowEntry) {
	for top := &t.counts[FlowTop].Value; ; {
		old := atomic.LoadUint64(top)
		atomic.StoreUint32(&f.Next, uint32(old))
		if atomic.CompareAndSwapUint64(top, old, (old>>32+1)<<32|uint64(id)) {
			atomic.AddUint64(&t.counts[FlowUsed].Value, ^uint64(0))
			return
		}
	}
}

// take is a free id, or 0, as flow_take() of bpf/flow.h finds it.
func (t *flowTable) take(list []flowEntry) uint32 {
	used := &t.counts[FlowUsed].Value
	for top := &t.counts[FlowTop].Value; ; {
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
	fresh := &t.counts[FlowFresh].Value
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
const pageShare = int(unsafe.Sizeof(flowEntry{})) & -int(unsafe.Sizeof(flowEntry{}))

// window calls fn with flows that begin with that id. They are gone afterwards.
func (t *flowTable) window(first int, fn func(list []flowEntry)) error {
	const size = int(unsafe.Sizeof(flowEntry{}))
	n := min(flowsPerWindow, int(t.flows.MaxEntries())-first)
	page := os.Getpagesize()
	length := (n*size + page - 1) &^ (page - 1)
	b, err := unix.Mmap(t.flows.FD(), int64(first*size), length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map the memory of %s: %w", t.flows, err)
	}
	fn(unsafe.Slice((*flowEntry)(unsafe.Pointer(unsafe.SliceData(b))), n))
	if err := unix.Munmap(b); err != nil {
		return fmt.Errorf("unmap the memory of %s: %w", t.flows, err)
	}
	return nil
}

// each calls fn with all flows, window after window.
func (t *flowTable) each(fn func(first int, list []flowEntry) error) error {
	for first := 0; first < int(t.flows.MaxEntries()); first += flowsPerWindow {
		var stop error
		if err := t.window(first, func(list []flowEntry) { stop = fn(first, list) }); err != nil || stop != nil {
			return errors.Join(err, stop)
		}
	}
	return nil
}

// deleteKeys deletes keys, of which some may be gone.
func (t *flowTable) deleteKeys(keys []flowKey) error {
	for len(keys) > 0 {
		n, err := t.keys.BatchDelete(keys, nil)
		switch {
		case err == nil:
		case errors.Is(err, ciliumebpf.ErrKeyNotExist):
			n++ // that one is gone already
		case errors.Is(err, ciliumebpf.ErrNotSupported):
			for i := range keys {
				if err := t.keys.Delete(&keys[i]); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
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

// CountFor adds what flows have counted when they end to the statistics of their services.
func (t *flowTable) CountFor(tables *tables) { t.tables = tables }
