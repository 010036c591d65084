// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// program computes what must be written for a service port, checks that it fits, and only then writes.
func (w *Writer) program(index uint32) error {
	item := w.ports.Get(index)
	d, p := item.Desired(), &item.Applied
	w.hasAffinity = w.hasAffinity || d.Affinity > 0

	if p.id == 0 {
		if !w.adopt(d, p) {
			id, ok := w.services.alloc()
			if !ok {
				return w.full("services", 1, lbmap.Usage{Used: w.services.used, Max: int(w.services.limit) - 1})
			}
			p.id = id
		}
	}
	if err := supports(d); err != nil {
		return err
	}

	frontends, fresh := w.frontendsOf(d, p)
	if max := w.tables.Frontends.MaxEntries(); fresh > 0 && w.usedFrontends+fresh > max {
		return w.full("frontends", fresh, lbmap.Usage{Used: w.usedFrontends, Max: max})
	}
	ranges := rangesOf(d, p.id)
	if fresh := w.freshRanges(p.ranges, ranges); fresh > 0 && w.usedRanges+fresh > w.tables.Ranges.MaxEntries() {
		return w.full("ranges", fresh, lbmap.Usage{Used: w.usedRanges, Max: w.tables.Ranges.MaxEntries()})
	}
	ids, missing, removed := w.matchBackends(d, p)
	if missing > w.backends.room() {
		return w.full("backends", missing, lbmap.Usage{Used: w.backends.used, Max: int(w.backends.limit) - 1})
	}
	var sets [proxier.Sets]setPlan
	for s := range proxier.Sets {
		plan, ok := w.planSet(p.id, s, d, ids)
		if !ok {
			for _, earlier := range sets[:s] {
				if !earlier.same && earlier.size > 0 {
					w.slots.release(earlier.extent)
				}
			}
			return w.full("slots", plan.size, lbmap.Usage{Used: w.slots.used, Max: int(w.slots.size)})
		}
		sets[s] = plan
	}

	// From here on only writing frontends and ranges can fail.
	w.describe(d, p, lbmap.ServiceProgrammed, 0)
	w.writeBackends(p.id, d, ids)
	used := d.Uses()
	for s := range proxier.Sets {
		plan := &sets[s]
		if plan.same || plan.size == 0 {
			continue
		}
		w.fill(plan, s, d, ids)
		w.tellDisruption(p.id, s, d, plan)
		w.publish(p.id, s, lbmap.SetWord(plan.extent.base, plan.size))
	}
	for s := range proxier.Sets {
		if used[s] && sets[s].size == 0 {
			w.publish(p.id, s, lbmap.EmptySet(d.Empty[s]))
		}
	}

	// Addresses that change their set are written before the earlier set is removed.
	// Until then the backends of both are kept.
	again := item.Unsure()
	switched := again || switches(p.frontends, frontends)
	if switched {
		p.backends = slices.SortedFunc(slices.Values(slices.Concat(ids, removed)), w.compareBackends)
	}
	if slices.ContainsFunc(frontends, needsGuard) {
		if err := w.guard(); err != nil {
			w.ports.Failed(index, err)
			return err
		}
	}
	if err := w.addRanges(p, ranges); err != nil {
		err = fmt.Errorf("%s: %w", d.Name, err)
		w.ports.Failed(index, err)
		return err
	}
	w.enqueue(index, p, frontends, fresh, again)
	w.ports.Done(index, *p) // flush may mark it as failed
	var flushed error       // may contain errors of other service ports
	if switched {
		flushed = w.flush()
		if item.Unsure() {
			return flushed
		}
	}
	flushed = errors.Join(flushed, w.removeRanges(p, ranges))
	for s := range proxier.Sets {
		if !used[s] {
			w.publish(p.id, s, lbmap.UnusedSet)
		}
	}
	w.narrow(d, ids)
	for _, id := range removed {
		w.freeBackend(id)
	}
	p.backends = ids
	w.noteDirect(index, d, p.id, ids)
	return flushed
}

// switches says that the flags of an address change, so that it may use another set or other
// source ranges.
func switches(before, after []lbmap.FrontendEntry) bool {
	return slices.ContainsFunc(before, func(f lbmap.FrontendEntry) bool {
		return slices.ContainsFunc(after, func(o lbmap.FrontendEntry) bool { return o.Key == f.Key && o.Value.Flags != f.Value.Flags })
	})
}

