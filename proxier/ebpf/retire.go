// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/tandem-proxy/tandem/proxier"
)

// retire removes what is gone: frontends first, then what they led to. An
// address that another service port is about to take over stays until it is
// overwritten, so that there is no moment without it.
func (w *writer) retire(todo []uint32) error {
	if len(w.gone) == 0 {
		return nil
	}
	wanted := w.wantedOf(w.gone, todo)
	keys := make([]frontendKey, 0, len(w.gone))
	for i := range w.gone {
		for _, f := range w.gone[i].frontends {
			if _, ok := wanted[f.key]; !ok {
				keys = append(keys, f.key)
			}
		}
	}
	// While a frontend cannot be deleted, nothing it leads to may be given to
	// anybody else.
	if err := w.delete(keys); err != nil {
		return err
	}
	var errs []error
	waiting := w.gone[:0]
	for i := range w.gone {
		p := &w.gone[i]
		if wanted != nil {
			p.frontends = slices.DeleteFunc(slices.Clone(p.frontends), func(f frontendEntry) bool {
				_, ok := wanted[f.key]
				return !ok
			})
			if len(p.frontends) > 0 {
				waiting = append(waiting, *p)
				continue
			}
		}
		if err := w.remove(p); err != nil {
			errs = append(errs, err)
			waiting = append(waiting, *p)
		}
	}
	w.gone = waiting
	return errors.Join(errs...)
}

// wantedOf returns those addresses of leaving ports that others want; nil for
// none.
func (w *writer) wantedOf(leaving []port, todo []uint32) map[frontendKey]struct{} {
	if len(todo) == 0 {
		return nil
	}
	keys := map[frontendKey]struct{}{}
	for i := range leaving {
		for _, f := range leaving[i].frontends {
			keys[f.key] = struct{}{}
		}
	}
	var wanted map[frontendKey]struct{}
	for _, index := range todo {
		d := w.ports[index].want
		for i := range d.Frontends {
			if f := &d.Frontends[i]; !served(f) {
				continue
			}
			key := keyOf(d, i)
			if _, leaving := keys[key]; leaving {
				if wanted == nil {
					wanted = map[frontendKey]struct{}{}
				}
				wanted[key] = struct{}{}
			}
		}
	}
	return wanted
}

// settle deletes the addresses that service ports lost in this sync, but for
// those that were overwritten because another one has them now. Where writing
// them failed, they wait with all they lead to for the next try.
func (w *writer) settle(todo []uint32) error {
	if len(w.gone) == 0 && len(w.orphans) == 0 {
		return nil
	}
	waits := map[frontendKey]bool{} // lost addresses: whether they have to wait
	for _, key := range w.orphans {
		waits[key] = false
	}
	for i := range w.gone {
		for _, f := range w.gone[i].frontends {
			waits[f.key] = false
		}
	}
	for _, index := range todo {
		for _, f := range w.ports[index].frontends {
			if _, lost := waits[f.key]; !lost {
				continue
			}
			if _, failed := w.retry[index]; failed {
				waits[f.key] = true
			} else {
				delete(waits, f.key)
				w.usedFrontends-- // counted for both owners until now
			}
		}
	}
	overwritten := func(key frontendKey) bool { _, lost := waits[key]; return !lost }
	w.orphans = slices.DeleteFunc(w.orphans, overwritten)
	for i := range w.gone {
		p := &w.gone[i]
		p.frontends = slices.DeleteFunc(p.frontends, func(f frontendEntry) bool { return overwritten(f.key) })
	}
	var keys []frontendKey
	for key, wait := range waits {
		if !wait {
			keys = append(keys, key)
		}
	}
	if err := w.delete(keys); err != nil {
		return err
	}
	deleted := func(key frontendKey) bool { return !waits[key] }
	w.orphans = slices.DeleteFunc(w.orphans, deleted)
	var errs []error
	left := w.gone[:0]
	for i := range w.gone {
		p := &w.gone[i]
		p.frontends = slices.DeleteFunc(p.frontends, func(f frontendEntry) bool { return deleted(f.key) })
		if len(p.frontends) > 0 {
			left = append(left, *p)
			continue
		}
		if err := w.remove(p); err != nil {
			errs = append(errs, err)
			left = append(left, *p)
		}
	}
	w.gone = left
	return errors.Join(errs...)
}

func (w *writer) delete(keys []frontendKey) error {
	if len(keys) == 0 {
		return nil
	}
	if err := w.tables.frontends.Delete(keys); err != nil {
		return fmt.Errorf("delete %d frontends: %w", len(keys), err)
	}
	w.writes += uint64(len(keys))
	w.usedFrontends -= len(keys)
	w.room = true
	return nil
}

// remove gives back everything of a service port that has no frontend left.
func (w *writer) remove(p *port) error {
	// Or who gets the id next would let in whom this one did.
	if err := w.removeRanges(p, nil); err != nil {
		return err
	}
	for s := range proxier.Sets {
		w.publish(p.id, s, unusedSet)
	}
	for _, id := range p.backends {
		w.freeBackend(id)
	}
	w.tables.serviceStats[p.id] = serviceStats{}
	w.tables.services[p.id] = serviceEntry{}
	w.writes += 2
	w.services.release(p.id)
	w.room = true
	return nil
}

// freeBackend ends a backend. A program that read its slot before sees another
// generation and reads the set again.
func (w *writer) freeBackend(id uint32) {
	e := &w.tables.backends[id]
	if proxier.Protocol(e.Proto) == proxier.UDP {
		w.stale = true
	}
	generation := e.Generation + 1
	if generation == 0 {
		generation = 1
	}
	atomic.StoreUint32(&e.Generation, generation)
	e.Service, e.Members = 0, 0
	w.tables.backendStats[id] = 0
	w.writes++
	w.backends.release(id)
	w.room = true
}

// retreat takes removed backends out of the sets of a port whose new sets do
// not fit: their places go to backends that remain.
func (w *writer) retreat(p *port) {
	ids, _, removed := w.matchBackends(p)
	d := p.want
	used := d.Uses()
	for s := range proxier.Sets {
		word := w.tables.sets[p.id*SetsPerService+uint32(s)]
		base, size := splitSetWord(word)
		if size == 0 {
			continue
		}
		var remain []uint32
		for i := range d.Backends {
			b := &d.Backends[i]
			// Addresses may still lead to a set that is to be used no more.
			eligible := inSet(b, s) || !used[s] && b.Members != 0 && b.Addr.Addr().Is4() == (s.Family() == proxier.IPv4)
			if ids[i] != 0 && eligible && w.tables.backends[ids[i]].Members&setBit(s) != 0 {
				remain = append(remain, ids[i])
			}
		}
		if len(remain) == 0 {
			w.publish(p.id, s, emptySet(d.Empty[s]))
			continue
		}
		stays := make(map[uint32]bool, len(remain))
		for _, id := range remain {
			stays[id] = true
		}
		next := 0
		for i := range size {
			at := &w.tables.slots[base+uint32(i)]
			if stays[uint32(*at)] {
				continue
			}
			id := remain[next%len(remain)]
			next++
			atomic.StoreUint64(at, slotWord(id, w.tables.backends[id].Generation))
			w.writes++
		}
	}
	kept := make([]uint32, 0, len(p.backends))
	for i, id := range ids {
		if id == 0 {
			continue
		}
		kept = append(kept, id)
		if e, members := &w.tables.backends[id], membersOf(&d.Backends[i]); e.Members&^members != 0 {
			e.Members &= members
			w.writes++
		}
	}
	for _, id := range removed {
		w.freeBackend(id)
	}
	p.backends = kept
}
