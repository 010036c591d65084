// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"hash/fnv"

	"github.com/tandem-proxy/tandem/proxier"
)

// description is what describe wrote last; looking it up in the table costs a
// page of memory that nothing else needs.
type description struct {
	state  uint32
	reason uint16
}

// describe writes the entry of the service port that people and the next
// process read.
func (w *writer) describe(p *port, state uint32, reason uint16) {
	e := &w.tables.services[p.id]
	now := description{state, reason}
	if p.described == now {
		return
	}
	p.described = now
	fresh := serviceEntry{State: state, Reason: reason, Proto: uint8(p.want.Name.Protocol)}
	fresh.NameLen = putName(&fresh.Name, p.want.Name)
	if *e == fresh {
		return
	}
	*e = fresh
	w.writes++
}

// putName writes what n.String would return and its length. Of a name that is
// too long, a hash takes the place of the end, so that it can still be told
// from others.
func putName(to *[len(serviceEntry{}.Name)]uint8, n proxier.ServicePortName) uint8 {
	b := append(to[:0], n.Namespace...)
	b = append(append(b, '/'), n.Name...)
	if n.Port != "" {
		b = append(append(b, ':'), n.Port...)
	}
	if len(b) > len(to) { // b has left the array
		hash := fnv.New64a()
		hash.Write(b)
		end := fmt.Appendf(nil, "~%016x", hash.Sum64())
		keep := len(to) - len(end)
		copy(to[:], b[:keep])
		copy(to[keep:], end)
		return uint8(len(to))
	}
	return uint8(len(b))
}

// gauges writes what the tables' readers cannot count cheaply.
func (w *writer) gauges(changed bool) {
	m := w.tables.meta
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
