// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Recover frees the ids of flows that a process was creating or ending when it died. Programs may run
// meanwhile, and are not disturbed: only ids that are found twice, a grace period apart, are freed.
func (t *Table) Recover(wait func()) error {
	if t.Used() == 0 {
		return nil
	}
	lost, err := t.Unfinished()
	if err != nil || len(lost) == 0 {
		return err
	}
	wait()
	again, err := t.Unfinished()
	if err != nil {
		return err
	}
	for id, life := range again {
		if before, ok := lost[id]; !ok || before != life {
			continue
		}
		if err := t.reclaim(id, life); err != nil {
			return err
		}
	}
	return nil
}

// Unfinished returns the ids of flows that are neither in use nor free, and their lives. A
// free id that is not on the stack cannot be told from one that programs take or give at that
// moment: it stays lost, rather than being given to two flows.
func (t *Table) Unfinished() (map[uint32]uint64, error) {
	idle := map[uint32]uint64{}
	err := t.Each(func(first int, list []lbmap.Flow) error {
		for i := range list {
			life := atomic.LoadUint64(&list[i].Life)
			if stage := lbmap.FlowStage(life); stage == lbmap.FlowClaimed || stage == lbmap.FlowNew {
				idle[uint32(first+i)] = life
			}
		}
		return nil
	})
	return idle, err
}

// reclaim ends the flow of an unused id, and frees the id.
func (t *Table) reclaim(id uint32, life uint64) error {
	var e lbmap.Flow
	if err := t.Flows.Lookup(id, &e); err != nil {
		return fmt.Errorf("read flow %d: %w", id, err)
	}
	// A client may have opened a new connection since, to which these keys lead.
	var own []lbmap.FlowKey
	for _, key := range []lbmap.FlowKey{e.Request, e.Reply} {
		var word uint64
		err := t.Keys.Lookup(&key, &word)
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
	return t.window(int(id)-int(id)%flowsPerWindow, func(list []lbmap.Flow) {
		f := &list[int(id)%flowsPerWindow]
		atomic.StoreUint64(&f.Life, lbmap.FlowLife(uint32(life>>32), lbmap.FlowFree))
		t.give(id, f)
	})
}
