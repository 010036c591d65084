// SPDX-License-Identifier: Apache-2.0

package staleudp

import (
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/proxier"
)

// index is what is known of UDP frontends. NodePorts have the unspecified address
// of their family, as in decisions.
type index struct {
	// ports are the UDP service ports, frontends those of their frontends that
	// are served.
	ports     map[proxier.ServicePortName]*proxier.Decision
	frontends map[netip.AddrPort]*proxier.Decision
	// gone are frontends that were served before, while there may be entries of them.
	gone [proxier.Families]map[netip.AddrPort]struct{}
	// dirty says that there may be entries of the family to delete. Another
	// backend beside those there are is no reason: it makes no entry wrong.
	dirty [proxier.Families]bool

	// opening are the TCP frontends of the first full update that have endpoints, until the
	// family is clean.
	opening [proxier.Families]map[netip.AddrPort]struct{}

	rules proxier.NodeRules
	// whole says that every service port there is has been seen.
	whole bool
}

func newIndex() *index {
	x := &index{ports: map[proxier.ServicePortName]*proxier.Decision{}, frontends: map[netip.AddrPort]*proxier.Decision{}}
	for f := range x.gone {
		x.gone[f] = map[netip.AddrPort]struct{}{}
	}
	return x
}

// observe takes over what changed.
func (x *index) observe(u *proxier.Update) {
	if u.NodeRules != nil {
		x.rules = *u.NodeRules
	}
	for _, c := range u.Changes {
		switch {
		case c.New == nil:
			x.replace(c.Old.Name, nil)
		case c.New.Name.Protocol == proxier.UDP:
			x.replace(c.New.Name, c.New)
		}
	}
	if u.Full {
		x.keepOnly(u.Changes)
		x.whole = true
	}
}

// keepOnly drops the service ports that the changes do not have.
func (x *index) keepOnly(changes []proxier.PortChange) {
	has := make(map[proxier.ServicePortName]struct{}, len(x.ports))
	for _, c := range changes {
		if c.New != nil && c.New.Name.Protocol == proxier.UDP {
			has[c.New.Name] = struct{}{}
		}
	}
	for name := range x.ports {
		if _, ok := has[name]; !ok {
			x.replace(name, nil)
		}
	}
}

// replace puts a decision in the place of the one with that name; nil for none.
func (x *index) replace(name proxier.ServicePortName, d *proxier.Decision) {
	was := x.ports[name]
	if was == d {
		return
	}
	if d == nil {
		delete(x.ports, name)
		d = &proxier.Decision{}
	} else {
		x.ports[name] = d
	}
	if was == nil {
		was = &proxier.Decision{}
	}
	// Those that stay are taken over before the others go: what is left of the
	// old decision afterwards has no frontend in the new one.
	for i := range d.Frontends {
		if f := &d.Frontends[i]; f.Conflict == nil {
			x.add(f.Addr, d)
		}
	}
	for i := range was.Frontends {
		if f := &was.Frontends[i]; x.frontends[f.Addr] == was {
			delete(x.frontends, f.Addr)
			x.retire(f.Addr)
		}
	}
	for family := range proxier.Families {
		if !x.dirty[family] {
			x.dirty[family] = lost(family, was, d)
		}
	}
}

func (x *index) add(frontend netip.AddrPort, d *proxier.Decision) {
	family := proxier.FamilyOf(frontend.Addr())
	// Also if it only came from another Service, whose backends are others.
	if was := x.frontends[frontend]; was == nil || was.Name != d.Name {
		x.dirty[family] = true
	}
	x.frontends[frontend] = d
}

// retire records a frontend as gone, unless a service port has it again.
func (x *index) retire(frontend netip.AddrPort) {
	family := proxier.FamilyOf(frontend.Addr())
	x.gone[family][frontend] = struct{}{}
	x.dirty[family] = true
}

// clean says that no entry of the family has to be deleted.
func (x *index) clean(family proxier.Family) {
	x.dirty[family] = false
	clear(x.gone[family])
	x.opening[family] = nil
}

// open records the TCP frontends that are served now, and were perhaps not before.
func (x *index) open(u *proxier.Update) {
	for f := range x.opening {
		x.opening[f] = map[netip.AddrPort]struct{}{}
	}
	for _, c := range u.Changes {
		if c.New == nil || c.New.Name.Protocol != proxier.TCP {
			continue
		}
		for i := range c.New.Frontends {
			f := &c.New.Frontends[i]
			family := proxier.FamilyOf(f.Addr.Addr())
			// Connections to an endpoint that has the frontend's own address look as if they were not translated.
			if f.Conflict == nil && serving(c.New, family) && !serves(c.New, f.Addr) {
				x.opening[family][f.Addr] = struct{}{}
				x.dirty[family] = true
			}
		}
	}
}

