// SPDX-License-Identifier: Apache-2.0

package servicelb

import (
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// Planner decides again and again. It remembers what it decided about Services that have all that they want: while a Service, the fit nodes,
// and what these report of the Service are the same objects, so is the outcome. All others are decided anew. The zero Planner remembers nothing.
type Planner struct {
	fit     []fitNode
	settled map[types.UID]settled
	kept    map[types.UID]bool // since begin
}

// settled is an outcome, and what it depends on besides the fit nodes.
type settled struct {
	outcome Outcome
	known   []*nodereport.Service // by fit node
}

// begin begins a decision for these nodes.
func (p *Planner) begin(fit []fitNode) {
	if p.settled == nil || !slices.EqualFunc(p.fit, fit, func(a, b fitNode) bool { return a.alike(&b) }) {
		p.settled = map[types.UID]settled{}
	}
	p.fit, p.kept = fit, map[types.UID]bool{}
}

// alike reports whether decisions are alike for both, but for what they report of Services.
func (n *fitNode) alike(o *fitNode) bool {
	if n.Node != o.Node || (n.report == nil) != (o.report == nil) || !slices.Equal(n.hostPorts, o.hostPorts) {
		return false
	}
	return n.report == nil || slices.Equal(n.report.Addresses, o.report.Addresses) && slices.Equal(n.report.Listeners, o.report.Listeners) && n.report.NoListeners == o.report.NoListeners
}

// recall returns the outcome for a Service if it is known to be the same.
func (p *Planner) recall(d *decider, s *v1.Service) (Outcome, bool) {
	was, known := p.settled[s.UID]
	if !known || was.outcome.Service != s || !d.free() {
		return Outcome{}, false
	}
	name := nameOf(s)
	for i := range p.fit {
		if r := p.fit[i].report; r != nil && r.Services[name] != was.known[i] {
			return Outcome{}, false
		}
	}
	p.kept[s.UID] = true
	return was.outcome, true
}

// free reports whether no other Service wants the ports of the current one.
func (d *decider) free() bool {
	return !slices.ContainsFunc(d.ports, func(p wantedPort) bool { return p.contested || p.refused != nil })
}

// keep remembers an outcome if it depends on nothing else.
func (p *Planner) keep(d *decider, o *Outcome) {
	s := o.Service
	if d.volatile || !d.free() || len(o.Reasons)+len(o.Warnings)+len(o.Probing) > 0 || s.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal {
		return
	}
	now := settled{outcome: *o, known: make([]*nodereport.Service, len(p.fit))}
	name := nameOf(s)
	for i := range p.fit {
		if r := p.fit[i].report; r != nil {
			now.known[i] = r.Services[name]
		}
	}
	p.settled[s.UID], p.kept[s.UID] = now, true
}

// end forgets Services that are gone.
func (p *Planner) end() {
	maps.DeleteFunc(p.settled, func(uid types.UID, _ settled) bool { return !p.kept[uid] })
}
