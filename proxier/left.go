// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// Left are connections to a frontend that netfilter of this host has to see before they are
// translated. A tier that translates earlier, at sockets or on devices, must leave them alone. One
// that translates in netfilter serves them like all others.
type Left struct {
	// Sockets says that this includes connections of this host and of its pods. Otherwise it
	// is those from outside alone, which do not come from a socket of this host.
	Sockets bool
	// Why is the reason in words.
	Why string
}

// LeftOf returns why connections of an origin are left to netfilter; empty if they are not.
func (f *Frontend) LeftOf(o Origin) string {
	if f.Left == nil || !f.Left.Sockets && o != FromOutside {
		return ""
	}
	return f.Left.Why
}

// IsLeft says that connections of all origins are left to netfilter.
func (f *Frontend) IsLeft() bool { return f.Left != nil && f.Left.Sockets }

// heldClusterIP is for a ClusterIP that a device of this node has, as NodeLocal DNSCache sets it
// up: rules exempt packets to it from translation, and the cache answers them. Other addresses
// of Services are on devices of nodes for other reasons: load balancer IPs that the node announces,
// node addresses as external IPs.
var heldClusterIP = &Left{Sockets: true, Why: "a device of this node has the ClusterIP, as with NodeLocal DNSCache: rules of the node decide what is translated"}

// Filter is a rule of this host that can drop packets before netfilter translates their destination, by
// what a client dialled: a preDNAT policy of a CNI, or rules of an operator in the tables raw and mangle.
type Filter struct {
	// Match has all packets that it can drop, and perhaps more.
	Match inet.Match
	// Where it is, for people.
	Where string
}

func (f *Filter) equal(o *Filter) bool { return f.Where == o.Where && f.Match.Equal(&o.Match) }

// Firewall drops forwarded packets to a pod unless netfilter has translated the connection: it goes by
// the status of connections, or it has an exception for what kube-proxy's rules have marked.
type Firewall struct {
	// Not are the families that it is not about.
	Not [Families]bool
	// Accepts are destinations that it forwards in any case.
	Accepts []netip.Prefix
	// Where it is, for people.
	Where string
}

func (f *Firewall) equal(o *Firewall) bool {
	return f.Not == o.Not && f.Where == o.Where && slices.Equal(f.Accepts, o.Accepts)
}

// accepts reports whether packets to an address are forwarded in any case.
func (f *Firewall) accepts(a netip.Addr) bool {
	return f.Not[FamilyOf(a)] || slices.ContainsFunc(f.Accepts, func(p netip.Prefix) bool { return p.Contains(a) })
}

// leave works out what of the connections to a service port is left to netfilter.
func (t *Table) leave(d *Decision) {
	var asLocal [Families]*Left // for backends on this node
	for family := range Families {
		asLocal[family] = t.leftForLocal(d, family)
	}
	for i := range d.Frontends {
		f := &d.Frontends[i]
		if f.Left = t.leftOf(f, d.Name.Protocol); f.Left == nil {
			f.Left = asLocal[FamilyOf(f.Addr.Addr())]
		}
		if f.Left == nil && t.policy.MasqueradeLocalBackends && f.Routes[FromOutside].Source == Masquerade && d.hasLocal(f.Routes[FromOutside].Set) {
			f.Left = masqueradedLocally
		}
	}
}

// masqueradedLocally is for Policy.MasqueradeLocalBackends: a packet that gets an address of this host
// as its source when it comes in would be dropped by the stack as martian.
var masqueradedLocally = &Left{Why: "ebpf.masqueradeLocalBackends: endpoints on this node see the node's address"}

func (d *Decision) hasLocal(s Set) bool {
	return slices.ContainsFunc(d.Backends, func(b Backend) bool { return b.Local && b.In(s) })
}

// leftForLocal reports whether a firewall drops packets from outside to a backend on this node. Backends
// with an address of this node are not forwarded to.
func (t *Table) leftForLocal(d *Decision, family Family) *Left {
	for i := range t.facts.Firewalls {
		firewall := &t.facts.Firewalls[i]
		for j := range d.Backends {
			b := &d.Backends[j]
			if a := b.Addr.Addr(); b.Local && FamilyOf(a) == family && !firewall.accepts(a) && !t.facts.isLocal(a) {
				return &Left{Why: "a firewall forwards only connections that netfilter translates: " + firewall.Where}
			}
		}
	}
	return nil
}

// leftOf says what of connections to a frontend is left to netfilter, whatever its backends.
func (t *Table) leftOf(f *Frontend, protocol Protocol) *Left {
	facts := &t.facts
	if !f.Kind.External() && facts.isLocal(f.Addr.Addr()) {
		return heldClusterIP
	}
	for i := range facts.Filters {
		if filter := &facts.Filters[i]; facts.drops(&filter.Match, f, protocol) {
			// Packets of pods pass it too. A ClusterIP is dialled from outside only where it
			// is routed to nodes.
			return &Left{Sockets: f.Kind.External(), Why: "it filters packets before DNAT: " + filter.Where}
		}
	}
	return nil
}

// drops reports whether packets to a frontend may be among those that a filter drops.
func (f *Facts) drops(m *inet.Match, frontend *Frontend, protocol Protocol) bool {
	if !frontend.Kind.Wildcard() {
		return m.Has(frontend.Addr, protocol)
	}
	family := FamilyOf(frontend.Addr.Addr())
	return m.HasPort(family, protocol, frontend.Addr.Port()) && (m.Destinations == nil ||
		slices.ContainsFunc(f.LocalAddrs, func(a netip.Addr) bool { return FamilyOf(a) == family && !a.IsLoopback() && m.Reaches(a) }))
}

// filtersAddresses says that filters depend on the addresses of this node.
func (f *Facts) filtersAddresses() bool {
	return len(f.Firewalls) > 0 || slices.ContainsFunc(f.Filters, func(filter Filter) bool { return filter.Match.Destinations != nil })
}

// movesLeft reports whether other addresses of this node change what is left to netfilter: if a device
// got or lost one of the ClusterIPs of the table, or if filters may be about such addresses.
func (t *Table) movesLeft(before, after []netip.Addr) bool {
	if slices.Equal(before, after) {
		return false
	}
	if t.facts.filtersAddresses() {
		return true
	}
	moved := difference(before, after)
	for i := range t.rows {
		d := t.rows[i].decision
		if d == nil {
			continue
		}
		for j := range d.Frontends {
			if f := &d.Frontends[j]; !f.Kind.External() && moved[f.Addr.Addr()] {
				return true
			}
		}
	}
	return false
}

// difference is what only one of two sorted lists has.
func difference(a, b []netip.Addr) map[netip.Addr]bool {
	only := map[netip.Addr]bool{}
	for _, lists := range [...][2][]netip.Addr{{a, b}, {b, a}} {
		for _, addr := range lists[0] {
			if _, both := slices.BinarySearchFunc(lists[1], addr, netip.Addr.Compare); !both {
				only[addr] = true
			}
		}
	}
	return only
}
