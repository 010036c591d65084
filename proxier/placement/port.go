// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
)

// port is a service port, what each tier is to have of it, and what it has.
type port struct {
	decision *proxier.Decision
	want     [sides]*proxier.Decision
	has      [sides]*proxier.Decision
	// held says that the fast tier is to have what it can, whoever else should.
	held bool
}

// side is one of the tiers.
type side int

const (
	onFast side = iota
	onFallback
	sides
)

// errOptedOut is why the fast tier has nothing of a Service that wants it so.
var errOptedOut = errors.New("the Service opts out: " + proxier.AnnotationFastPath + "=" + proxier.FastPathDisabled)

// place says which tier is to have what of a service port.
func (t *Tier) place(p *port) {
	t.count(p, -1)
	defer t.count(p, 1)
	p.want = [sides]*proxier.Decision{}
	d := p.decision
	if d == nil {
		return
	}
	fits := func(f *proxier.Frontend) bool { return t.fast.Supports(d, f) == nil }
	p.want[onFast] = d.Only(fits)
	overflows := t.overflow[d.Index()] != nil
	leaves := overflows || d.OptedOut && t.served
	switch {
	case leaves || t.both || t.standsIn:
		p.want[onFallback] = d
	case p.want[onFast] != d:
		p.want[onFallback] = d.Only(func(f *proxier.Frontend) bool { return !fits(f) })
	}
	switch {
	case !leaves || p.held:
	case !overflows && d.Name.Protocol == proxier.UDP:
		// Sockets that are connected to its backends are to be told only of
		// those that really go.
		p.want[onFast] = d.Unserved()
	default:
		p.want[onFast] = nil
	}
}

func (t *Tier) placeAll() {
	for _, p := range t.ports {
		t.place(p)
	}
}

func (t *Tier) count(p *port, by int) {
	d := p.want[onFallback]
	if d == nil {
		return
	}
	t.slow += by
	if slices.ContainsFunc(d.Frontends, func(f proxier.Frontend) bool { return !f.Kind.External() }) {
		t.clusterIPs += by
	}
}

// which changes of a tier.
type which uint8

const (
	added which = 1 << iota // or changed
	removed
)

// diff is what changes for a tier.
func (t *Tier) diff(order []uint32, s side, w which) (list []proxier.PortChange) {
	for _, index := range order {
		p := t.ports[index]
		if p == nil || p.has[s] == p.want[s] {
			continue
		}
		if p.want[s] != nil && w&added != 0 || p.want[s] == nil && w&removed != 0 {
			list = append(list, proxier.PortChange{Old: p.has[s], New: p.want[s]})
		}
	}
	return list
}

// gains is what the fallback gets, along with what it has: whatever is leaving it is not
// in the fast tier yet.
func (t *Tier) gains(order []uint32) []proxier.PortChange {
	list := t.diff(order, onFallback, added)
	for i := range list {
		c := &list[i]
		if c.Old == nil {
			continue
		}
		has := func(d *proxier.Decision, f *proxier.Frontend) bool {
			return slices.ContainsFunc(d.Frontends, func(o proxier.Frontend) bool { return o.Addr == f.Addr && o.Kind == f.Kind })
		}
		old, next := c.Old, c.New
		c.New = t.ports[c.Index()].decision.Only(func(f *proxier.Frontend) bool { return has(old, f) || has(next, f) })
	}
	return list
}

// all is what a tier is to have.
func (t *Tier) all(order []uint32, s side) (list []proxier.PortChange) {
	for _, index := range order {
		if p := t.ports[index]; p.want[s] != nil {
			list = append(list, proxier.PortChange{Old: p.has[s], New: p.want[s]})
		}
	}
	return list
}
