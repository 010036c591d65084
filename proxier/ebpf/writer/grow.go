// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// SetReach sets the sizes that the tables can still get. What would fit then is not reported if it does not fit now, as the
// caller of Sync is about to move to larger tables.
func (w *Writer) SetReach(s lbmap.Sizes) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reach, w.short, w.room = s, false, true
	most, reach := w.most.All(), s.All()
	for i := range most {
		*most[i].At = max(*most[i].At, *reach[i].At)
	}
}

// sizeOf is the size of a table.
func sizeOf(s *lbmap.Sizes, table string) int {
	for _, size := range s.All() {
		if size.Name == table {
			return int(*size.At)
		}
	}
	return 0
}

// fitsLater reports whether something fits into a table that has grown.
func (w *Writer) fitsLater(e *CapacityError) bool {
	reach := sizeOf(&w.reach, e.Table)
	return e.Used+e.Need < reach && e.Max < reach-1
}

// Wants is what the tables hold, and what they would hold if everything fitted, as far as that can be told. Short says
// that something waits for tables that can grow.
func (w *Writer) Wants() (wants lbmap.Sizes, short bool) {
	w.mu.RLock()
	defer w.mu.RUnlock()
	services, frontends, backends, slots := w.services.used+1, w.usedFrontends, w.backends.used+1, w.slots.used
	for index, item := range w.ports.AllRefused() {
		if !w.short {
			break
		}
		full := (*CapacityError)(nil)
		if !errors.As(w.ports.Err(index), &full) || !w.fitsLater(full) {
			continue
		}
		short = true
		d, p := item.Desired(), &item.Applied
		if p.id == 0 {
			services++
		}
		frontends += max(0, len(d.Frontends)-len(p.frontends))
		backends += max(0, len(d.Backends)-len(p.backends))
		for s := range proxier.Sets {
			// While a set is replaced, both exist.
			if n := max(d.Size(s), d.TableSize(s)); n > 0 {
				slots += 1 << orderOf(n)
			}
		}
		switch full.Table { // at least this one has to grow
		case "services":
			services = max(services, len(w.tables.Services))
		case "frontends":
			frontends = max(frontends, w.tables.Frontends.MaxEntries())
		case "backends":
			backends = max(backends, len(w.tables.Backends))
		case "slots": // repeated for weights, or no extent of the length is free
			slots = max(slots+full.Need, int(w.slots.size))
		}
	}
	count := func(n int) uint32 { return uint32(min(n, 1<<31)) }
	wants = lbmap.Sizes{Services: count(services), Frontends: count(frontends), Backends: count(backends), Slots: count(slots)}
	if w.hasAffinity {
		wants.Affinity = w.reach.Affinity // it is full before it could grow
	}
	return wants, short
}

// Move replaces the tables by larger ones with the same contents, which move makes of the present ones while nothing else changes
// or reads them. What did not fit is tried again by the next Sync. If move fails, the tables stay; else the earlier ones
// must not be used any more.
func (w *Writer) Move(move func(*lbmap.Tables) (*lbmap.Tables, error)) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	to, err := move(w.tables)
	if err != nil {
		return err
	}
	w.tables.Unmap()
	w.tables = to
	w.services.limit = uint32(len(to.Services))
	w.backends.limit = uint32(len(to.Backends))
	w.slots.grow(uint32(len(to.Slots)))
	w.echo.table, w.direct.targets.table, w.usedPorts.table = to.VIPs, to.Targets, to.Ports
	w.short, w.room = false, true
	return nil
}
