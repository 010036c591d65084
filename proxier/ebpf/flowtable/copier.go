// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"errors"
	"sync/atomic"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Copier copies flows from one set of maps to another of other sizes, or of the present layout.
// Programs may use both meanwhile, so the copier writes as programs do.
type Copier struct {
	from earlier
	to   *Table
	// Records, entries and ring of to, mapped until Close.
	own    []lbmap.Flow
	index  *Index
	ring   []uint64
	mapped [][]byte
	copies []flowCopy // by the id of the flow
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

// NewCopier returns nil if both are the same maps, or if the layout of the earlier ones is not
// known. The maps may be closed afterwards.
func NewCopier(from, to lbmap.Maps) (c *Copier, err error) {
	if from["tdm_flow"] == nil {
		return nil, nil
	}
	same, err := lbmap.SameMap(from["tdm_flow"], to["tdm_flow"])
	if same || err != nil {
		return nil, err
	}
	source, err := openEarlier(from)
	if source == nil || err != nil {
		return nil, err
	}
	c = &Copier{from: source, copies: make([]flowCopy, source.count())}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	if c.to, err = OpenClone(to); err != nil {
		return c, err
	}
	if c.index, err = OpenIndex(to); err != nil {
		return c, err
	}
	return c, errors.Join(mapTo(&c.mapped, &c.own, to["tdm_flow"]), mapTo(&c.mapped, &c.ring, to["tdm_flow_young"]))
}

// Close unmaps the memory of both tables.
func (c *Copier) Close() {
	unmap(&c.mapped)
	c.own, c.ring = nil, nil
	if c.index != nil {
		c.index.Close()
	}
	if c.to != nil {
		c.to.Release()
	}
	c.from.close()
}

// CopyAll copies every flow.
func (c *Copier) CopyAll() error {
	born := c.from.born()
	c.born = [2]uint64{born, born}
	for id := range c.copies {
		if err := c.copy(uint32(id)); err != nil {
			return err
		}
	}
	return nil
}

// CopyNew copies the flows created since the last copy. It takes time for those only.
func (c *Copier) CopyNew() error {
	since, now := c.born[0], c.from.born()
	c.born = [2]uint64{c.born[1], now}
	ring := c.from.ring()
	places := uint64(len(ring) - lbmap.MaxClosed)
	for i := since; i < now; i++ {
		word := atomic.LoadUint64(&ring[i&(places-1)])
		id := uint32(word)
		if id == 0 || int(id) >= len(c.copies) {
			continue
		}
		if c.from.life(id)>>32 != word>>32 {
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
	for i, at := range c.copies {
		if at.word == 0 {
			continue
		}
		id := uint32(i)
		life := c.from.life(id)
		if uint32(life>>32) == at.generation && lbmap.FlowStage(life) >= lbmap.FlowYoung {
			if err := c.update(at.word, c.from.flags(id)&^lbmap.FlowIndexed); err != nil {
				return err
			}
			continue
		}
		// Its client may have opened a new connection there.
		request := c.own[uint32(at.word)].Request
		if err := c.end(at.word); err != nil {
			return err
		}
		another, ok, err := c.from.find(&request)
		if err != nil {
			return err
		}
		if ok && int(another) < len(c.copies) {
			if err := c.copy(another); err != nil {
				return err
			}
		}
	}
	return nil
}

// copy copies a flow that is not there yet.
func (c *Copier) copy(from uint32) error {
	life := c.from.life(from)
	e, of := c.from.read(from)
	if lbmap.FlowStage(life) < lbmap.FlowYoung || e.Flags&lbmap.FlowIndexed == 0 || c.from.life(from) != life {
		return nil
	}
	if at := c.copies[from]; at.word != 0 && at.generation != uint32(life>>32) {
		c.copies[from] = flowCopy{}
		if err := c.end(at.word); err != nil {
			return err
		}
	}
	if c.index.Find(&e.Request) != nil {
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
	made, err := c.write(id, generation, &e, of, lbmap.FlowStage(life) == lbmap.FlowKept)
	if made {
		c.copies[from] = flowCopy{uint32(life >> 32), uint64(generation)<<32 | uint64(id)}
	}
	return err
}

// write creates a flow with a free id.
func (c *Copier) write(id, generation uint32, e *lbmap.Flow, of [2]progress, kept bool) (made bool, err error) {
	own := &c.own[id]
	atomic.StoreUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowClaimed))
	own.Created, own.Seen, own.Request, own.Reply = e.Created, e.Seen, e.Request, e.Reply
	own.Service, own.Backend, own.BackendGeneration = e.Service, e.Backend, e.BackendGeneration
	own.Action, own.Ingress = e.Action, e.Ingress
	atomic.StoreUint64(&own.Flags, uint64(generation)<<32|uint64(uint32(e.Flags)&^lbmap.FlowIndexed))
	atomic.StoreUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowNew))

	word := uint64(generation)<<32 | uint64(id)
	if err = c.index.enter(own, id, generation, 1, of[1]); err == nil {
		if err = c.index.enter(own, id, generation, 0, of[0]); err != nil {
			remove(c.index.entries, c.index.filter, own.Place[1], id, generation)
		}
	}
	if err != nil { // a packet was faster, another flow has the port, or there is no room
		atomic.StoreUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowFree))
		c.to.give(id, own)
		c.Lost++
		return false, nil
	}
	c.Copied++
	atomic.OrUint64(&own.Flags, lbmap.FlowIndexed)
	if kept {
		atomic.AddUint64(c.kept(own), 1)
		atomic.StoreUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowKept))
		return true, nil
	}
	atomic.StoreUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowYoung))
	return true, c.makeRoom(word, e.Flags&lbmap.FlowClosed != 0)
}

