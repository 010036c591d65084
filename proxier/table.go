// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"net/netip"
	"slices"
)

// Table is the decision table: it holds what was decided about every service
// port and works out what a change of the cluster changes about it. It does no
// I/O and knows no clock; the same Services, slices and facts give the same
// decisions in whatever order they came. It is not safe for concurrent use.
type Table struct {
	facts Facts
	ports []*Decision // by index; nil where free
	free  []uint32

	owner     map[frontendKey]uint32   // who serves an address
	contested map[frontendKey][]uint32 // all who want it, where several do

	candidates []candidate // scratch
	backends   []Backend   // scratch
	previous   []*Decision // scratch
}

// frontendKey is what two Services cannot both have.
type frontendKey struct {
	addr     [16]byte
	port     uint16
	protocol Protocol
	scope    Scope
}

// PortChange is what became of one service port. Old is nil for a new one, New
// for one that is gone.
type PortChange struct {
	Old, New *Decision
}

// Index of the service port.
func (c PortChange) Index() uint32 {
	if c.New != nil {
		return c.New.index
	}
	return c.Old.index
}

// NewTable makes an empty table.
func NewTable(facts Facts) *Table {
	return &Table{facts: facts, owner: map[frontendKey]uint32{}, contested: map[frontendKey][]uint32{}}
}

// SetFacts says whether they differ; then every Service has to be applied anew.
func (t *Table) SetFacts(facts Facts) bool {
	changed := t.facts != facts
	t.facts = facts
	return changed
}

// Len counts the service ports.
func (t *Table) Len() int { return len(t.ports) - len(t.free) }

// All returns every decision, in the order of their indexes.
func (t *Table) All() []PortChange {
	all := make([]PortChange, 0, t.Len())
	for _, d := range t.ports {
		if d != nil {
			all = append(all, PortChange{New: d})
		}
	}
	return all
}

// Apply decides anew about the changed Services and returns the service ports
// about which the decision is now another.
func (t *Table) Apply(changes []Change) []PortChange {
	out := make([]PortChange, 0, len(changes))
	var disputes []frontendKey
	for i := range changes {
		out, disputes = t.apply(&changes[i], out, disputes)
	}
	if len(disputes) > 0 {
		out = t.settle(disputes, out)
	}
	return out
}

func (t *Table) apply(c *Change, out []PortChange, disputes []frontendKey) ([]PortChange, []frontendKey) {
	e := c.entry
	t.previous = t.previous[:0]
	for _, index := range e.ports {
		t.previous = append(t.previous, t.ports[index])
	}
	e.ports = e.ports[:0]
	if e.ports == nil {
		e.ports = e.onePort[:0]
	}
	if c.Service != nil {
		find := newNameIndex(t.previous)
		for i := range c.Service.Ports {
			d := t.decide(c, &c.Service.Ports[i])
			at := find.take(d.Name)
			if at < 0 {
				t.place(d)
				disputes = t.claim(d, disputes)
				out = append(out, PortChange{New: d})
			} else {
				was := t.previous[at]
				t.previous[at] = nil
				d.index = was.index
				disputes = t.release(was, d, disputes)
				disputes = t.claim(d, disputes)
				d.inheritConflicts(was)
				if !d.equal(was) {
					t.ports[d.index] = d
					out = append(out, PortChange{Old: was, New: d})
				}
			}
			e.ports = append(e.ports, d.index)
		}
	}
	for _, was := range t.previous {
		if was != nil {
			disputes = t.remove(was, disputes)
			out = append(out, PortChange{Old: was})
		}
	}
	return out, disputes
}

// nameIndex finds decisions by name. A Service has few ports, but nothing
// keeps a hostile one from having thousands.
type nameIndex struct {
	list   []*Decision
	byName map[ServicePortName][]int
}

func newNameIndex(list []*Decision) nameIndex {
	x := nameIndex{list: list}
	if len(list) > 8 {
		x.byName = make(map[ServicePortName][]int, len(list))
		for i, d := range list {
			x.byName[d.Name] = append(x.byName[d.Name], i)
		}
	}
	return x
}

// take returns where the decision stands, each once, or -1. The caller clears
// that place in the list.
func (x *nameIndex) take(name ServicePortName) int {
	if x.byName != nil {
		at := x.byName[name]
		if len(at) == 0 {
			return -1
		}
		x.byName[name] = at[1:]
		return at[0]
	}
	for i, d := range x.list {
		if d != nil && d.Name == name {
			return i
		}
	}
	return -1
}

// decide is the decision about one service port.
func (t *Table) decide(c *Change, port *ServicePort) *Decision {
	s := c.Service
	d := &Decision{
		Name:     ServicePortName{NamespacedName: s.Name, Port: port.Name, Protocol: port.Protocol},
		UID:      s.UID,
		Created:  s.Created,
		Affinity: s.Affinity,
	}
	d.Frontends = d.oneFrontend[:0]
	t.backends = t.backends[:0]
	for family := range families {
		vip := s.ClusterIPs[family]
		if !vip.IsValid() {
			continue
		}
		set := setOf(family, s.InternalLocal)
		d.Frontends = append(d.Frontends, Frontend{Addr: netip.AddrPortFrom(vip, port.Port), Kind: ClusterIP, Scope: Internal, Set: set})

		t.candidates = candidates(t.candidates[:0], c.Slices, port.Name, port.Protocol, family)
		e := newEligibility(t.candidates, t.facts.Zone)
		used, anywhere := set.Member(), false
		for i := range t.candidates {
			c := &t.candidates[i]
			members := e.members(c)
			anywhere = anywhere || members&InCluster != 0
			members &= used
			// A UDP client keeps a backend that still serves, though no new
			// client would get it; all other backends end with their sets.
			if members == 0 && (port.Protocol != UDP || !c.is(serving)) {
				continue
			}
			t.backends = append(t.backends, Backend{Addr: c.addr, Members: members, Local: c.is(local), Terminating: c.is(terminating)})
		}
		// Endpoints exist, but internalTrafficPolicy: Local rules them out.
		if s.InternalLocal && anywhere {
			d.Empty[set] = Drop
		}
	}
	d.Backends = slices.Clone(t.backends)
	return d
}

