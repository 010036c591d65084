// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// subject is what is tested: a tracker and a table, and a mirror that stores their changes.
type subject interface {
	handler
	setFacts(proxier.Facts)
	sync()
	table() *proxier.Table
	mirror() *mirror
	testedTier() Tier // nil for none
}

// direct drives tracker and table as the proxier does.
type direct struct {
	tracker *proxier.ChangeTracker
	t       *proxier.Table
	m       mirror
	facts   proxier.Facts
}

func newDirect(h *history) *direct {
	d := &direct{tracker: proxier.NewChangeTracker(ownNode, time.Time{}, nil), t: proxier.NewTable(h.facts, h.policy), facts: h.facts}
	d.m = mirror{decisions: map[uint32]*proxier.Decision{}, rules: d.t.NodeRules()}
	return d
}

func (d *direct) OnServiceAdd(s *v1.Service)                      { d.tracker.UpdateService(s) }
func (d *direct) OnServiceUpdate(_, s *v1.Service)                { d.tracker.UpdateService(s) }
func (d *direct) OnServiceDelete(s *v1.Service)                   { d.tracker.DeleteService(nameOf(s)) }
func (d *direct) OnServiceSynced()                                {}
func (d *direct) OnEndpointSliceAdd(s *discoveryv1.EndpointSlice) { d.tracker.UpdateEndpointSlice(s) }
func (d *direct) OnEndpointSliceUpdate(old, s *discoveryv1.EndpointSlice) {
	if old.Labels[discoveryv1.LabelServiceName] != s.Labels[discoveryv1.LabelServiceName] {
		d.tracker.DeleteEndpointSlice(old)
	}
	d.tracker.UpdateEndpointSlice(s)
}
func (d *direct) OnEndpointSliceDelete(s *discoveryv1.EndpointSlice) {
	d.tracker.DeleteEndpointSlice(s)
}
func (d *direct) OnEndpointSlicesSynced() {}

func (d *direct) setFacts(f proxier.Facts) { d.facts = f }
func (d *direct) table() *proxier.Table    { return d.t }
func (d *direct) mirror() *mirror          { return &d.m }
func (d *direct) testedTier() Tier         { return nil }

func (d *direct) sync() {
	rules, services := d.t.SetFacts(d.facts)
	changes := d.tracker.Take
	if services {
		changes = d.tracker.TakeAll
	}
	d.m.apply(d.t.Apply(changes()))
	if rules {
		d.m.rules = d.t.NodeRules()
	}
	if d.tracker.Pending() {
		d.m.wrong = append(d.m.wrong, errors.New("changes are pending after all were taken"))
	}
}

// whole is a proxier. Its tier is the mirror, which passes updates on to a tested tier if
// there is one.
type whole struct {
	*proxier.Proxier
	m    mirror
	tier Tier
}

var _, _ subject = (*direct)(nil), (*whole)(nil)

func newWhole(h *history, tested Tier) *whole {
	w := &whole{m: mirror{decisions: map[uint32]*proxier.Decision{}}, tier: tested}
	p, err := proxier.New(proxier.Options{NodeName: ownNode, Facts: h.facts, Policy: h.policy, Tier: tier{w}})
	if err != nil {
		panic(err)
	}
	w.Proxier = p
	return w
}

func (w *whole) setFacts(f proxier.Facts) { w.UpdateFacts(func(have *proxier.Facts) { *have = f }) }
func (w *whole) table() *proxier.Table    { return w.Table() }
func (w *whole) mirror() *mirror          { return &w.m }
func (w *whole) testedTier() Tier         { return w.tier }

func (w *whole) sync() {
	w.OnServiceSynced()
	w.OnEndpointSlicesSynced()
	if err := w.Proxier.Sync(context.Background()); err != nil {
		w.m.wrong = append(w.m.wrong, err)
	}
}

// tier applies updates to the mirror, and passes them on.
type tier struct{ w *whole }

func (t tier) Sync(ctx context.Context, u proxier.Update) error {
	m := &t.w.m
	if u.NodeRules != nil {
		m.rules = *u.NodeRules
	}
	m.apply(slices.DeleteFunc(slices.Clone(u.Changes), func(c proxier.PortChange) bool {
		return u.Full && c.Old == nil && c.New == m.decisions[c.New.Index()] // not a change
	}))
	if t.w.tier == nil {
		return nil
	}
	return t.w.tier.Sync(ctx, u)
}

func (t tier) Cleanup(context.Context) error                       { return nil }
func (t tier) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

// mirror stores the changes that a table reports, as a tier does.
type mirror struct {
	decisions map[uint32]*proxier.Decision
	rules     proxier.NodeRules
	wrong     []error
}