// update merges flags of the flow into its copy, as flow_mark() of bpf/flow_track.h does.
func (c *Copier) update(word uint64, flags uint32) error {
	own, generation := &c.own[uint32(word)], uint32(word>>32)
	const fins = lbmap.FlowFINRequest | lbmap.FlowFINReply
	var had, all uint32
	for {
		before := atomic.LoadUint64(&own.Flags)
		if uint32(before>>32) != generation {
			return nil
		}
		had = uint32(before)
		all = had | flags
		if all&fins == fins {
			all |= lbmap.FlowClosed
		}
		if atomic.CompareAndSwapUint64(&own.Flags, before, uint64(generation)<<32|uint64(all)) {
			break
		}
	}
	c.index.mark(own, uint32(word))
	young, kept := lbmap.FlowLife(generation, lbmap.FlowYoung), lbmap.FlowLife(generation, lbmap.FlowKept)
	switch fresh := all &^ had; {
	case fresh&lbmap.FlowClosed != 0 && atomic.CompareAndSwapUint64(&own.Life, kept, young):
		atomic.AddUint64(c.kept(own), ^uint64(0))
		return c.makeRoom(word, true)
	case all&lbmap.FlowClosed == 0 && fresh&lbmap.FlowEstablished != 0 && atomic.CompareAndSwapUint64(&own.Life, young, kept):
		atomic.AddUint64(c.kept(own), 1)
	}
	return nil
}

// end ends a copy, unless it is over already.
func (c *Copier) end(word uint64) error {
	own, generation := &c.own[uint32(word)], uint32(word>>32)
	claimed := lbmap.FlowLife(generation, lbmap.FlowClaimed)
	if atomic.CompareAndSwapUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowKept), claimed) {
		atomic.AddUint64(c.kept(own), ^uint64(0))
	} else if !atomic.CompareAndSwapUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowYoung), claimed) {
		return nil
	}
	return c.reclaim(uint32(word), generation)
}

// reclaim gives back the id of a flow that was claimed.
func (c *Copier) reclaim(id, generation uint32) error {
	own := &c.own[id]
	for _, u := range usesOf(id, own) {
		remove(c.index.entries, c.index.filter, u.place, id, generation)
	}
	atomic.StoreUint64(&own.Life, lbmap.FlowLife(generation, lbmap.FlowFree))
	c.to.give(id, own)
	return nil
}

// kept is the counter of established flows of a flow's protocol.
func (c *Copier) kept(own *lbmap.Flow) *uint64 {
	if proxier.Protocol(own.Request.Proto) == proxier.TCP {
		return &c.to.counts[lbmap.FlowKeptTCP].Value
	}
	return &c.to.counts[lbmap.FlowKeptUDP].Value
}

// makeRoom inserts a young flow into the ring, as flow_make_room() of bpf/flow_life.h does. That
// evicts the flow in its slot.
func (c *Copier) makeRoom(word uint64, over bool) error {
	young := uint64(len(c.ring) - lbmap.MaxClosed)
	var place *uint64
	if over {
		place = &c.ring[young+(atomic.AddUint64(&c.to.counts[lbmap.FlowOver].Value, 1)-1)&(lbmap.MaxClosed-1)]
	} else {
		place = &c.ring[(atomic.AddUint64(&c.to.counts[lbmap.FlowBorn].Value, 1)-1)&(young-1)]
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
