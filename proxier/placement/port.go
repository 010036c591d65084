// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/delta"
)

// tier is one of the two, in the order of candidates.
type tier int

const (
	onFast tier = iota
	onFallback
	tiers
)

// parts are, of every service port, what one tier is to have and what it was given.
type parts = delta.Delta[uint32, *proxier.Decision, *proxier.Decision]

// port is a service port.
type port struct {
	decision *proxier.Decision // nil when it is gone
	// held says that the fast tier keeps all frontends that it supports, even if another tier
	// should serve them.
	held  bool
	round uint32 // of the last update that it was in
}

// ErrOptedOut is why the fast tier has nothing of a Service that opts out.
var ErrOptedOut = errors.New("the Service opts out: " + proxier.AnnotationFastPath + "=" + proxier.FastPathDisabled)

// newCandidates are the fast tier, and the fallback for all that it refuses.
func (t *Tier) newCandidates() [tiers]Candidate {
	return [tiers]Candidate{
		onFast: {Refuses: func(d *proxier.Decision, f *proxier.Frontend) error {
			return t.fastRefuses(d, f, t.overflow, t.served)
		}},
		onFallback: {Also: func(_ *proxier.Decision, f *proxier.Frontend) bool { return t.both || t.standsIn || f.Left != nil }},
	}
}

// fastRefuses says why the fast tier does not serve a frontend, given what it has no room
// for, and whether Services can opt out yet.
func (t *Tier) fastRefuses(d *proxier.Decision, f *proxier.Frontend, overflow map[uint32]error, served bool) error {
	if t.isForeign(f.Kind) {
		return ErrForeign
	}
	if d.OptedOut && served {
		return ErrOptedOut // also if it would not fit
	}
	if why := overflow[d.Index()]; why != nil {
		return why
	}
	return t.fast.Supports(d, f)
}

// assign works out what each tier is to have of a service port.
func (t *Tier) assign(index uint32, p *port) {
	t.count(index, -1)
	defer t.count(index, 1)
	var want [tiers]*proxier.Decision
	if d := p.decision; d != nil {
		Assign(t.candidates[:], d, want[:])
		overflows := t.overflow[index] != nil
		leaves := overflows || d.OptedOut && t.served
		if leaves && p.held {
			want[onFast] = d.Only(func(f *proxier.Frontend) bool { return t.fast.Supports(d, f) == nil })
		}
		fast := want[onFast]
		// Not what the fast tier never had, such as the kinds that another proxy serves: its backends would take room.
		ours := slices.ContainsFunc(d.Frontends, func(f proxier.Frontend) bool { return !t.isForeign(f.Kind) })
		left := slices.ContainsFunc(d.Frontends, func(f proxier.Frontend) bool { return f.IsLeft() })
		knew := fast != nil || ours && (leaves || left)
		if fast != d && knew && d.Name.Protocol == proxier.UDP && !overflows {
			// It ends flows and closes sockets whose backends are gone, and must not take those for gone that another
			// tier serves. What does not fit does not stay for that either.
			want[onFast] = d.LeaveBut(func(f *proxier.Frontend) bool {
				return fast != nil && hasFrontend(fast, f)
			})
		}
	}
	for i, d := range want {
		if d == nil {
			t.parts[i].Drop(index)
		} else if item := t.parts[i].Want(index, d); item.There() && item.Applied == d {
			t.parts[i].Done(index, d) // as before
		}
	}
}

func (t *Tier) count(index uint32, by int) {
	d := t.want(onFallback, index)
	if d == nil {
		return
	}
	t.slow += by
	if slices.ContainsFunc(d.Frontends, func(f proxier.Frontend) bool { return !f.Kind.External() }) {
		t.clusterIPs += by
	}
}

// want is what a tier is to have of a service port.
func (t *Tier) want(of tier, index uint32) *proxier.Decision {
	if item := t.parts[of].Get(index); item != nil {
		return item.Desired()
	}
	return nil
}

// has is what a tier was given of a service port.
func (t *Tier) has(of tier, index uint32) *proxier.Decision {
	if item := t.parts[of].Get(index); item != nil {
		return item.Applied
	}
	return nil
}

func (t *Tier) differs(of tier, index uint32) bool {
	item := t.parts[of].Get(index)
	return item != nil && item.Applied != item.Desired()
}

// given notes that a tier was given a part; nil for none.
func (t *Tier) given(to tier, index uint32, d *proxier.Decision) {
	item := t.parts[to].Get(index)
	switch {
	case d == nil && item == nil:
	case d == nil:
		t.parts[to].Removed(index)
	case item != nil && d == item.Desired():
		t.parts[to].Done(index, d)
	default: // more than it is to have in the end
		t.parts[to].Adopt(index, d)
	}
}

// forget notes that a tier has nothing of a service port.
func (t *Tier) forget(of tier, index uint32) { t.given(of, index, nil) }

// changes returns the changes of service ports for a tier.
func (t *Tier) changes(of tier, order []uint32) (list []proxier.PortChange) {
	for _, index := range order {
		if t.differs(of, index) {
			list = append(list, proxier.PortChange{Old: t.has(of, index), New: t.want(of, index)})
		}
	}
	return list
}

// additions are the changes for the fallback, but for what goes from it as a whole.
func (t *Tier) additions(order []uint32) []proxier.PortChange {
	return slices.DeleteFunc(t.changes(onFallback, order), func(c proxier.PortChange) bool { return c.New == nil })
}

// hasFrontend reports whether a decision has a frontend of that address and kind.
func hasFrontend(d *proxier.Decision, f *proxier.Frontend) bool {
	return slices.ContainsFunc(d.Frontends, func(o proxier.Frontend) bool { return o.Addr == f.Addr && o.Kind == f.Kind })
}

// gains are what the fallback gets, along with what it has: whatever is leaving it is not
// in the fast tier yet.
func (t *Tier) gains(order []uint32) []proxier.PortChange {
	list := t.additions(order)
	for i := range list {
		c := &list[i]
		if c.Old == nil {
			continue
		}
		old, next := c.Old, c.New
		c.New = t.ports[c.Index()].decision.Only(func(f *proxier.Frontend) bool { return hasFrontend(old, f) || hasFrontend(next, f) })
	}
	return list
}
