// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"os"
	"sync/atomic"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// The structures of bpf/flow_types.h under their Go names.
type (
	flowEntry   = tcFlow
	flowKey     = tcFlowKey
	flowCounter = tcFlowCounter
)

// Stages of a flow, the low byte of its life; the generation is in the high
// half.
const (
	flowFree = iota
	flowClaimed
	flowNew
	flowYoung
	flowKept
)

// Flags of a flow.
const (
	flowIndexed = 1 << iota
	flowIngress
	flowRemote
	flowReplied
	flowFinRequest
	flowFinReply
	flowClosed
	flowEstablished
)

// Elements of the map of flow counters.
const (
	flowTop = iota
	flowFresh
	flowUsed
	flowBorn
	flowOver
	flowKeptTCP
	flowKeptUDP
)

func stageOf(life uint64) int { return int(life & 0xff) }

func lifeOf(generation uint32, stage int) uint64 { return uint64(generation)<<32 | uint64(stage) }

// flowTable are the maps of flows. The programs make flows, and end those that
// are young when they need room; user space ends what is over.
type flowTable struct {
	flows  *ciliumebpf.Map
	keys   *ciliumebpf.Map
	counts []flowCounter
	tables *tables // of the services that flows are of; nil if they are not known
	mapped [][]byte
}

// maxClosed is MAX_CLOSED of bpf/tc_config.h.
const maxClosed = 2048

// flowMapNames are the maps that hold flows.
var flowMapNames = []string{"tdm_flow", "tdm_flow_key", "tdm_flow_young", "tdm_flow_count"}

func openFlowTable(maps map[string]*ciliumebpf.Map) (*flowTable, error) {
	t := &flowTable{flows: maps["tdm_flow"], keys: maps["tdm_flow_key"]}
	var memory tables
	err := view(&memory, &t.counts, maps["tdm_flow_count"])
	t.mapped = memory.mapped
	if err != nil {
		t.unmap()
		return nil, err
	}
	return t, nil
}

func (t *flowTable) unmap() {
	for _, b := range t.mapped {
		_ = unix.Munmap(b) // fails only for what was never mapped
	}
	*t = flowTable{}
}

// count of the programs' counters.
func (t *flowTable) count(which int) uint64 { return atomic.LoadUint64(&t.counts[which].Value) }

// limit counts the flows there can be. Id 0 is none.
func (t *flowTable) limit() int { return int(t.flows.MaxEntries()) - 1 }

// used counts the flows there are.
func (t *flowTable) used() int { return min(int(t.count(flowUsed)), t.limit()) }

// give returns an id to the stack of free ones, as flow_give() of bpf/flow.h
// does.
func (t *flowTable) give(id uint32, f *flowEntry) {
	for top := &t.counts[flowTop].Value; ; {
		old := atomic.LoadUint64(top)
		atomic.StoreUint32(&f.Next, uint32(old))
		if atomic.CompareAndSwapUint64(top, old, (old>>32+1)<<32|uint64(id)) {
			atomic.AddUint64(&t.counts[flowUsed].Value, ^uint64(0))
			return
		}
	}
}

// take is a free id, or 0, as flow_take() of bpf/flow.h finds it.
func (t *flowTable) take(list []flowEntry) uint32 {
	used := &t.counts[flowUsed].Value
	for top := &t.counts[flowTop].Value; ; {
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
	fresh := &t.counts[flowFresh].Value
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

// recover takes back the ids of flows that somebody was just making or ending when
// it died, which nobody will go on with. The programs may be running meanwhile: what
// they are just working on is left alone, since it is looked for twice, a grace
// period apart.
func (t *flowTable) recover(wait grace) error {
	if t.used() == 0 {
		return nil
	}
	lost, err := t.lost()
	if err != nil || len(lost) == 0 {
		return err
	}
	wait()
	again, err := t.lost()
	if err != nil {
		return err
	}
	for id, life := range again {
		if before, ok := lost[id]; !ok || before != life {
			continue
		}
		if err := t.bury(id, life); err != nil {
			return err
		}
	}
	return nil
}

// lost returns the ids of flows that are neither in use nor free, and their lives. A
// free id that is not on the stack cannot be told from one that was while the
// programs take and give: it stays lost, rather than being given to two flows.
func (t *flowTable) lost() (map[uint32]uint64, error) {
	idle := map[uint32]uint64{}
	err := t.each(func(first int, list []flowEntry) error {
		for i := range list {
			life := atomic.LoadUint64(&list[i].Life)
			if stage := stageOf(life); stage == flowClaimed || stage == flowNew {
				idle[uint32(first+i)] = life
			}
		}
		return nil
	})
	return idle, err
}

// bury ends the flow of an id that nobody else uses, and gives the id back.
func (t *flowTable) bury(id uint32, life uint64) error {
	var e flowEntry
	if err := t.flows.Lookup(id, &e); err != nil {
		return fmt.Errorf("read flow %d: %w", id, err)
	}
	// A client may have begun anew since, and these keys lead to that flow.
	var own []flowKey
	for _, key := range []flowKey{e.Request, e.Reply} {
		var word uint64
		err := t.keys.Lookup(&key, &word)
		if err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
			return fmt.Errorf("read a key of flow %d: %w", id, err)
		}
		if err == nil && word == life&^math.MaxUint32|uint64(id) {
			own = append(own, key)
		}
	}
	if err := t.deleteKeys(own); err != nil {
		return err
	}
	return t.window(int(id)-int(id)%flowsPerWindow, func(list []flowEntry) {
		f := &list[int(id)%flowsPerWindow]
		atomic.StoreUint64(&f.Life, lifeOf(uint32(life>>32), flowFree))
		t.give(id, f)
	})
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

// powerOfTwo is the smallest one that is not less.
func powerOfTwo(n uint32) uint32 {
	if n <= 1 {
		return 1
	}
	return 1 << bits.Len32(n-1)
}