func (t *Table) place(d *Decision) {
	if n := len(t.free); n > 0 {
		d.index, t.free = t.free[n-1], t.free[:n-1]
		t.ports[d.index] = d
		return
	}
	d.index = uint32(len(t.ports))
	t.ports = append(t.ports, d)
}

func (t *Table) remove(d *Decision, disputes []frontendKey) []frontendKey {
	disputes = t.release(d, nil, disputes)
	t.ports[d.index] = nil
	t.free = append(t.free, d.index)
	return disputes
}

func (d *Decision) key(i int) frontendKey {
	f := &d.Frontends[i]
	return frontendKey{addr: f.Addr.Addr().As16(), port: f.Addr.Port(), protocol: d.Name.Protocol, scope: f.Scope}
}

func (d *Decision) claims(key frontendKey) bool {
	for i := range d.Frontends {
		if d.key(i) == key {
			return true
		}
	}
	return false
}

// claim takes the decision's addresses where nobody has them.
func (t *Table) claim(d *Decision, disputes []frontendKey) []frontendKey {
	for i := range d.Frontends {
		key := d.key(i)
		holder, held := t.owner[key]
		if !held {
			t.owner[key] = d.index
			continue
		}
		claimants := t.contested[key]
		if holder == d.index && claimants == nil || slices.Contains(claimants, d.index) {
			if claimants != nil {
				disputes = append(disputes, key) // its age may be another now
			}
			continue
		}
		if claimants == nil {
			claimants = []uint32{holder}
		}
		t.contested[key] = append(claimants, d.index)
		disputes = append(disputes, key)
	}
	return disputes
}

// release gives up the addresses of old that its successor does not claim.
func (t *Table) release(old, successor *Decision, disputes []frontendKey) []frontendKey {
	for i := range old.Frontends {
		key := old.key(i)
		if successor != nil && successor.claims(key) {
			continue
		}
		claimants := t.contested[key]
		if claimants == nil { // nobody else wants it, so it is old's
			delete(t.owner, key)
			continue
		}
		j := slices.Index(claimants, old.index)
		if j < 0 {
			continue
		}
		t.contested[key] = slices.Delete(claimants, j, j+1)
		disputes = append(disputes, key)
	}
	return disputes
}

// settle finds out who serves each disputed address: the oldest claimant, as
// the API server would have had it.
func (t *Table) settle(disputes []frontendKey, out []PortChange) []PortChange {
	at := make(map[uint32]int, len(disputes)) // index -> its place in out
	for i, c := range out {
		if c.New != nil {
			at[c.New.index] = i
		}
	}
	for _, key := range disputes {
		claimants := t.contested[key]
		if len(claimants) == 0 {
			// An earlier settling of the same key, or the last claimant left.
			if _, was := t.contested[key]; was {
				delete(t.contested, key)
				delete(t.owner, key)
			}
			continue
		}
		holder := t.ports[claimants[0]]
		for _, index := range claimants[1:] {
			if d := t.ports[index]; d.older(holder) {
				holder = d
			}
		}
		t.owner[key] = holder.index
		if len(claimants) == 1 {
			delete(t.contested, key)
		}
		for _, index := range claimants {
			d := t.ports[index]
			var conflict *ServicePortName
			if d != holder {
				conflict = &holder.Name
			}
			settled := d.withConflict(key, conflict)
			if settled == d {
				continue
			}
			t.ports[index] = settled
			if i, ok := at[index]; ok {
				out[i].New = settled
			} else {
				at[index] = len(out)
				out = append(out, PortChange{Old: d, New: settled})
			}
		}
	}
	return out
}

func (d *Decision) older(o *Decision) bool {
	if !d.Created.Equal(o.Created) {
		return d.Created.Before(o.Created)
	}
	return d.Name.compare(o.Name) < 0
}

// withConflict returns the decision with that frontend lost to another service
// port, or won back from it.
func (d *Decision) withConflict(key frontendKey, with *ServicePortName) *Decision {
	for i := range d.Frontends {
		if d.key(i) != key {
			continue
		}
		f := &d.Frontends[i]
		if (f.Conflict == nil) == (with == nil) && (with == nil || *f.Conflict == *with) {
			return d
		}
		settled := *d
		settled.Frontends = slices.Clone(d.Frontends)
		settled.Frontends[i].Conflict = with
		return &settled
	}
	return d
}

// inheritConflicts keeps what was settled about addresses nobody newly
// disputes.
func (d *Decision) inheritConflicts(was *Decision) {
	for i := range was.Frontends {
		if was.Frontends[i].Conflict == nil {
			continue
		}
		key := was.key(i)
		for j := range d.Frontends {
			if d.key(j) == key {
				d.Frontends[j].Conflict = was.Frontends[i].Conflict
			}
		}
	}
}
