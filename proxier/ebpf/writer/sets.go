// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"fmt"
	"math"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/maglev"
)

// setPlan is the planned change of one set.
type setPlan struct {
	size   int
	same   bool // the published set is right
	extent extent
	// slots are indexes of backends; nil where each backend of the set has one slot.
	slots []uint32
}

// planSet plans a set, and allocates its slots. It reports whether there is room.
func (w *Writer) planSet(id uint32, s proxier.Set, d *proxier.Decision, ids []uint32) (plan setPlan, ok bool) {
	if d.IsPlain() {
		plan.size, plan.same = w.compareSet(id, s, d, ids)
		if !plan.same && plan.size > 0 {
			plan.extent, ok = w.slots.alloc(plan.size)
			return plan, ok
		}
		return plan, true
	}
	for limit, first := w.largestTable(id, s, d), true; ; limit, first = plan.size/2, false {
		plan.slots = d.Slots(s, limit)
		if len(plan.slots) >= plan.size && !first {
			return plan, false
		}
		plan.size = len(plan.slots)
		if plan.same = w.compareSlots(id, s, d, ids, plan.slots); plan.same || plan.size == 0 {
			return plan, true
		}
		if plan.size > d.Size(s) && !w.hasRoom(id, s, plan.size) {
			if w.hasRoomLater(id, s, plan.size) {
				return plan, false
			}
			continue
		}
		if plan.extent, ok = w.slots.alloc(plan.size); ok {
			w.reportSmaller(d, s, plan.size)
			return plan, true
		}
		if w.hasRoomLater(id, s, plan.size) {
			return plan, false
		}
	}
}

// largestTable is the size of the largest Maglev table that a set can have, or has: tables for which there is no room are
// not worked out with each sync. There is no limit for sets without such a table.
func (w *Writer) largestTable(id uint32, s proxier.Set, d *proxier.Decision) int {
	size := d.TableSize(s)
	if size == 0 {
		return math.MaxInt
	}
	published := w.published(id, s)
	for size > 0 && size != published && !w.hasRoom(id, s, size) && !w.hasRoomLater(id, s, size) {
		size = maglev.Smaller(size)
	}
	return size
}

// published is how many slots a set has in the kernel.
func (w *Writer) published(id uint32, s proxier.Set) int {
	_, size := lbmap.SplitSetWord(w.tables.Sets[id*lbmap.SetsPerService+uint32(s)])
	return size
}

// hasRoom reports whether a set may have so many slots, more than it has backends: a quarter of all slots is left to sets
// with one slot for each backend, and to copies: while a set is replaced, both exist.
func (w *Writer) hasRoom(id uint32, s proxier.Set, size int) bool {
	return w.hasRoomOf(int(w.slots.size), id, s, size)
}

// hasRoomLater is hasRoom of slots that have grown as far as they can.
func (w *Writer) hasRoomLater(id uint32, s proxier.Set, size int) bool {
	return w.reach.Slots > w.slots.size && w.hasRoomOf(int(w.reach.Slots), id, s, size)
}

func (w *Writer) hasRoomOf(all int, id uint32, s proxier.Set, size int) bool {
	used := w.slots.used + 1<<orderOf(size)
	if replaced := w.published(id, s); replaced > 0 {
		used -= 1 << orderOf(replaced)
	}
	return used <= all-all/4
}

// reportSmaller reports a Maglev table that is smaller than it should be. It is not that of other nodes then.
func (w *Writer) reportSmaller(d *proxier.Decision, s proxier.Set, size int) {
	want := d.TableSize(s)
	if size >= want {
		return
	}
	w.report(proxier.Problem{
		Kind: "Service", Object: d.Name.NamespacedName, UID: d.UID, Field: proxier.AnnotationAlgorithm, Reason: proxier.ReasonCapacity,
		Message: fmt.Sprintf("port %s: the Maglev table of set %s has %d slots instead of %d, and is not that of other nodes: %d of %d slots are in use (--ebpf-max-slots)",
			d.Name, s, size, want, w.slots.used, w.slots.size),
	})
}

// fill writes the slots of a set.
func (w *Writer) fill(plan *setPlan, s proxier.Set, d *proxier.Decision, ids []uint32) {
	at := plan.extent.base
	put := func(i int) {
		w.tables.Slots[at] = lbmap.SlotWord(ids[i], w.tables.Backends[ids[i]].Generation)
		at++
	}
	if plan.slots == nil {
		for i := range d.Backends {
			if inSet(&d.Backends[i], s) {
				put(i)
			}
		}
	}
	for _, i := range plan.slots {
		put(int(i))
	}
	w.writes += uint64(plan.size)
}

// compareSlots reports whether exactly these slots are published.
func (w *Writer) compareSlots(id uint32, s proxier.Set, d *proxier.Decision, ids, slots []uint32) bool {
	word := w.tables.Sets[id*lbmap.SetsPerService+uint32(s)]
	base, published := lbmap.SplitSetWord(word)
	if len(slots) == 0 {
		return word == lbmap.EmptySet(d.Empty[s])
	}
	if published != len(slots) {
		return false
	}
	for k, i := range slots {
		if ids[i] == 0 || w.tables.Slots[base+uint32(k)] != lbmap.SlotWord(ids[i], w.tables.Backends[ids[i]].Generation) {
			return false
		}
	}
	return true
}

// compareSet counts a set's backends, and reports whether exactly these are published.
func (w *Writer) compareSet(id uint32, s proxier.Set, d *proxier.Decision, ids []uint32) (size int, same bool) {
	word := w.tables.Sets[id*lbmap.SetsPerService+uint32(s)]
	base, published := lbmap.SplitSetWord(word)
	same = true
	for i := range d.Backends {
		if !inSet(&d.Backends[i], s) {
			continue
		}
		if same {
			same = ids[i] != 0 && size < published &&
				w.tables.Slots[base+uint32(size)] == lbmap.SlotWord(ids[i], w.tables.Backends[ids[i]].Generation)
		}
		size++
	}
	if size == 0 {
		return 0, word == lbmap.EmptySet(d.Empty[s])
	}
	return size, same && size == published
}
