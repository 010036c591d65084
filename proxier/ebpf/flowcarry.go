// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"sync/atomic"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

// carrier copies flows out of the maps of programs that are about to be replaced,
// and that have other sizes than ours. Both may be in use meanwhile: ours is
// written as programs write it.
type carrier struct {
	from, to *flowTable
	// Their memory, all of it, for as long as it takes.
	old, own         []flowEntry
	oldRing, ownRing []uint64
	mapped           [][]byte
	copies           []copied  // by the id of the flow
	mostKept         [2]uint64 // of TCP, and of anything else
	// born is how many flows from had had when it was looked at for the last
	// time, and the time before: what was just being born is looked at twice.
	born          [2]uint64
	carried, lost int
}

// copied is what became of a flow.
type copied struct {
	generation uint32 // of the flow
	word       uint64 // id and generation of its copy; 0 for none
}

// newCarrier returns nil if both are the same maps, or not of one kind. It needs
// the maps only now.
func newCarrier(from, to Maps, sizes *Sizes) (c *carrier, err error) {
	for _, name := range flowMapNames {
		f := from[name]
		if f == nil || f.KeySize() != to[name].KeySize() || f.ValueSize() != to[name].ValueSize() {
			return nil, nil
		}
	}
	same, err := sameMap(from["tdm_flow"], to["tdm_flow"])
	if same || err != nil {
		return nil, err
	}
	c = &carrier{mostKept: [2]uint64{uint64(sizes.TCPFlows), uint64(sizes.UDPFlows)}}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	if c.from, err = cloneFlowTable(from); err != nil {
		return c, err
	}
	if c.to, err = cloneFlowTable(to); err != nil {
		return c, err
	}
	c.copies = make([]copied, from["tdm_flow"].MaxEntries())
	err = errors.Join(
		mapTo(c, &c.old, from["tdm_flow"]), mapTo(c, &c.own, to["tdm_flow"]),
		mapTo(c, &c.oldRing, from["tdm_flow_young"]), mapTo(c, &c.ownRing, to["tdm_flow_young"]))
	return c, err
}

// mapTo maps the memory of a map for as long as the copies take.
func mapTo[T any](c *carrier, list *[]T, m *ciliumebpf.Map) error {
	mapped, memory, err := mapping[T](m)
	if err != nil {
		return err
	}
	*list, c.mapped = mapped, append(c.mapped, memory)
	return nil
}

// cloneFlowTable opens a table that lives on when these maps are closed.
func cloneFlowTable(maps Maps) (*flowTable, error) {
	t, err := openFlowTable(maps)
	if err != nil {
		return nil, err
	}
	t.flows, err = t.flows.Clone()
	keys, keysErr := t.keys.Clone()
	t.keys = keys
	if err = errors.Join(err, keysErr); err != nil {
		t.release()
		return nil, fmt.Errorf("open the maps of flows again: %w", err)
	}
	return t, nil
}

// release closes what cloneFlowTable opened.
func (t *flowTable) release() {
	t.flows.Close()
	t.keys.Close()
	t.unmap()
}

func (c *carrier) close() {
	for _, b := range c.mapped {
		_ = unix.Munmap(b) // fails only for what was never mapped
	}
	c.mapped, c.old, c.own, c.oldRing, c.ownRing = nil, nil, nil, nil, nil
	for _, t := range []*flowTable{c.from, c.to} {
		if t != nil {
			t.release()
		}
	}
}

// all copies every flow.
func (c *carrier) all() error {
	born := c.from.count(FlowBorn)
	c.born = [2]uint64{born, born}
	for id := range c.old {
		if err := c.copy(uint32(id)); err != nil {
			return err
		}
	}
	return nil
}

