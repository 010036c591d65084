// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"errors"
	"fmt"
	"sync/atomic"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Copier copies flows from one set of maps to another of other sizes. Programs may use both
// meanwhile, so the copier writes as programs do.
type Copier struct {
	from, to *Table
	// Records and rings of both, mapped until Close.
	old, own         []lbmap.Flow
	oldRing, ownRing []uint64
	mapped           [][]byte
	copies           []flowCopy // by the id of the flow
	mostKept         [2]uint64  // of TCP, and of anything else
	// born are the numbers of flows that were created in from until the last copy, and until the
	// one before. Flows since the one before are copied again, as they may have been incomplete.
	born         [2]uint64
	Copied, Lost int
}

// flowCopy is the copy of a flow.
type flowCopy struct {
	generation uint32 // of the flow
	word       uint64 // id and generation of its copy; 0 for none
}

// NewCopier returns nil if both are the same maps, or have different layouts. The maps may be
// closed afterwards.
func NewCopier(from, to lbmap.Maps, sizes *lbmap.Sizes) (c *Copier, err error) {
	for _, name := range MapNames {
		f := from[name]
		if f == nil || f.KeySize() != to[name].KeySize() || f.ValueSize() != to[name].ValueSize() {
			return nil, nil
		}
	}
	same, err := lbmap.SameMap(from["tdm_flow"], to["tdm_flow"])
	if same || err != nil {
		return nil, err
	}
	c = &Copier{mostKept: [2]uint64{uint64(sizes.TCPFlows), uint64(sizes.UDPFlows)}}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	if c.from, err = OpenClone(from); err != nil {
		return c, err
	}
	if c.to, err = OpenClone(to); err != nil {
		return c, err
	}
	c.copies = make([]flowCopy, from["tdm_flow"].MaxEntries())
	err = errors.Join(
		mapTo(c, &c.old, from["tdm_flow"]), mapTo(c, &c.own, to["tdm_flow"]),
		mapTo(c, &c.oldRing, from["tdm_flow_young"]), mapTo(c, &c.ownRing, to["tdm_flow_young"]))
	return c, err
}

// mapTo maps the memory of a map for as long as the copies take.
func mapTo[T any](c *Copier, list *[]T, m *ciliumebpf.Map) error {
	mapped, memory, err := lbmap.Memory[T](m)
	if err != nil {
		return err
	}
	*list, c.mapped = mapped, append(c.mapped, memory)
	return nil
}

// OpenClone opens a table that lives on when these maps are closed.
func OpenClone(maps lbmap.Maps) (*Table, error) {
	t, err := Open(maps)
	if err != nil {
		return nil, err
	}
	t.Flows, err = t.Flows.Clone()
	keys, keysErr := t.Keys.Clone()
	t.Keys = keys
	if err = errors.Join(err, keysErr); err != nil {
		t.Release()
		return nil, fmt.Errorf("open the maps of flows again: %w", err)
	}
	return t, nil
}

// Release closes what OpenClone opened.
func (t *Table) Release() {
	t.Flows.Close()
	t.Keys.Close()
	t.Close()
}

// Close unmaps the memory of both tables.
func (c *Copier) Close() {
	for _, b := range c.mapped {
		_ = unix.Munmap(b) // fails only for what was never mapped
	}
	c.mapped, c.old, c.own, c.oldRing, c.ownRing = nil, nil, nil, nil, nil
	for _, t := range []*Table{c.from, c.to} {
		if t != nil {
			t.Release()
		}
	}
}

// CopyAll copies every flow.
func (c *Copier) CopyAll() error {
	born := c.from.Count(lbmap.FlowBorn)
	c.born = [2]uint64{born, born}
	for id := range c.old {
		if err := c.copy(uint32(id)); err != nil {
			return err
		}
	}
	return nil
}

// CopyNew copies the flows created since the last copy. It takes time for those only.
func (c *Copier) CopyNew() error {
	since, now := c.born[0], c.from.Count(lbmap.FlowBorn)
	c.born = [2]uint64{c.born[1], now}
	places := uint64(len(c.oldRing) - lbmap.MaxClosed)
	for i := since; i < now; i++ {
		word := atomic.LoadUint64(&c.oldRing[i&(places-1)])
		id := uint32(word)
		if id == 0 || int(id) >= len(c.old) {
			continue
		}
		if atomic.LoadUint64(&c.old[id].Life)>>32 != word>>32 {
			continue // over, and its id is another's
		}
		if err := c.copy(id); err != nil {
			return err
		}
	}
	return nil
}

