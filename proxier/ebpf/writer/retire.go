// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// retire removes deleted service ports: frontends first, then what they refer to. An address that
// another service port is about to get stays until it is overwritten, so that it is always there.
func (w *Writer) retire(todo []uint32) error {
	if len(w.gone) == 0 {
		return nil
	}
	wanted := w.wantedOf(w.gone, todo)
	keys := make([]lbmap.FrontendKey, 0, len(w.gone))
	for i := range w.gone {
		for _, f := range w.gone[i].frontends {
			if _, ok := wanted[f.Key]; !ok {
				keys = append(keys, f.Key)
			}
		}
	}
	// While a frontend cannot be deleted, nothing it leads to may be given to
	// another service port.
	if err := w.delete(keys); err != nil {
		return err
	}
	if wanted == nil {
		w.removeRangesOf(w.gone)
	}
	var errs []error
	waiting := w.gone[:0]
	for i := range w.gone {
		p := &w.gone[i]
		if wanted != nil {
			p.frontends = slices.DeleteFunc(slices.Clone(p.frontends), func(f lbmap.FrontendEntry) bool {
				_, ok := wanted[f.Key]
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

// wantedOf returns those addresses of removed ports that other service ports are about to get, or nil
// if there are none.
func (w *Writer) wantedOf(leaving []port, todo []uint32) map[lbmap.FrontendKey]struct{} {
	if len(todo) == 0 {
		return nil
	}
	keys := map[lbmap.FrontendKey]struct{}{}
	for i := range leaving {
		for _, f := range leaving[i].frontends {
			keys[f.Key] = struct{}{}
		}
	}
	var wanted map[lbmap.FrontendKey]struct{}
	for _, index := range todo {
		d := w.ports.Get(index).Desired()
		for i := range d.Frontends {
			if f := &d.Frontends[i]; !served(f) {
				continue
			}
			key := lbmap.KeyOf(d, i)
			if _, leaving := keys[key]; leaving {
				if wanted == nil {
					wanted = map[lbmap.FrontendKey]struct{}{}
				}
				wanted[key] = struct{}{}
			}
		}
	}
	return wanted
}

// deleteOrphans deletes the addresses that service ports lost in this sync, except those that were
// overwritten for another one. If that write failed, the address and all that it refers to stay until
// the next try.
func (w *Writer) deleteOrphans(todo []uint32) error {
	if len(w.gone) == 0 && len(w.orphans) == 0 {
		return nil
	}
	waits := map[lbmap.FrontendKey]bool{} // lost addresses: whether they have to wait
	for _, key := range w.orphans {
		waits[key] = false
	}
	for i := range w.gone {
		for _, f := range w.gone[i].frontends {
			waits[f.Key] = false
		}
	}
	for _, index := range todo {
		item := w.ports.Get(index)
		for _, f := range item.Applied.frontends {
			if _, lost := waits[f.Key]; !lost {
				continue
			}
			if item.Unsure() {
				waits[f.Key] = true
			} else {
				delete(waits, f.Key)
				w.usedFrontends-- // counted for both owners until now
			}
		}
	}
	overwritten := func(key lbmap.FrontendKey) bool { _, lost := waits[key]; return !lost }
	w.orphans = slices.DeleteFunc(w.orphans, overwritten)
	for i := range w.gone {
		p := &w.gone[i]
		p.frontends = slices.DeleteFunc(p.frontends, func(f lbmap.FrontendEntry) bool { return overwritten(f.Key) })
	}
	var keys []lbmap.FrontendKey
	for key, wait := range waits {
		if !wait {
			keys = append(keys, key)
		}
	}
	if err := w.delete(keys); err != nil {
		return err
	}
	deleted := func(key lbmap.FrontendKey) bool { return !waits[key] }
	w.orphans = slices.DeleteFunc(w.orphans, deleted)
	var errs []error
	left := w.gone[:0]
	for i := range w.gone {
		p := &w.gone[i]
		p.frontends = slices.DeleteFunc(p.frontends, func(f lbmap.FrontendEntry) bool { return deleted(f.Key) })
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

func (w *Writer) delete(keys []lbmap.FrontendKey) error {
	if len(keys) == 0 {
		return nil
	}
	if err := w.tables.Frontends.Delete(keys); err != nil {
		return fmt.Errorf("delete %d frontends: %w", len(keys), err)
	}
	w.writes += uint64(len(keys))
	w.usedFrontends -= len(keys)
	w.room = true
	return nil
}

// remove releases everything of a service port that has no frontend left.
func (w *Writer) remove(p *port) error {
	// Otherwise, the next service port with this id would inherit them.
	if err := errors.Join(w.removeRanges(p, nil), w.forget(p.id)); err != nil {
		return err
	}
	for s := range proxier.Sets {
		w.publish(p.id, s, lbmap.UnusedSet)
	}
	for _, id := range p.backends {
		w.freeBackend(id)
	}
	w.tables.ServiceStats[p.id] = lbmap.ServiceStats{}
	w.tables.Services[p.id] = lbmap.Service{}
	w.writes += 2
	w.services.release(p.id)
	w.room = true
	return nil
}

// freeBackend removes a backend. A program that has read its slot sees another generation, and
// reads the set again.
func (w *Writer) freeBackend(id uint32) {
	e := &w.tables.Backends[id]
	if proxier.Protocol(e.Proto) == proxier.UDP {
		w.stale = true
	}
	generation := e.Generation + 1
	if generation == 0 {
		generation = 1
	}
	atomic.StoreUint32(&e.Generation, generation)
	e.Service, e.Members = 0, 0
	w.tables.BackendStats[id] = 0
	w.writes++
	w.backends.release(id)
	w.room = true
}

// withdrawBackends takes removed backends out of the sets of a port whose new sets do not fit.
// Backends that remain get their slots.
func (w *Writer) withdrawBackends(d *proxier.Decision, p *port) {
	ids, _, removed := w.matchBackends(d, p)
	used := d.Uses()
	stay := make([]uint8, len(ids)) // sets in which a backend stays
	for s := range proxier.Sets {
		word := w.tables.Sets[p.id*lbmap.SetsPerService+uint32(s)]
		base, size := lbmap.SplitSetWord(word)
		if size == 0 {
			continue
		}
		var remain []uint32
		for i := range d.Backends {
			b := &d.Backends[i]
			// Addresses may still lead to a set that is to be used no more.
			eligible := inSet(b, s) || !used[s] && b.Members != 0 && b.Addr.Addr().Is4() == (s.Family() == proxier.IPv4)
			if ids[i] != 0 && eligible && w.tables.Backends[ids[i]].Members&setBit(s) != 0 {
				remain, stay[i] = append(remain, ids[i]), stay[i]|setBit(s)
			}
		}
		if len(remain) == 0 {
			w.publish(p.id, s, lbmap.EmptySet(d.Empty[s]))
			continue
		}
		stays := make(map[uint32]bool, len(remain))
		for _, id := range remain {
			stays[id] = true
		}
		next := 0
		for i := range size {
			at := &w.tables.Slots[base+uint32(i)]
			if stays[lbmap.SlotBackend(*at)] {
				continue
			}
			id := remain[next%len(remain)]
			next++
			atomic.StoreUint32(at, lbmap.SlotWord(id, w.tables.Backends[id].Generation))
			w.writes++
		}
	}
	kept := make([]uint32, 0, len(p.backends))
	for i, id := range ids {
		if id == 0 {
			continue
		}
		kept = append(kept, id)
		if e := &w.tables.Backends[id]; e.Members != stay[i] {
			e.Members = stay[i]
			w.writes++
		}
	}
	for _, id := range removed {
		w.freeBackend(id)
	}
	p.backends = kept
}