// fresh copies the flows that were born since the last look, and takes no longer
// than those need.
func (c *carrier) fresh() error {
	since, now := c.born[0], c.from.count(FlowBorn)
	c.born = [2]uint64{c.born[1], now}
	places := uint64(len(c.oldRing) - MaxClosed)
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

// settle has the copies know what their flows have come to since they were copied, now
// that no program uses those any more: one that was closed there would be taken for
// established here, for a day.
func (c *carrier) settle() error {
	for id := range c.old {
		at := c.copies[id]
		if at.word == 0 {
			continue
		}
		old := &c.old[id]
		life := atomic.LoadUint64(&old.Life)
		if uint32(life>>32) == at.generation && stageOf(life) >= FlowYoung {
			if err := c.learn(at.word, atomic.LoadUint32(&old.Flags)&^(FlowIndexed|FlowIngress|FlowRemote)); err != nil {
				return err
			}
			continue
		}
		// Its client may have begun anew there.
		request := c.own[uint32(at.word)].Request
		if err := c.end(at.word); err != nil {
			return err
		}
		var word uint64
		err := c.from.keys.Lookup(&request, &word)
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
func (c *carrier) copy(from uint32) error {
	old := &c.old[from]
	life := atomic.LoadUint64(&old.Life)
	e := *old
	if stageOf(life) < FlowYoung || e.Flags&FlowIndexed == 0 || atomic.LoadUint64(&old.Life) != life {
		return nil
	}
	if at := c.copies[from]; at.word != 0 && at.generation != uint32(life>>32) {
		c.copies[from] = copied{}
		if err := c.end(at.word); err != nil {
			return err
		}
	}
	var word uint64
	if err := c.to.keys.Lookup(&e.Request, &word); !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
		if err != nil {
			return fmt.Errorf("look for a flow: %w", err)
		}
		return nil
	}
	id := c.to.take(c.own)
	for range RoomAttempts {
		if id != 0 {
			break
		}
		if err := c.makeRoom(0, false); err != nil {
			return err
		}
		id = c.to.take(c.own)
	}
	if id == 0 {
		c.lost++
		return nil
	}
	own := &c.own[id]
	generation := max(1, uint32(own.Life>>32)+1)
	made, err := c.write(id, generation, &e, stageOf(life) == FlowKept)
	if made {
		c.copies[from] = copied{uint32(life >> 32), uint64(generation)<<32 | uint64(id)}
	}
	return err
}

// write makes a flow of a free id.
func (c *carrier) write(id, generation uint32, e *flowEntry, kept bool) (made bool, err error) {
	own := &c.own[id]
	atomic.StoreUint64(&own.Life, lifeOf(generation, FlowClaimed))
	own.Seen, own.Flags, own.Request, own.Reply = e.Seen, e.Flags&^FlowIndexed, e.Request, e.Reply
	own.Service, own.Backend, own.BackendGeneration = e.Service, e.Backend, e.BackendGeneration
	own.Packets, own.Bytes = e.Packets, e.Bytes
	atomic.StoreUint64(&own.Life, lifeOf(generation, FlowNew))

	word := uint64(generation)<<32 | uint64(id)
	err = c.to.keys.Update(&e.Reply, &word, ciliumebpf.UpdateNoExist)
	if err == nil {
		if err = c.to.keys.Update(&e.Request, &word, ciliumebpf.UpdateNoExist); err != nil {
			err = errors.Join(err, c.to.deleteKeys([]flowKey{e.Reply}))
		}
	}
	if err != nil {
		atomic.StoreUint64(&own.Life, lifeOf(generation, FlowFree))
		c.to.give(id, own)
		// A packet was faster, or somebody else has the port.
		if errors.Is(err, ciliumebpf.ErrKeyExist) || errors.Is(err, unix.E2BIG) {
			c.lost++
			return false, nil
		}
		return false, fmt.Errorf("write the keys of a flow: %w", err)
	}
	c.carried++
	atomic.OrUint32(&own.Flags, FlowIndexed)
	if kept && c.keep(own) {
		atomic.StoreUint64(&own.Life, lifeOf(generation, FlowKept))
		return true, nil
	}
	atomic.StoreUint64(&own.Life, lifeOf(generation, FlowYoung))
	return true, c.makeRoom(word, e.Flags&FlowClosed != 0)
}

// learn has a copy know what its flow saw, as flow_account() of bpf/flow.h does.
func (c *carrier) learn(word uint64, flags uint32) error {
	own, generation := &c.own[uint32(word)], uint32(word>>32)
	if uint32(atomic.LoadUint64(&own.Life)>>32) != generation {
		return nil
	}
	const fins = FlowFINRequest | FlowFINReply
	had := atomic.OrUint32(&own.Flags, flags)
	all := had | flags
	if all&fins == fins {
		all |= FlowClosed
		atomic.OrUint32(&own.Flags, FlowClosed)
	}
	young, kept := lifeOf(generation, FlowYoung), lifeOf(generation, FlowKept)
	switch fresh := all &^ had; {
	case fresh&FlowClosed != 0 && atomic.CompareAndSwapUint64(&own.Life, kept, young):
		c.unkeep(own)
		return c.makeRoom(word, true)
	case all&FlowClosed == 0 && fresh&FlowEstablished != 0 && c.keep(own):
		if !atomic.CompareAndSwapUint64(&own.Life, young, kept) {
			c.unkeep(own)
		}
	}
	return nil
}

// end ends a copy, unless it is over already.
func (c *carrier) end(word uint64) error {
	own, generation := &c.own[uint32(word)], uint32(word>>32)
	claimed := lifeOf(generation, FlowClaimed)
	if atomic.CompareAndSwapUint64(&own.Life, lifeOf(generation, FlowKept), claimed) {
		c.unkeep(own)
	} else if !atomic.CompareAndSwapUint64(&own.Life, lifeOf(generation, FlowYoung), claimed) {
		return nil
	}
	return c.bury(uint32(word), generation)
}

// bury gives back the id of a flow that was claimed.
func (c *carrier) bury(id, generation uint32) error {
	own := &c.own[id]
	err := c.to.deleteKeys([]flowKey{own.Request, own.Reply})
	atomic.StoreUint64(&own.Life, lifeOf(generation, FlowFree))
	c.to.give(id, own)
	return err
}

// keep says whether one more flow may be kept, and counts it.
func (c *carrier) keep(own *flowEntry) bool {
	counter, most := c.kept(own)
	if atomic.AddUint64(counter, 1) <= most {
		return true
	}
	c.unkeep(own)
	return false
}

func (c *carrier) unkeep(own *flowEntry) {
	counter, _ := c.kept(own)
	atomic.AddUint64(counter, ^uint64(0))
}

// kept is the counter of those that are kept of a flow's kind, and how many may be.
func (c *carrier) kept(own *flowEntry) (counter *uint64, most uint64) {
	if proxier.Protocol(own.Request.Proto) == proxier.TCP {
		return &c.to.counts[FlowKeptTCP].Value, c.mostKept[0]
	}
	return &c.to.counts[FlowKeptUDP].Value, c.mostKept[1]
}

// makeRoom gives a young flow a place in the ring, as flow_make_room() of
// bpf/flow.h does, and ends whoever had it.
func (c *carrier) makeRoom(word uint64, over bool) error {
	young := uint64(len(c.ownRing) - MaxClosed)
	var place *uint64
	if over {
		place = &c.ownRing[young+(atomic.AddUint64(&c.to.counts[FlowOver].Value, 1)-1)&(MaxClosed-1)]
	} else {
		place = &c.ownRing[(atomic.AddUint64(&c.to.counts[FlowBorn].Value, 1)-1)&(young-1)]
	}
	before := atomic.SwapUint64(place, word)
	id, generation := uint32(before), uint32(before>>32)
	if id == 0 || int(id) >= len(c.own) {
		return nil
	}
	own := &c.own[id]
	if !atomic.CompareAndSwapUint64(&own.Life, lifeOf(generation, FlowYoung), lifeOf(generation, FlowClaimed)) {
		return nil
	}
	c.lost++
	return c.bury(id, generation)
}