func (m *mirror) apply(changes []proxier.PortChange) {
	for _, c := range changes {
		i := c.Index()
		if have := m.decisions[i]; have != c.Old {
			m.wrong = append(m.wrong, fmt.Errorf("change of %d: the old decision is\n%v\nbut earlier changes led to\n%v", i, c.Old, have))
		}
		switch {
		case c.New == nil && c.Old == nil:
			m.wrong = append(m.wrong, errors.New("a change from nothing to nothing"))
		case c.New == nil:
			delete(m.decisions, i)
			continue
		case c.Old != nil && sameDecision(c.Old, c.New):
			m.wrong = append(m.wrong, fmt.Errorf("a change without a difference:\n%v", c.New))
		case c.New.Index() != i:
			m.wrong = append(m.wrong, fmt.Errorf("change of %d has a new decision with index %d", i, c.New.Index()))
		}
		m.decisions[i] = c.New
	}
}

// check compares with the whole table.
func (m *mirror) check(table *proxier.Table) error {
	all := table.All()
	if len(all) != len(m.decisions) || table.Len() != len(all) {
		m.wrong = append(m.wrong, fmt.Errorf("%d service ports by the changes, %d in the table, whose length is %d", len(m.decisions), len(all), table.Len()))
	}
	for _, c := range all {
		have := m.decisions[c.New.Index()]
		if have == nil || have != c.New && !sameDecision(have, c.New) {
			m.wrong = append(m.wrong, fmt.Errorf("a change was not reported: have\n%v\nwant\n%v", have, c.New))
		}
	}
	if rules := table.NodeRules(); !m.rules.Equal(&rules) {
		m.wrong = append(m.wrong, fmt.Errorf("a change of the node rules was not reported: have\n%+v\nwant\n%+v", m.rules, rules))
	}
	return errors.Join(m.wrong...)
}

func sameDecision(a, b *proxier.Decision) bool {
	return a.String() == b.String() && a.Name == b.Name && a.UID == b.UID && a.Created == b.Created && a.Affinity == b.Affinity && a.Empty == b.Empty &&
		reflect.DeepEqual(a.Frontends, b.Frontends) && slices.Equal(a.Backends, b.Backends)
}

// ask answers only from the decisions, as a kernel does.
func (m *mirror) ask(flow proxier.Flow, localAddrs []netip.Addr) string {
	src, dst := flow.Source.Addr(), flow.Destination
	f := family(dst.Addr())
	origin := proxier.FromOutside
	if src.IsLoopback() || slices.Contains(localAddrs, src) {
		origin = proxier.FromHost
	}
	external := origin
	if m.rules.Pods.Local(src, flow.Device) {
		origin = proxier.FromPod
		if m.rules.Pods.Interface != "" || !slices.Contains(m.rules.Uplinks, flow.Device) {
			external = origin
		}
	}
	find := func(addr netip.AddrPort) (*proxier.Decision, *proxier.Frontend) {
		for _, d := range m.decisions {
			for i := range d.Frontends {
				if f := &d.Frontends[i]; f.Addr == addr && d.Name.Protocol == flow.Protocol && f.Conflict == nil {
					return d, f
				}
			}
		}
		return nil, nil
	}
	var d *proxier.Decision
	var fe *proxier.Frontend
	if !dst.Addr().IsUnspecified() {
		d, fe = find(dst)
	}
	if d == nil {
		served := slices.Contains(m.rules.NodePortAddrs, dst.Addr())
		if dst.Addr().IsLoopback() {
			served = origin == proxier.FromHost && slices.ContainsFunc(m.rules.Loopback[f], func(p netip.Prefix) bool { return p.Contains(dst.Addr()) })
		}
		if m.rules.AllNodePortAddrs[f] && !dst.Addr().IsLoopback() && served != slices.Contains(localAddrs, dst.Addr()) {
			return "AllNodePortAddrs is not what NodePortAddrs say"
		}
		if served {
			d, fe = find(netip.AddrPortFrom(unspecified(f), dst.Port()))
		}
	}
	if d == nil {
		if !slices.Contains(localAddrs, dst.Addr()) && slices.ContainsFunc(m.rules.Unserved, func(p netip.Prefix) bool { return p.Contains(dst.Addr()) }) {
			return head(origin, proxier.Rejected)
		}
		return head(origin, proxier.Pass)
	}
	if fe.Kind != proxier.ClusterIP {
		origin = external
	}
	route, outcome := fe.Routes[origin], proxier.Forward
	var backends []netip.AddrPort
	for _, b := range d.Backends {
		if family(b.Addr.Addr()) == route.Set.Family() && b.Members&route.Set.Member() != 0 {
			backends = append(backends, b.Addr)
		}
	}
	switch {
	case fe.Filtered && !slices.ContainsFunc(fe.Ranges, func(p netip.Prefix) bool { return p.Contains(src) }):
		if outcome, backends = proxier.Dropped, nil; fe.RejectOthers {
			outcome = proxier.Rejected
		}
	case len(backends) == 0 && d.Empty[route.Set] == proxier.Drop:
		outcome = proxier.Dropped
	case len(backends) == 0:
		outcome = proxier.Rejected
	}
	return head(origin, outcome) + body(d.Name, fe.Kind, d.Affinity, outcome, route.Source, backends)
}
