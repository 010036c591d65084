// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Flow is a new connection, or the first datagram of one.
type Flow struct {
	// Source may lack a port: no decision depends on it.
	Source      netip.AddrPort
	Destination netip.AddrPort
	Protocol    Protocol
	// Device is where it came in; empty for one that this host sends.
	Device string
}

// Outcome is what happens to a flow on this node.
type Outcome uint8

// The outcomes.
const (
	Pass     Outcome = iota // no frontend matches: the packet continues unchanged
	Forward                 // to one of the eligible backends
	Rejected                // the client gets an error at once
	Dropped                 // packets are dropped silently
)

func (o Outcome) String() string { return [...]string{"pass", "forward", "reject", "drop"}[o] }

// Explanation is what happens to a flow, and why.
type Explanation struct {
	Flow    Flow
	Facts   Facts // it was decided by
	Origin  Origin
	Outcome Outcome
	// Reason is the outcome in words.
	Reason string
	// Decision and Frontend that matched; nil for none.
	Decision *Decision
	Frontend *Frontend
	// Route that the frontend has for the origin.
	Route Route
	// Endpoints are all that were considered for it, sorted by address.
	Endpoints []Judgement
	// Rivals are service ports that claim the same address and do not get it.
	Rivals []ServicePortName
}

// Judgement says why an endpoint is eligible, or is not.
type Judgement struct {
	Backend
	Slice string
	// Cluster and Local say why it is in these sets, or why not.
	Cluster, Local Why
	// Duplicate says that another copy of the same address and port is used.
	Duplicate bool
	// Hairpin says that it is the client itself: its connection is masqueraded if it passes
	// through the network.
	Hairpin bool
}

// In reports whether the endpoint is in a set.
func (j *Judgement) In(s Set) bool { return !j.Duplicate && j.why(s).In() }

func (j *Judgement) why(s Set) Why {
	if s.Local() {
		return j.Local
	}
	return j.Cluster
}

// Explain says what happens to a flow.
func (t *Table) Explain(flow Flow) Explanation {
	t.mu.RLock()
	defer t.mu.RUnlock()
	source, to := flow.Source.Addr(), flow.Destination
	e := Explanation{Flow: flow, Facts: t.facts, Origin: t.facts.Origin(source, flow.Device)}

	index, how := t.lookup(to, flow.Protocol, e.Origin)
	if index < 0 {
		e.Reason = how
		if !t.facts.isLocal(to.Addr()) && slices.ContainsFunc(t.rules.Unserved, func(p netip.Prefix) bool { return p.Contains(to.Addr()) }) {
			e.Outcome, e.Reason = Rejected, "no Service has this port at this address, which is in a range of ClusterIPs"
		}
		return e
	}
	r := &t.rows[index]
	e.Decision = r.decision
	i := r.decision.find(to)
	if i < 0 {
		i = r.decision.find(nodePortAddr(to))
	}
	f := &r.decision.Frontends[i]
	if f.Kind.External() {
		e.Origin = t.facts.ExternalOrigin(source, flow.Device)
	}
	e.Frontend, e.Route = f, f.Routes[e.Origin]
	for _, other := range t.contested[keyOf(f.Addr, flow.Protocol)] {
		if other != uint32(index) {
			e.Rivals = append(e.Rivals, t.rows[other].decision.Name)
		}
	}
	e.Endpoints = t.judge(r, FamilyOf(to.Addr()))
	eligible := false
	for i := range e.Endpoints {
		j := &e.Endpoints[i]
		if j.In(e.Route.Set) {
			eligible, j.Hairpin = true, j.Addr.Addr() == source
		}
	}
	switch {
	case !f.Admits(source):
		if e.Outcome, e.Reason = Dropped, "loadBalancerSourceRanges do not admit the source"; f.RejectOthers {
			e.Outcome = Rejected
		}
	case eligible:
		e.Outcome, e.Reason = Forward, how
	case r.decision.Empty[e.Route.Set] == Drop:
		e.Outcome, e.Reason = Dropped, "a Local traffic policy applies and no endpoint is on this node"
	default:
		e.Outcome, e.Reason = Rejected, "no endpoint takes connections"
	}
	return e
}

func nodePortAddr(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(unspecified[FamilyOf(a.Addr())], a.Port())
}