// Finish updates the copies with the state that their flows have got since they were copied. It is
// called when no program uses the earlier maps any more. Without it, a connection that was closed
// meanwhile would count as established here, for a day.
func (c *Copier) Finish() error {
	for id := range c.old {
		at := c.copies[id]
		if at.word == 0 {
			continue
		}
		old := &c.old[id]
		life := atomic.LoadUint64(&old.Life)
		if uint32(life>>32) == at.generation && lbmap.FlowStage(life) >= lbmap.FlowYoung {
			if err := c.update(at.word, atomic.LoadUint32(&old.Flags)&^(lbmap.FlowIndexed|lbmap.FlowIngress|lbmap.FlowRemote)); err != nil {
				return err
			}
			continue
		}
		// Its client may have opened a new connection there.
		request := c.own[uint32(at.word)].Request
		if err := c.end(at.word); err != nil {
			return err
		}
		var word uint64
		err := c.from.Keys.Lookup(&request, &word)
		if errors.Is(err, ciliumebpf.ErrKeyNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("look for a flow: %w", err)
		}
		if another := uint32(word); int(another) < len(c.old) {
			if err := c.copy(another); err != nil {
				return err
			}
		}
	}
	return nil
}

// copy copies a flow that is not there yet.
func (c *Copier) copy(from uint32) error {
	old := &c.old[from]
	life := atomic.LoadUint64(&old.Life)
	e := *old
	if lbmap.FlowStage(life) < lbmap.FlowYoung || e.Flags&lbmap.FlowIndexed == 0 || atomic.LoadUint64(&old.Life) != life {
		return nil
	}
	if at := c.copies[from]; at.word != 0 && at.generation != uint32(life>>32) {
		c.copies[from] = flowCopy{}
		if err := c.end(at.word); err != nil {
			return err
		}
	}
	var word uint64
	if err := c.to.Keys.Lookup(&e.Request, &word); !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
		if err != nil {
			return fmt.Errorf("look for a flow: %w", err)
		}
		return nil
	}
	id := c.to.take(c.own)
	for range lbmap.RoomAttempts {
		if id != 0 {
			break
		}
		if err := c.makeRoom(0, false); err != nil {
			return err
		}
		id = c.to.take(c.own)
	}
	if id == 0 {
		c.Lost++
		return nil
	}
	own := &c.own[id]
	generation := max(1, uint32(own.Life>>32)+1)
	made, err := c.write(id, generation, &e, lbmap.FlowStage(life) == lbmap.FlowKept)
	if made {
		c.copies[from] = flowCopy{uint32(life >> 32), uint64(generation)<<32 | uint64(id)}
	}
	return err
}

// write creates a flow with a free id.
func (c *Copier) write(id, generation uint32, e *lbmap.Flow, kept bool) (made bool, err error) {
	own := &c.own[id]
	atomic.StoreUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowClaimed))
	own.Seen, own.Flags, own.Request, own.Reply = e.Seen, e.Flags&^lbmap.FlowIndexed, e.Request, e.Reply
	own.Service, own.Backend, own.BackendGeneration = e.Service, e.Backend, e.BackendGeneration
	own.Packets, own.Bytes = e.Packets, e.Bytes
	atomic.StoreUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowNew))

	word := uint64(generation)<<32 | uint64(id)
	err = c.to.Keys.Update(&e.Reply, &word, ciliumebpf.UpdateNoExist)
	if err == nil {
		if err = c.to.Keys.Update(&e.Request, &word, ciliumebpf.UpdateNoExist); err != nil {
			err = errors.Join(err, c.to.deleteKeys([]lbmap.FlowKey{e.Reply}))
		}
	}
	if err != nil {
		atomic.StoreUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowFree))
		c.to.give(id, own)
		// A packet was faster, or another flow has the port.
		if errors.Is(err, ciliumebpf.ErrKeyExist) || errors.Is(err, unix.E2BIG) {
			c.Lost++
			return false, nil
		}
		return false, fmt.Errorf("write the keys of a flow: %w", err)
	}
	c.Copied++
	atomic.OrUint32(&own.Flags, lbmap.FlowIndexed)
	if kept && c.keep(own) {
		atomic.StoreUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowKept))
		return true, nil
	}
	atomic.StoreUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowYoung))
	return true, c.makeRoom(word, e.Flags&lbmap.FlowClosed != 0)
}

