// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"math/rand/v2"
	"testing"

	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable/flowtabletest"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

func newIndex(homes uint32) *Index {
	return &Index{entries: entries{list: make([]lbmap.FlowEntry, homes+lbmap.FlowNear-1)}, filter: make(filter, homes/64+1), seed: rand.Uint64() | 1, homes: homes}
}

func randomFlow(r *rand.Rand) *lbmap.Flow {
	f := &lbmap.Flow{}
	for i := range 4 {
		f.Request.Src[i], f.Reply.Src[i] = r.Uint32(), r.Uint32()
	}
	f.Request.Sport, f.Reply.Sport = uint16(r.Uint32()), uint16(r.Uint32())
	return f
}

// TestIndexFull: as many flows fit as a table has records, over and over, but for one in some ten
// thousand, whose place is refused. None is lost, and none stays.
func TestIndexFull(t *testing.T) {
	const flows, rounds = 1 << 14, 1 << 17
	x := newIndex(homesPerEntry * 2 * flows)
	r := rand.New(rand.NewPCG(1, 2))
	type held struct {
		flow           *lbmap.Flow
		id, generation uint32
	}
	var there []held
	refused, entered := 0, 0
	enter := func(id, generation uint32) bool {
		f := randomFlow(r)
		f.Flags = uint64(generation)<<32 | lbmap.FlowReplied
		f.Life = lbmap.FlowLife(generation, lbmap.FlowNew)
		for way := range 2 {
			entered++
			if err := x.enter(f, id, generation, way, progress{}); err != nil {
				refused++
				if way == 1 {
					remove(x.entries, x.filter, f.Place[0], id, generation)
				}
				return false
			}
		}
		there = append(there, held{f, id, generation})
		return true
	}
	drop := func(i int) (id uint32) {
		h := there[i]
		for _, u := range usesOf(h.id, h.flow) {
			remove(x.entries, x.filter, u.place, u.id, u.generation)
		}
		there[i] = there[len(there)-1]
		there = there[:len(there)-1]
		return h.id
	}
	for id := range uint32(flows) {
		enter(id+1, 1)
	}
	for i := range uint32(rounds) {
		id := drop(r.IntN(len(there)))
		for !enter(id, 2+i) {
		}
	}
	if refused*5000 > entered {
		t.Errorf("%d of %d entries were refused", refused, entered)
	}
	for _, h := range there {
		for way, key := range []lbmap.FlowKey{h.flow.Request, h.flow.Reply} {
			e := x.Find(&key)
			if e == nil || e.Id != h.id || e.Generation != h.generation || e != x.at(h.flow.Place[way]) {
				t.Fatalf("flow %d, way %d: entry %+v", h.id, way, e)
			}
		}
		if err := x.enter(h.flow, 0, 0, 0, progress{}); err != errKeyInUse {
			t.Fatalf("flow %d was entered twice: %v", h.id, err)
		}
	}
	if err := (&flowtabletest.Index{List: x.list, Filter: x.filter}).CheckFilter(); err != nil {
		t.Error(err)
	}
	for len(there) > 0 {
		drop(0)
	}
	for i := range x.list {
		if e := &x.list[i]; entryState(e.Word) != lbmap.EntryFree || e.Near != 0 {
			t.Fatalf("at %d is %+v", i, e)
		}
	}
	if err := (&flowtabletest.Index{List: x.list, Filter: x.filter}).CheckFilter(); err != nil {
		t.Error(err)
	}
	t.Logf("%d of %d entries were refused with all %d flows in use", refused, entered, flows)
}