// lookup finds the frontend that a destination belongs to, as every tier has
// to: its own address first, then the NodePorts. It returns -1 for none.
func (t *Table) lookup(to netip.AddrPort, protocol Protocol, from Origin) (index int, how string) {
	if index, ok := t.owner[keyOf(to, protocol)]; ok && !to.Addr().IsUnspecified() && (!to.Addr().IsLoopback() || from == FromHost) {
		return int(index), "the address is a frontend"
	}
	index32, ok := t.owner[keyOf(nodePortAddr(to), protocol)]
	switch {
	case !ok:
		return -1, "no frontend has this address and port"
	case !t.rules.servesNodePort(to.Addr(), from):
		return -1, fmt.Sprintf("a %s has this number, but NodePorts are not served at this address", t.wildcardKind(index32, to))
	}
	return int(index32), fmt.Sprintf("the port is a %s and the address is one of this node's at which NodePorts are served", t.wildcardKind(index32, to))
}

// wildcardKind is the kind of the frontend of a service port that has the number at all addresses of this node.
func (t *Table) wildcardKind(index uint32, to netip.AddrPort) Kind {
	d := t.rows[index].decision
	return d.Frontends[d.find(nodePortAddr(to))].Kind
}

// judge returns for each endpoint of a service port why it is in which set.
func (t *Table) judge(r *row, family Family) []Judgement {
	d := r.decision
	all := collect(nil, r.of.decided.slices, target{d.Name.Port, d.Name.Protocol, family})
	kept, quarantined := override(collapse(slices.Clone(all)), t.facts.Overrides, d.Name.NamespacedName, false)
	all, _ = override(all, t.facts.Overrides, d.Name.NamespacedName, false)
	e := newEligibility(kept, t.facts.Zone, quarantined)
	out := make([]Judgement, 0, len(all))
	for i := range all {
		c := &all[i]
		for len(kept) > 0 && kept[0].addr.Compare(c.addr) < 0 {
			kept = kept[1:]
		}
		j := Judgement{
			Backend: c.backend(0),
			Slice:   c.from.Name, Cluster: e.cluster(c), Local: e.local(c),
		}
		if len(kept) > 0 && kept[0].addr == c.addr && kept[0] == *c {
			kept = kept[1:]
			j.Members = e.members(c)
		} else {
			j.Duplicate = true
		}
		out = append(out, j)
	}
	return out
}

// text is the judgement of the sets that are used, as text.
func (j *Judgement) text(cluster, local bool) string {
	var b strings.Builder
	b.WriteString(j.Addr.String())
	if j.Duplicate {
		b.WriteString(" duplicate")
		return b.String()
	}
	if j.Weight != DefaultWeight {
		fmt.Fprintf(&b, " weight=%d", j.Weight)
	}
	if cluster {
		fmt.Fprintf(&b, " cluster=%s", inOut(j.Cluster))
	}
	if local {
		fmt.Fprintf(&b, " local=%s", inOut(j.Local))
	}
	return b.String()
}

func inOut(w Why) string {
	if w.In() {
		return "in:" + w.String()
	}
	return "out:" + w.String()
}

// Dump is the whole table as text, sorted by name: every service port with its
// frontends, and every endpoint with the reason why it is in a set or is not.
func (t *Table) Dump() string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	rows := make([]*row, 0, len(t.rows))
	for i := range t.rows {
		if t.rows[i].decision != nil {
			rows = append(rows, &t.rows[i])
		}
	}
	slices.SortFunc(rows, func(a, b *row) int { return a.decision.Name.compare(b.decision.Name) })
	var b strings.Builder
	for _, r := range rows {
		d := r.decision
		d.head(&b)
		used := d.Uses()
		for family := range Families {
			cluster, local := used[SetOf(family, false)], used[SetOf(family, true)]
			if !cluster && !local {
				continue
			}
			for _, j := range t.judge(r, family) {
				fmt.Fprintf(&b, "  endpoint %s\n", j.text(cluster, local))
			}
		}
	}
	for _, name := range sortedNames(t.health) {
		h := t.health[name]
		fmt.Fprintf(&b, "healthcheck %s port=%d ipv4=%d ipv6=%d\n", name, h.Port, h.Ready[IPv4], h.Ready[IPv6])
	}
	return b.String()
}
