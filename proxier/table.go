// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// Table is the decision table: it holds the decision about every service port, and
// computes how a change of the cluster changes decisions. It does no I/O and uses no
// clock. Decisions depend only on Services, slices, facts and policy, not on the order in
// which they arrived. Only one goroutine at a time may change it; Explain, Dump and Facts
// may be called concurrently.
type Table struct {
	policy Policy

	mu    sync.RWMutex // guards what follows against readers
	facts Facts
	rules NodeRules
	rows  []row // by index
	free  []uint32
	// freed are free after the update that says so: in one update, an index is one
	// service port.
	freed []uint32

	owner     map[frontendKey]uint32   // which service port serves an address
	contested map[frontendKey][]uint32 // all claimants, where there are several
	health    map[types.NamespacedName]HealthCheck
	selecting map[*entry]struct{}               // what selects nodes
	atNodes   map[*entry]struct{}               // what ServiceLB serves
	checked   map[types.NamespacedName]struct{} // those whose health check changed since it was last handed over

	candidates []candidate // scratch
	frontends  []Frontend  // scratch
	backends   []Backend   // scratch
	previous   []row       // scratch
}

// row is a service port: the decision, and its input.
type row struct {
	decision *Decision // nil where the index is free
	of       *entry
	// merged are the endpoints of a family that has many.
	merged *[Families]merged
}

// PortChange is a change of one service port. Old is nil for a new one, New
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
func NewTable(facts Facts, policy Policy) *Table {
	return &Table{
		policy: policy, facts: facts, rules: policy.NodeRules(&facts),
		owner: map[frontendKey]uint32{}, contested: map[frontendKey][]uint32{}, health: map[types.NamespacedName]HealthCheck{},
		selecting: map[*entry]struct{}{}, atNodes: map[*entry]struct{}{},
		checked: map[types.NamespacedName]struct{}{},
	}
}