// tooEarly reports whether an entry is of a TCP connection that was not translated because nothing
// served its frontend yet. Its client repeats the SYN, or comes again from that port, and would not
// be translated either.
func (x *index) tooEarly(f *conntrack.Flow) bool {
	if f.Zone != 0 || f.Translated() {
		return false
	}
	to := f.Destination.Addr()
	family := proxier.FamilyOf(to)
	if _, ok := x.opening[family][f.Destination]; ok {
		return true
	}
	_, ok := x.opening[family][netip.AddrPortFrom(unspecified[family], f.Destination.Port())]
	return ok && x.local(to) && x.servesNodePorts(to)
}

// lost reports whether a change of backends can make entries wrong: those of a backend
// that is none any more, and those that were not translated for want of one.
func lost(family proxier.Family, was, is *proxier.Decision) bool {
	for i := range was.Backends {
		if a := was.Backends[i].Addr; proxier.FamilyOf(a.Addr()) == family && !serves(is, a) {
			return true
		}
	}
	return !serving(was, family) && serving(is, family)
}

// serves reports whether the address is one of the backends: of those that get new
// clients, and of those that keep the ones they have.
func serves(d *proxier.Decision, backend netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(d.Backends, backend, func(b proxier.Backend, a netip.AddrPort) int { return b.Addr.Compare(a) })
	return found
}

// serving reports whether new clients get a backend of the family.
func serving(d *proxier.Decision, family proxier.Family) bool {
	return slices.ContainsFunc(d.Backends, func(b proxier.Backend) bool {
		return b.Members != 0 && proxier.FamilyOf(b.Addr.Addr()) == family
	})
}

var unspecified = [proxier.Families]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}

// stale reports whether the current rules would not have created an entry, so that packets
// suffer from it. With exclusive, no other proxy serves ClusterIPs here.
func (x *index) stale(f *conntrack.Flow, exclusive bool) bool {
	if f.Protocol != proxier.UDP || f.Zone != 0 {
		return false
	}
	if d := x.frontends[f.Destination]; d != nil {
		return outdated(d, f)
	}
	to := f.Destination.Addr()
	family, local := proxier.FamilyOf(to), x.local(to)
	port := netip.AddrPortFrom(unspecified[family], f.Destination.Port())
	if d := x.frontends[port]; d != nil && local {
		// What was not translated where NodePorts are not served is the
		// business of a process on this host.
		return outdated(d, f) && (f.Translated() || x.servesNodePorts(to))
	}
	if !f.Translated() {
		return false
	}
	if x.isGone(f.Destination) || local && x.isGone(port) {
		return true
	}
	return exclusive && !local && slices.ContainsFunc(x.rules.Unserved, func(p netip.Prefix) bool { return p.Contains(to) })
}

func (x *index) isGone(frontend netip.AddrPort) bool {
	_, ok := x.gone[proxier.FamilyOf(frontend.Addr())][frontend]
	return ok
}

// outdated reports whether an entry of a frontend leads where it should not. One that
// leads nowhere is right while there is nowhere to go: its client is told, or not,
// by rules that ask for no translation. An endpoint may have the frontend's own address, and
// its entries look as if they were not translated.
func outdated(d *proxier.Decision, f *conntrack.Flow) bool {
	if serves(d, f.Replies) {
		return false
	}
	return f.Translated() || serving(d, proxier.FamilyOf(f.Destination.Addr()))
}

func (x *index) local(a netip.Addr) bool { return a.IsLoopback() || contains(x.rules.LocalAddrs, a) }

// servesNodePorts reports whether NodePorts are served at a local address.
func (x *index) servesNodePorts(a netip.Addr) bool {
	if a.IsLoopback() {
		return slices.ContainsFunc(x.rules.Loopback[proxier.FamilyOf(a)], func(p netip.Prefix) bool { return p.Contains(a) })
	}
	return contains(x.rules.NodePortAddrs, a)
}

func contains(sorted []netip.Addr, a netip.Addr) bool {
	_, found := slices.BinarySearchFunc(sorted, a, netip.Addr.Compare)
	return found
}