// update merges flags of the flow into its copy, as flow_account() of bpf/flow.h does.
func (c *Copier) update(word uint64, flags uint32) error {
	own, generation := &c.own[uint32(word)], uint32(word>>32)
	if uint32(atomic.LoadUint64(&own.Life)>>32) != generation {
		return nil
	}
	const fins = lbmap.FlowFINRequest | lbmap.FlowFINReply
	had := atomic.OrUint32(&own.Flags, flags)
	all := had | flags
	if all&fins == fins {
		all |= lbmap.FlowClosed
		atomic.OrUint32(&own.Flags, lbmap.FlowClosed)
	}
	young, kept := lbmap.FlowLife(generation, lbmap.FlowYoung), lbmap.FlowLife(generation, lbmap.FlowKept)
	switch fresh := all &^ had; {
	case fresh&lbmap.FlowClosed != 0 && atomic.CompareAndSwapUint64(&own.Life, kept, young):
		c.unkeep(own)
		return c.makeRoom(word, true)
	case all&lbmap.FlowClosed == 0 && fresh&lbmap.FlowEstablished != 0 && c.keep(own):
		if !atomic.CompareAndSwapUint64(&own.Life, young, kept) {
			c.unkeep(own)
		}
	}
	return nil
}

// end ends a copy, unless it is over already.
func (c *Copier) end(word uint64) error {
	own, generation := &c.own[uint32(word)], uint32(word>>32)
	claimed := lbmap.FlowLife(generation, lbmap.FlowClaimed)
	if atomic.CompareAndSwapUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowKept), claimed) {
		c.unkeep(own)
	} else if !atomic.CompareAndSwapUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowYoung), claimed) {
		return nil
	}
	return c.reclaim(uint32(word), generation)
}

// reclaim gives back the id of a flow that was claimed.
func (c *Copier) reclaim(id, generation uint32) error {
	own := &c.own[id]
	err := c.to.deleteKeys([]lbmap.FlowKey{own.Request, own.Reply})
	atomic.StoreUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowFree))
	c.to.give(id, own)
	return err
}

// keep counts one more established flow; false if there are too many.
func (c *Copier) keep(own *lbmap.Flow) bool {
	counter, most := c.kept(own)
	if atomic.AddUint64(counter, 1) <= most {
		return true
	}
	c.unkeep(own)
	return false
}

func (c *Copier) unkeep(own *lbmap.Flow) {
	counter, _ := c.kept(own)
	atomic.AddUint64(counter, ^uint64(0))
}

// kept is the counter of established flows of a flow's protocol, and their limit.
func (c *Copier) kept(own *lbmap.Flow) (counter *uint64, most uint64) {
	if proxier.Protocol(own.Request.Proto) == proxier.TCP {
		return &c.to.counts[lbmap.FlowKeptTCP].Value, c.mostKept[0]
	}
	return &c.to.counts[lbmap.FlowKeptUDP].Value, c.mostKept[1]
}

// makeRoom inserts a young flow into the ring, as flow_make_room() of bpf/flow.h does. That
// evicts the flow in its slot.
func (c *Copier) makeRoom(word uint64, over bool) error {
	young := uint64(len(c.ownRing) - lbmap.MaxClosed)
	var place *uint64
	if over {
		place = &c.ownRing[young+(atomic.AddUint64(&c.to.counts[lbmap.FlowOver].Value, 1)-1)&(lbmap.MaxClosed-1)]
	} else {
		place = &c.ownRing[(atomic.AddUint64(&c.to.counts[lbmap.FlowBorn].Value, 1)-1)&(young-1)]
	}
	before := atomic.SwapUint64(place, word)
	id, generation := uint32(before), uint32(before>>32)
	if id == 0 || int(id) >= len(c.own) {
		return nil
	}
	own := &c.own[id]
	if !atomic.CompareAndSwapUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowYoung), lbmap.FlowLife(generation, lbmap.FlowClaimed)) {
		return nil
	}
	c.Lost++
	return c.reclaim(id, generation)
}