func (w *Writer) full(table string, need int, u lbmap.Usage) error {
	return &CapacityError{Table: table, Need: need, Usage: u, Grows: u.Max < sizeOf(&w.most, table)-1}
}

// frontendsOf returns the entries that the port should have, and how many of
// them are new. It returns the port's own list if that is what it should have.
func (w *Writer) frontendsOf(d *proxier.Decision, p *port) (list []lbmap.FrontendEntry, fresh int) {
	same := true
	n := 0
	for i := range d.Frontends {
		if served(&d.Frontends[i]) {
			same = same && n < len(p.frontends) && p.frontends[n] == lbmap.NewFrontend(d, i, p.id)
			n++
		}
	}
	if same && n == len(p.frontends) {
		return p.frontends, 0
	}
	list = w.frontendLists.take(n)[:0]
	for i := range d.Frontends {
		if !served(&d.Frontends[i]) {
			continue
		}
		f := lbmap.NewFrontend(d, i, p.id)
		list = append(list, f)
		if !hasKey(p.frontends, f.Key) {
			fresh++
		}
	}
	return list, fresh
}

func hasKey(list []lbmap.FrontendEntry, key lbmap.FrontendKey) bool {
	return slices.ContainsFunc(list, func(f lbmap.FrontendEntry) bool { return f.Key == key })
}

// matchBackends finds the ids of the backends that the port should have, 0 for
// those that have none yet, and the ids it should not have any more.
func (w *Writer) matchBackends(d *proxier.Decision, p *port) (ids []uint32, missing int, removed []uint32) {
	if len(p.backends) == len(d.Backends) {
		same := true
		for i, id := range p.backends {
			if w.backendAddr(id) != d.Backends[i].Addr {
				same = false
				break
			}
		}
		if same {
			return p.backends, 0, nil
		}
	}
	ids = w.idLists.take(len(d.Backends))
	have := p.backends
	for i := range d.Backends {
		want := d.Backends[i].Addr
		for len(have) > 0 && w.backendAddr(have[0]).Compare(want) < 0 {
			removed, have = append(removed, have[0]), have[1:]
		}
		if len(have) > 0 && w.backendAddr(have[0]) == want {
			ids[i], have = have[0], have[1:]
			continue
		}
		missing++
	}
	return ids, missing, append(removed, have...)
}

func (w *Writer) backendAddr(id uint32) netip.AddrPort {
	b := &w.tables.Backends[id]
	return lbmap.ToAddrPort(b.Addr, b.Port)
}

// writeBackends writes new backends, and adds all backends to their new sets. Until narrow, they also
// stay in their previous sets.
func (w *Writer) writeBackends(service uint32, d *proxier.Decision, ids []uint32) {
	for i := range d.Backends {
		b := &d.Backends[i]
		if ids[i] != 0 {
			e := &w.tables.Backends[ids[i]]
			if members := e.Members | membersOf(b); e.Members != members {
				e.Members = members
				w.writes++
			}
			if flags := w.flagsOf(d, b); e.Flags != flags {
				e.Flags = flags
				w.writes++
			}
			continue
		}
		id, _ := w.backends.alloc() // program has checked that there is one
		e := &w.tables.Backends[id]
		generation := e.Generation
		if generation == 0 {
			generation = w.tables.Meta.Generation
		}
		*e = lbmap.Backend{
			Addr: lbmap.FromAddr(b.Addr.Addr()), Port: lbmap.NetworkPort(b.Addr.Port()), Proto: uint8(d.Name.Protocol),
			Members: membersOf(b), Service: service, Generation: generation, Flags: w.flagsOf(d, b),
		}
		w.writes++
		ids[i] = id
	}
}

// narrow removes backends from sets that they are no longer in.
func (w *Writer) narrow(d *proxier.Decision, ids []uint32) {
	for i := range d.Backends {
		if e, members := &w.tables.Backends[ids[i]], membersOf(&d.Backends[i]); e.Members != members {
			e.Members = members
			w.writes++
		}
	}
}

// publish stores the word of a set, which programs read from then on.
func (w *Writer) publish(id uint32, s proxier.Set, word uint64) {
	at := &w.tables.Sets[id*lbmap.SetsPerService+uint32(s)]
	old := *at
	if old == word {
		return
	}
	atomic.StoreUint64(at, word)
	w.writes++
	if base, size := lbmap.SplitSetWord(old); size > 0 {
		w.slots.release(extent{base: base, order: orderOf(size)})
		w.room = true
	}
}
