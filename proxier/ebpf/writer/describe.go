// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// description is what describe wrote last. Reading it from the table would touch a page of
// memory that nothing else needs.
type description struct {
	state  uint32
	reason uint16
}

// describe writes the entry of the service port, for tandemctl and the next process.
func (w *Writer) describe(p *port, state uint32, reason uint16) {
	e := &w.tables.Services[p.id]
	now := description{state, reason}
	if p.described == now {
		return
	}
	p.described = now
	fresh := lbmap.Service{State: state, Reason: reason, Proto: uint8(p.want.Name.Protocol)}
	fresh.NameLen = lbmap.PutName(&fresh.Name, p.want.Name)
	if *e == fresh {
		return
	}
	*e = fresh
	w.writes++
}

// gauges writes counts for readers of the tables.
func (w *Writer) gauges(changed bool) {
	m := w.tables.Meta
	if !changed && m.Unplaced == uint32(len(w.unplaced)) {
		return
	}
	m.SlotsUsed = uint32(w.slots.used)
	m.BackendsUsed = uint32(w.backends.used)
	m.ServicesUsed = uint32(w.services.used)
	m.FrontendsUsed = uint32(w.usedFrontends)
	m.Unplaced = uint32(len(w.unplaced))
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

// Read calls fn with the tables while nothing changes them.
func (w *Writer) Read(fn func(*lbmap.Tables) error) error {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return fn(w.tables)
}

// Unplaced are the service ports that are not in the tables as they should be, by
// Decision.Index, and why.
func (w *Writer) Unplaced() map[uint32]error {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if len(w.unplaced) == 0 {
		return nil
	}
	all := make(map[uint32]error, len(w.unplaced))
	for index, code := range w.unplaced {
		all[index] = errors.New(code.String())
	}
	return all
}
