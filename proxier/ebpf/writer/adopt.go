// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Load reads what a previous process left in the tables, so that the first sync only writes
// differences. An error means that this version never writes such tables. Then nothing was changed.
func (w *Writer) Load() error {
	t := w.tables
	if t.Meta.Magic != lbmap.LayoutMagic || t.Meta.Layout != lbmap.LayoutVersion {
		return fmt.Errorf("map layout %d instead of %d", t.Meta.Layout, lbmap.LayoutVersion)
	}
	left := make([]port, len(t.Services))
	w.adopted = map[string]port{}
	var services, backends []uint32
	for id := range t.Services {
		if t.Services[id].State == lbmap.ServiceFree {
			continue
		}
		if id == 0 {
			return errors.New("service 0 is in use")
		}
		services = append(services, uint32(id))
		left[id].id = uint32(id)
		for s := range uint32(lbmap.SetsPerService) {
			base, size := lbmap.SplitSetWord(t.Sets[uint32(id)*lbmap.SetsPerService+s])
			if size > 0 && !w.slots.reserve(extent{base: base, order: orderOf(size)}) {
				return fmt.Errorf("the slots %d–%d of service %d are not its own", base, int(base)+size-1, id)
			}
		}
	}
	for id := range t.Backends {
		e := &t.Backends[id]
		if e.Service == 0 {
			continue
		}
		if id == 0 || int(e.Service) >= len(left) || left[e.Service].id == 0 {
			return fmt.Errorf("backend %d belongs to service %d, which is free", id, e.Service)
		}
		backends = append(backends, uint32(id))
		left[e.Service].backends = append(left[e.Service].backends, uint32(id))
	}
	if err := errors.Join(w.loadRanges(left), w.echo.load(), w.direct.load()); err != nil {
		return err
	}
	var all, lost []lbmap.FrontendKey
	err := t.Frontends.Dump(func(key lbmap.FrontendKey, value lbmap.FrontendValue) {
		all = append(all, key)
		service := int(value.Service)
		if service >= len(left) || left[service].id == 0 {
			lost = append(lost, key)
			return
		}
		s := &left[service]
		s.frontends = append(s.frontends, lbmap.FrontendEntry{Key: key, Value: value})
		w.usedFrontends++
	})
	if err != nil {
		return fmt.Errorf("read the frontends: %w", err)
	}
	w.usedPorts.load(all)
	for i := range left {
		s := &left[i]
		if s.id == 0 {
			continue
		}
		slices.SortFunc(s.backends, func(a, b uint32) int { return w.compareBackends(a, b) })
		e := &t.Services[s.id]
		key := adoptionKey(string(e.Name[:e.NameLen]), proxier.Protocol(e.Proto))
		if _, twice := w.adopted[key]; twice {
			w.gone = append(w.gone, *s)
			continue
		}
		w.adopted[key] = *s
	}
	w.services.adopt(services)
	w.backends.adopt(backends)
	w.usedFrontends += len(lost)
	w.orphans = lost
	return nil
}

// compareBackends is the order of proxier.Decision.Backends: by family, then
// by address.
func (w *Writer) compareBackends(a, b uint32) int {
	return cmp.Or(w.backendAddr(a).Compare(w.backendAddr(b)), cmp.Compare(a, b))
}

func adoptionKey(name string, protocol proxier.Protocol) string {
	return name + "/" + protocol.String()
}

// adopt sets p to the state of the service port that a previous process left.
func (w *Writer) adopt(d *proxier.Decision, p *port) bool {
	if len(w.adopted) == 0 {
		return false
	}
	var name lbmap.Service
	name.NameLen = lbmap.PutName(&name.Name, d.Name)
	key := adoptionKey(string(name.Name[:name.NameLen]), d.Name.Protocol)
	left, ok := w.adopted[key]
	if !ok {
		return false
	}
	delete(w.adopted, key)
	w.ports.Adopt(d.Index(), left)
	w.note(nil, p.frontends)
	return true
}

// prune ends a full sync: it removes what a previous process left and is not desired, and compares
// the frontends in the kernel with the desired ones.
func (w *Writer) prune() error {
	for name, s := range w.adopted {
		p := port{id: s.id, backends: s.backends, ranges: s.ranges}
		for _, f := range s.frontends {
			// Another service port may have taken the address over by now.
			value, ok, err := w.tables.Frontends.Lookup(f.Key)
			if err != nil {
				return fmt.Errorf("read frontend %s: %w", f.Key.String(), err)
			}
			if ok && value.Service == s.id {
				p.frontends = append(p.frontends, f)
			} else {
				w.usedFrontends--
			}
		}
		w.gone = append(w.gone, p)
		delete(w.adopted, name) // once, also if a later one fails
	}
	if err := w.retire(nil); err != nil {
		return err
	}
	return w.audit()
}

// audit compares the frontends in the kernel with what was written there.
func (w *Writer) audit() error {
	owner := make([]uint32, len(w.tables.Services)) // service id -> index + 1
	expected := 0
	for index, item := range w.ports.All() {
		if p := &item.Applied; p.id != 0 {
			owner[p.id] = index + 1
			expected += len(p.frontends)
		}
	}
	foreign := map[lbmap.FrontendKey]struct{}{}
	found := 0
	err := w.tables.Frontends.Dump(func(key lbmap.FrontendKey, value lbmap.FrontendValue) {
		if service := int(value.Service); service < len(owner) && owner[service] != 0 {
			p := &w.ports.Get(owner[service] - 1).Applied
			if slices.Contains(p.frontends, lbmap.FrontendEntry{Key: key, Value: value}) {
				found++
				return
			}
		}
		foreign[key] = struct{}{}
	})
	if err != nil {
		return fmt.Errorf("read the frontends: %w", err)
	}
	w.usedFrontends = expected
	if found == expected && len(foreign) == 0 {
		return nil
	}
	// Desired addresses with a wrong value are overwritten: they must not be
	// missing for a moment.
	for _, item := range w.ports.All() {
		for _, f := range item.Applied.frontends {
			delete(foreign, f.Key)
		}
	}
	if err := w.tables.Frontends.Delete(slices.Collect(maps.Keys(foreign))); err != nil {
		return fmt.Errorf("delete %d unknown frontends: %w", len(foreign), err)
	}
	w.writes += uint64(len(foreign))
	// Another process changed the map. Write everything anew: an entry that is right
	// already is overwritten with itself.
	for index, item := range w.ports.All() {
		if p := &item.Applied; p.id != 0 {
			list, fresh := w.frontendsOf(item.Desired(), p)
			w.enqueue(index, p, list, fresh, true)
		}
	}
	return w.flush()
}