// SetFacts says what of the outcome differs with them: rules that NodeRules
// does, services that every Service has to be applied anew.
func (t *Table) SetFacts(facts Facts) (rules, services bool) {
	if t.facts.equal(&facts) {
		return false, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	services = !t.facts.decidesAlike(&facts) || t.movesLeft(t.facts.LocalAddrs, facts.LocalAddrs) || t.selectsOther(t.facts.Labels, facts.Labels) ||
		len(t.atNodes) > 0 && !t.facts.addressedAlike(&facts)
	before := t.rules
	t.facts, t.rules = facts, t.policy.NodeRules(&facts)
	return !t.rules.Equal(&before), services
}

// selectsOther reports whether some Service selects this node with one set of labels alone. Labels change often on some
// clusters, and few Services select nodes.
func (t *Table) selectsOther(before, after map[string]string) bool {
	if maps.Equal(before, after) {
		return false
	}
	for e := range t.selecting {
		if x := e.decided.service.More; x.external(before) != x.external(after) {
			return true
		}
	}
	return false
}

// SetPolicy has everything be decided by another one: every Service has to be applied anew.
// It reports whether what NodeRules does differs.
func (t *Table) SetPolicy(policy Policy) (rules bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.rules
	t.policy, t.rules = policy, policy.NodeRules(&t.facts)
	return !t.rules.Equal(&before)
}

// Facts that the decisions are made with.
func (t *Table) Facts() Facts {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.facts
}

// NodeRules that all frontends have in common.
func (t *Table) NodeRules() NodeRules {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.rules
}

// Len counts the service ports.
func (t *Table) Len() int { return len(t.rows) - len(t.free) }

// All returns every decision, in the order of their indexes.
func (t *Table) All() []PortChange {
	t.mu.RLock()
	defer t.mu.RUnlock()
	all := make([]PortChange, 0, t.Len())
	for i := range t.rows {
		if d := t.rows[i].decision; d != nil {
			all = append(all, PortChange{New: d})
		}
	}
	return all
}

// Apply decides anew about the changed Services and returns the service ports
// about which the decision is now another.
func (t *Table) Apply(changes []Change) []PortChange {
	t.mu.Lock()
	defer t.mu.Unlock()
	ports, fresh := 0, 0
	for i := range changes {
		had, has := len(changes[i].entry.ports), 0
		if s := changes[i].Service; s != nil {
			has = len(s.Ports)
		}
		ports += max(had, has)
		fresh += max(0, has-had)
	}
	if fresh > 1000 { // not worth it for few
		t.rows = slices.Grow(t.rows, max(0, fresh-len(t.free)))
		if len(t.owner) == 0 {
			t.owner = make(map[frontendKey]uint32, fresh+fresh/2)
		}
	}
	out := make([]PortChange, 0, ports)
	var disputes []frontendKey
	for i := range changes {
		out, disputes = t.apply(&changes[i], out, disputes)
	}
	if len(disputes) > 0 {
		out = t.resolve(disputes, out)
	}
	t.free, t.freed = append(t.free, t.freed...), t.freed[:0]
	return out
}

func (t *Table) apply(c *Change, out []PortChange, disputes []frontendKey) ([]PortChange, []frontendKey) {
	e := c.entry
	t.checkHealth(c)
	e.decided.service, e.decided.slices = c.Service, c.Slices
	if c.Service != nil && c.Service.More != nil && c.Service.More.selector != nil {
		t.selecting[e] = struct{}{}
	} else {
		delete(t.selecting, e)
	}
	if c.Service != nil && c.Service.AtNodes {
		t.atNodes[e] = struct{}{}
	} else {
		delete(t.atNodes, e)
	}
	t.previous = t.previous[:0]
	for _, index := range e.ports {
		t.previous = append(t.previous, t.rows[index])
	}
	e.ports = e.ports[:0]
	if e.ports == nil {
		e.ports = e.onePort[:0]
	}
	if c.Service != nil {
		known := newNameIndex(t.previous)
		for i := range c.Service.Ports {
			port := &c.Service.Ports[i]
			at := known.find(ServicePortName{NamespacedName: c.Service.Name, Port: port.Name, Protocol: port.Protocol})
			r := row{of: e}
			if at >= 0 {
				r.merged = t.previous[at].merged
			}
			d := t.decide(c, port, &r)
			if at < 0 {
				t.insert(r)
				disputes = t.claim(d, disputes)
				out = append(out, PortChange{New: d})
			} else {
				was := t.previous[at].decision
				t.previous[at] = row{}
				d.index = was.index
				if !d.claimsAs(was) {
					disputes = t.release(was, d, disputes)
					disputes = t.claim(d, disputes)
				}
				d.inheritConflicts(was)
				if d.equal(was) {
					r.decision = was
				} else {
					out = append(out, PortChange{Old: was, New: d})
				}
				t.rows[d.index] = r
			}
			e.ports = append(e.ports, d.index)
		}
	}
	for _, was := range t.previous {
		if was.decision != nil {
			disputes = t.remove(was.decision, disputes)
			out = append(out, PortChange{Old: was.decision})
		}
	}
	clear(t.previous)
	return out, disputes
}

// nameIndex finds decisions by name. A Service has few ports, but nothing
// keeps a hostile one from having thousands.
type nameIndex struct {
	list   []row
	byName map[ServicePortName]int // nil for short lists
}

func newNameIndex(list []row) nameIndex {
	x := nameIndex{list: list}
	if len(list) > 8 {
		x.byName = make(map[ServicePortName]int, len(list))
		for i, r := range list {
			x.byName[r.decision.Name] = i
		}
	}
	return x
}

// find returns where the decision stands, or -1.
func (x *nameIndex) find(name ServicePortName) int {
	if x.byName == nil {
		return slices.IndexFunc(x.list, func(r row) bool { return r.decision != nil && r.decision.Name == name })
	}
	if i, ok := x.byName[name]; ok {
		return i
	}
	return -1
}

// decide is the decision about one service port.
func (t *Table) decide(c *Change, port *ServicePort, r *row) *Decision {
	s := c.Service
	direct := s.direct(t.policy.Forwarding, port.Protocol)
	d := &Decision{
		Name:     ServicePortName{NamespacedName: s.Name, Port: port.Name, Protocol: port.Protocol},
		UID:      s.UID,
		Created:  s.Created,
		Affinity: s.Affinity,
		OptedOut: s.OptedOut,

		Balancing:           s.Balancing.over(t.policy.Balancing, direct),
		HealthCheckNodePort: s.healthCheckNodePort(),
	}
	r.decision = d
	list := t.frontends[:0]
	for family := range Families {
		list = t.frontendsOf(list, s, port, family)
	}
	if direct {
		directRoutes(list)
	}
	d.Frontends = append(d.oneFrontend[:0], list...)
	t.frontends = list

	used := d.Uses()
	t.backends = t.backends[:0]
	if r.merged != nil { // too many to be copied for nothing
		t.backends = nil
	}
	for family := range Families {
		cluster, local := SetOf(family, false), SetOf(family, true)
		if !used[cluster] && !used[local] {
			continue
		}
		reachable := t.decideBackends(d, c.Slices, r, target{port.Name, port.Protocol, family}, used[cluster], used[local])
		// Endpoints exist, but a Local policy rules them out.
		if used[local] && reachable {
			d.Empty[local] = Drop
		}
	}
	if r.merged == nil {
		d.Backends = slices.Clone(t.backends)
	} else {
		d.Backends, t.backends = t.backends, nil
	}
	t.leave(d)
	return d
}

// decideBackends appends the backends of one family, and reports whether clients
// could be served by any.
func (t *Table) decideBackends(d *Decision, from []*EndpointSlice, r *row, to target, cluster, local bool) (reachable bool) {
	var used Members
	if cluster {
		used |= InCluster
	}
	if local {
		used |= InLocal
	}
	list := t.candidatesOf(from, to, r)
	if t.backends == nil {
		t.backends = make([]Backend, 0, len(list))
	}
	quarantined := false
	if len(t.facts.Overrides) > 0 {
		list, quarantined = override(list, t.facts.Overrides, d.Name.NamespacedName, r.merged != nil)
	}
	e := newEligibility(list, t.facts.Zone, quarantined)
	weight := uint16(0) // of the first backend
	for i := range list {
		c := &list[i]
		members := e.members(c)
		reachable = reachable || members&InCluster != 0
		members &= used
		if members == 0 && !t.keeps(to.protocol, c) {
			continue
		}
		t.backends = append(t.backends, c.backend(members))
		if members != 0 && weight == 0 {
			weight = c.from.weight
		}
		d.Weighted = d.Weighted || members != 0 && c.from.weight != weight
	}
	return reachable
}

// keeps reports whether current clients keep a backend that gets no new ones. UDP clients do
// while it serves. TCP backends need not be kept, as their connections continue without a
// decision, unless a tier ends connections to unknown backends.
func (t *Table) keeps(protocol Protocol, c *candidate) bool {
	return protocol == UDP && c.is(serving) || protocol == TCP && t.policy.KeepTCP
}

func (t *Table) insert(r row) {
	if n := len(t.free); n > 0 {
		r.decision.index, t.free = t.free[n-1], t.free[:n-1]
		t.rows[r.decision.index] = r
		return
	}
	r.decision.index = uint32(len(t.rows))
	t.rows = append(t.rows, r)
}

func (t *Table) remove(d *Decision, disputes []frontendKey) []frontendKey {
	disputes = t.release(d, nil, disputes)
	t.rows[d.index] = row{}
	t.freed = append(t.freed, d.index)
	return disputes
}
