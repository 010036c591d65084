// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"sync/atomic"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Unfinished is what is neither in use nor free, because a program or a process is writing it,
// or died while it did.
type Unfinished struct {
	Flows   map[uint32]uint64 // lives, by id
	Entries map[uint32]uint64 // words, by place; also those whose flow is over
}

// Recover frees the ids and entries of flows that a process was creating or ending when it died.
// Programs may run meanwhile, and are not disturbed: only what is found twice, a grace period
// apart, is freed.
func (t *Table) Recover(wait func()) error {
	if t.Count(lbmap.FlowFresh) == 0 {
		return nil
	}
	lost, err := t.Unfinished()
	if err != nil || len(lost.Flows)+len(lost.Entries) == 0 {
		return err
	}
	wait()
	return t.recoverAgain(lost)
}

// recoverAgain frees what is still unfinished.
func (t *Table) recoverAgain(lost Unfinished) error {
	again, err := t.Unfinished()
	if err != nil {
		return err
	}
	for id, life := range again.Flows {
		if before, ok := lost.Flows[id]; ok && before == life {
			if err := t.reclaim(id, life); err != nil {
				return err
			}
		}
	}
	for place, word := range again.Entries {
		if before, ok := lost.Entries[place]; ok && before == word {
			err := window(t.Entries, place, lbmap.FlowNear-1, true, func(s entries) error {
				if atomic.LoadUint64(&s.at(place).Word) == word {
					release(s, t.filter, place)
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// Unfinished looks for flows and entries that are unfinished. A free id that is not on the stack
// cannot be told from one that programs take or give at that moment: it stays lost, rather than
// being given to two flows.
func (t *Table) Unfinished() (Unfinished, error) {
	idle := Unfinished{Flows: map[uint32]uint64{}, Entries: map[uint32]uint64{}}
	lives := make([]uint64, t.Flows.MaxEntries())
	err := t.Each(func(first int, list []lbmap.Flow) error {
		for i := range list {
			life := atomic.LoadUint64(&list[i].Life)
			if stage := lbmap.FlowStage(life); stage == lbmap.FlowClaimed || stage == lbmap.FlowNew {
				idle.Flows[uint32(first+i)] = life
			}
			lives[first+i] = life
		}
		return nil
	})
	if err != nil {
		return idle, err
	}
	err = eachWindow(t.Entries, false, func(s entries) error {
		for i := range s.list {
			e := &s.list[i]
			word := atomic.LoadUint64(&e.Word)
			switch state := entryState(word); {
			case state == lbmap.EntryFree:
				continue
			case state == lbmap.EntryLive && int(e.Id) < len(lives):
				if life := lives[e.Id]; uint32(life>>32) == e.Generation && lbmap.FlowStage(life) != lbmap.FlowFree {
					continue
				}
			}
			idle.Entries[s.first+uint32(i)] = word
		}
		return nil
	})
	return idle, err
}

// reclaim ends the flow of an unused id, and frees the id.
func (t *Table) reclaim(id uint32, life uint64) error {
	return window(t.Flows, id, 0, true, func(s span[lbmap.Flow]) error {
		f := s.at(id)
		uses := usesOf(id, f)
		if err := removeAll(t.Entries, t.filter, uses[:], func(use, Traffic) {}); err != nil {
			return err
		}
		atomic.StoreUint64(&f.Life, lbmap.FlowLife(uint32(life>>32), lbmap.FlowFree))
		t.give(id, f)
		return nil
	})
}
