// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// description is what describe wrote last. Reading it from the table would touch a page of
// memory that nothing else needs.
type description struct{ state, reason uint16 }

// describe writes the entry of the service port, if it has one, for tandemctl and the next process. It
// reports whether state or reason have changed.
func (w *Writer) describe(d *proxier.Decision, p *port, state, reason uint16) bool {
	now := description{state, reason}
	if p.described == now {
		return false
	}
	p.described = now
	if p.id == 0 {
		return true
	}
	e := &w.tables.Services[p.id]
	fresh := lbmap.Service{State: uint32(state), Reason: reason, Proto: uint8(d.Name.Protocol)}
	fresh.NameLen = lbmap.PutName(&fresh.Name, d.Name)
	if *e != fresh {
		*e = fresh
		w.writes++
	}
	return true
}

// gauges writes counts for readers of the tables.
func (w *Writer) gauges(changed bool) {
	m := w.tables.Meta
	unplaced := uint32(w.ports.CountRefused())
	if !changed && m.Unplaced == unplaced {
		return
	}
	m.SlotsUsed = uint32(w.slots.used)
	m.BackendsUsed = uint32(w.backends.used)
	m.ServicesUsed = uint32(w.services.used)
	m.FrontendsUsed = uint32(w.usedFrontends)
	m.Unplaced = unplaced
	m.ChangedUnixNs = uint64(w.clock.Now().UnixNano())
}

// Usage of the tables.
func (w *Writer) Usage() map[string]lbmap.Usage {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return map[string]lbmap.Usage{
		"frontends": {Used: w.usedFrontends, Max: w.tables.Frontends.MaxEntries()},
		"services":  {Used: w.services.used, Max: int(w.services.limit) - 1},
		"backends":  {Used: w.backends.used, Max: int(w.backends.limit) - 1},
		"slots":     {Used: w.slots.used, Max: int(w.slots.size)},
		"ranges":    {Used: w.usedRanges, Max: w.tables.Ranges.MaxEntries()},
		"locals":    {Used: len(w.locals), Max: w.tables.Locals.MaxEntries()},
	}
}

// AffinityTimeouts are those of service ports with session affinity, in seconds, by service id.
func (w *Writer) AffinityTimeouts() map[uint32]uint32 {
	w.mu.RLock()
	defer w.mu.RUnlock()
	timeouts := map[uint32]uint32{}
	if !w.hasAffinity {
		return timeouts
	}
	for _, item := range w.ports.All() {
		if p := &item.Applied; len(p.frontends) > 0 && p.frontends[0].Value.Affinity > 0 {
			timeouts[p.id] = p.frontends[0].Value.Affinity
		}
	}
	return timeouts
}

// Read calls fn with the tables while nothing changes them.
func (w *Writer) Read(fn func(*lbmap.Tables) error) error {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return fn(w.tables)
}

// IsUnplaced reports whether a service port is not in the tables as it should be.
func (w *Writer) IsUnplaced(index uint32) bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	var why refusal
	return w.ports.CountRefused() > 0 && errors.As(w.ports.Err(index), &why)
}

// Unplaced are the service ports that are not in the tables as they should be, by
// Decision.Index, and why.
func (w *Writer) Unplaced() map[uint32]error {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if w.ports.CountRefused() == 0 {
		return nil
	}
	all := make(map[uint32]error, w.ports.CountRefused())
	for index := range w.ports.AllRefused() {
		if why := refusal(nil); errors.As(w.ports.Err(index), &why) {
			all[index] = errors.New(why.code().String())
		}
	}
	return all
}
