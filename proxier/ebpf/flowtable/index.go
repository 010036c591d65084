// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Index is the memory of all entries. They are used as programs use them, and meanwhile.
type Index struct {
	entries
	filter filter
	seed   uint64
	homes  uint32
	memory [][]byte
}

// OpenIndex maps the entries in these maps, which stay the caller's.
func OpenIndex(maps lbmap.Maps) (*Index, error) {
	m := maps["tdm_flow_entry"]
	x := &Index{homes: Homes(m)}
	var seed lbmap.FlowCounter
	if err := maps["tdm_flow_count"].Lookup(uint32(lbmap.FlowSeed), &seed); err != nil {
		return nil, fmt.Errorf("read the seed of the flows' keys: %w", err)
	}
	x.seed = seed.Value
	var bits []uint64
	if err := errors.Join(mapTo(&x.memory, &x.list, m), mapTo(&x.memory, &bits, maps["tdm_flow_filter"])); err != nil {
		x.Close()
		return nil, err
	}
	x.filter = bits
	return x, nil
}

// Close unmaps the memory.
func (x *Index) Close() {
	unmap(&x.memory)
	*x = Index{}
}

// Find returns the live entry of a key, or nil. It may be reused at any time.
func (x *Index) Find(key *lbmap.FlowKey) *lbmap.FlowEntry {
	at := home(key, x.seed, x.homes)
	if !x.filter.has(at) {
		return nil
	}
	return x.find(key, at, lbmap.EntryLive)
}

func (x *Index) find(key *lbmap.FlowKey, home uint32, state int) *lbmap.FlowEntry {
	near := atomic.LoadUint32(&x.list[home].Near)
	for i := uint32(0); near>>i != 0; i++ {
		if near>>i&1 == 0 {
			continue
		}
		e := x.at(home + i)
		if entryState(atomic.LoadUint64(&e.Word)) >= state && e.Key == *key {
			return e
		}
	}
	return nil
}

var (
	errKeyInUse = errors.New("the key leads to another flow")
	errNoPlace  = errors.New("no free place near the home of the key")
)

// enter inserts the entry of one direction of a flow, as flow_enter() of bpf/flow_index.h does. It
// gives way to any program.
func (x *Index) enter(f *lbmap.Flow, id, generation uint32, way int, of progress) error {
	key, other, reply := &f.Request, &f.Reply, uint64(0)
	if way == 1 {
		key, other, reply = &f.Reply, &f.Request, lbmap.EntryReply
	}
	home := home(key, x.seed, x.homes)
	if x.find(key, home, lbmap.EntryNew) != nil {
		return errKeyInUse
	}
	place, word, ok := x.claim(home)
	if !ok {
		return errNoPlace
	}
	e := x.at(place)
	e.Key, e.Id, e.Generation, e.Distance, e.Seen = *key, id, generation, uint8(place-home), f.Seen
	e.Src, e.Dst, e.Sport, e.Dport = other.Dst, other.Src, other.Dport, other.Sport
	e.Action, e.Ingress = f.Action, f.Ingress
	e.Packets, e.Bytes, e.Acked = of.Packets, of.Bytes, of.acked
	f.Place[way] = place
	word |= uint64(uint32(f.Flags))<<8 | reply
	atomic.StoreUint64(&e.Word, word|lbmap.EntryNew)
	bit := uint32(1) << (place - home)
	atomic.OrUint32(&x.at(home).Near, bit)
	x.filter.set(home)
	for near, i := atomic.LoadUint32(&x.at(home).Near)&^bit, uint32(0); near>>i != 0; i++ {
		if rival := x.at(home + min(i, lbmap.FlowNear-1)); near>>i&1 == 1 && entryState(atomic.LoadUint64(&rival.Word)) >= lbmap.EntryNew && rival.Key == *key {
			release(x.entries, x.filter, place)
			return errKeyInUse
		}
	}
	atomic.StoreUint64(&e.Word, word|lbmap.EntryLive)
	return nil
}

// claim claims a free place near a home, and returns the word to which state and flags are added.
func (x *Index) claim(home uint32) (place uint32, word uint64, ok bool) {
	for place = home; place < home+lbmap.FlowNear; place++ {
		e := x.at(place)
		old := atomic.LoadUint64(&e.Word)
		word = (old>>32 + 1) << 32
		if entryState(old) == lbmap.EntryFree && atomic.CompareAndSwapUint64(&e.Word, old, word|lbmap.EntryClaimed) {
			return place, word, true
		}
	}
	return 0, 0, false
}

// mark shows the flags of a flow in its entries, as entry_mark() of bpf/flow_track.h does.
func (x *Index) mark(f *lbmap.Flow, id uint32) {
	flags := atomic.LoadUint64(&f.Flags)
	for _, u := range usesOf(id, f) {
		for e := x.at(u.place); ; {
			word := atomic.LoadUint64(&e.Word)
			if entryState(word) != lbmap.EntryLive || e.Id != id || e.Generation != u.generation {
				break
			}
			if atomic.CompareAndSwapUint64(&e.Word, word, word>>32<<32|uint64(uint32(flags))<<8&0xffffffff|word&0xff) {
				break
			}
		}
	}
}
