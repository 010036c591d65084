// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Source is the source address that a backend sees.
type Source uint8

// Source addresses. A connection of a backend to itself is masqueraded in any case, if it
// passes through the network.
const (
	// KeepSource shows the client.
	KeepSource Source = iota
	// Masquerade shows this node, or replies would not come back through it. A
	// tier that meets the replies of backends on this node anyway may show
	// those the client.
	Masquerade
	// AnySource is Masquerade for a tier that translates packets, as replies may
	// not come back through it otherwise; one that translates at the client's
	// socket has nothing to masquerade, and shows the client.
	AnySource
)

// HidesClient reports whether a tier that translates packets shows the backend this
// node in place of the client.
func (s Source) HidesClient() bool { return s != KeepSource }

func (s Source) String() string { return [...]string{"keep", "masquerade", "any-source"}[s] }

// Route is what a frontend does for one origin.
type Route struct {
	Set    Set
	Source Source
	// Direct lets backends on other nodes see the client and answer it from their node, where a tier can do that and their
	// node can too. Source is for where it cannot be done.
	Direct bool
}

// Frontend is an address and port that clients dial.
type Frontend struct {
	// Addr of a wildcard (Kind.Wildcard) has the unspecified address of its
	// family.
	Addr netip.AddrPort
	Kind Kind
	// Routes by Origin.
	Routes [Origins]Route
	// Filtered says that only sources in Ranges are admitted. Packets of others are
	// dropped, even if there is no backend, or rejected with RejectOthers.
	Filtered, RejectOthers bool
	// Pods and Host say whether the ranges admit local pods and this host, for tiers that
	// decide before there is a packet.
	Pods, Host Admission
	// Unguarded says that the Service has source ranges, but only of the other
	// family, so that all sources are admitted here.
	Unguarded bool
	// Derived says that no status has the address: it is another one of a node whose address is there. It gives way to
	// Services of the same kind that have the address.
	Derived bool
	Ranges  []netip.Prefix
	// Left are connections that have to reach netfilter untranslated; nil for none.
	Left *Left
	// Conflict names another service port that has this address. Until it releases the
	// address, this frontend is not served.
	Conflict *ServicePortName
}

// Admission is what source ranges say of many clients at once.
type Admission uint8

// The admissions.
const (
	AdmitsAll Admission = iota
	AdmitsSome
	AdmitsNone
)

// Admits reports whether the source ranges let a client in.
func (f *Frontend) Admits(source netip.Addr) bool {
	return !f.Filtered || slices.ContainsFunc(f.Ranges, func(p netip.Prefix) bool { return p.Contains(source) })
}

func (f *Frontend) equal(o *Frontend) bool {
	if (f.Conflict == nil) != (o.Conflict == nil) || f.Conflict != nil && *f.Conflict != *o.Conflict {
		return false
	}
	if (f.Left == nil) != (o.Left == nil) || f.Left != nil && *f.Left != *o.Left {
		return false
	}
	return f.Addr == o.Addr && f.Kind == o.Kind && f.Routes == o.Routes && f.Filtered == o.Filtered && f.RejectOthers == o.RejectOthers &&
		f.Derived == o.Derived && f.Pods == o.Pods && f.Host == o.Host && f.Unguarded == o.Unguarded && slices.Equal(f.Ranges, o.Ranges)
}

// String is the frontend as text: "10.96.0.1:80 ClusterIP all=ipv4/cluster".
func (f *Frontend) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", f.Addr, f.Kind)
	if f.Routes[FromPod] == f.Routes[FromHost] && f.Routes[FromHost] == f.Routes[FromOutside] {
		fmt.Fprintf(&b, " all=%s", f.Routes[FromPod])
	} else {
		for o := range Origins {
			fmt.Fprintf(&b, " %s=%s", o, f.Routes[o])
		}
	}
	if f.Filtered {
		b.WriteString(" ranges=")
		for i, p := range f.Ranges {
			if i > 0 {
				b.WriteByte(',')
			}
			b.WriteString(p.String())
		}
		if len(f.Ranges) == 0 {
			b.WriteString("none")
		}
		if f.RejectOthers {
			b.WriteString(" reject-others")
		}
	}
	if f.Derived {
		b.WriteString(" derived")
	}
	if f.Unguarded {
		b.WriteString(" unguarded")
	}
	if f.Left != nil {
		b.WriteString(" left=outside")
		if f.Left.Sockets {
			b.WriteString(",sockets")
		}
	}
	if f.Conflict != nil {
		fmt.Fprintf(&b, " held-by=%s", f.Conflict)
	}
	return b.String()
}

func (r Route) String() string {
	text := r.Set.String()
	if r.Source != KeepSource {
		text += "," + r.Source.String()
	}
	if r.Direct {
		text += ",direct"
	}
	return text
}

// frontendsOf appends the frontends of one service port in one family to out, sorted by
// kind and then address.
func (t *Table) frontendsOf(out []Frontend, s *Service, port *ServicePort, family Family) []Frontend {
	if s.IsPod {
		return t.hostPorts(out, s, port, family)
	}
	vip := s.ClusterIPs[family]
	if !vip.IsValid() {
		return out
	}
	if s.Kinds.has(ClusterIP) {
		out = append(out, Frontend{Addr: netip.AddrPortFrom(vip, port.Port), Kind: ClusterIP, Routes: t.clusterIPRoutes(s, family)})
	}
	if port.NodePort == 0 && s.More == nil || !s.More.external(t.facts.Labels) {
		return out
	}
	routes := t.externalRoutes(s, family)
	if s.More != nil {
		var template Frontend // without an address; set up for the first one
		served, asked := t.loadBalancerIPs(s, family)
		for _, a := range served {
			if FamilyOf(a) != family || a == vip && s.Kinds.has(ClusterIP) || !s.Kinds.has(LoadBalancer) {
				continue
			}
			if template.Kind != LoadBalancer {
				template = Frontend{Kind: LoadBalancer, Routes: routes}
				t.filter(&template, s.More, family)
			}
			f := template
			f.Addr, f.Derived = netip.AddrPortFrom(a, port.Port), !asked(a)
			f.admitSelf(t.facts.NodeIPs[family])
			f.admit(&t.facts, family)
			out = append(out, f)
		}
		if !t.policy.IgnoreExternalIPs && s.Kinds.has(ExternalIP) {
			for _, a := range s.More.ExternalIPs {
				_, isLB := slices.BinarySearchFunc(s.More.LoadBalancerIPs, a, netip.Addr.Compare)
				if FamilyOf(a) == family && !(a == vip && s.Kinds.has(ClusterIP)) && !(isLB && s.Kinds.has(LoadBalancer)) {
					out = append(out, Frontend{Addr: netip.AddrPortFrom(a, port.Port), Kind: ExternalIP, Routes: routes})
				}
			}
		}
	}
	if port.NodePort != 0 && s.Kinds.has(NodePort) {
		out = append(out, Frontend{Addr: netip.AddrPortFrom(unspecified[family], port.NodePort), Kind: NodePort, Routes: routes})
	}
	return out
}

var unspecified = [Families]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}

// clusterIPRoutes: one set for all clients, by internalTrafficPolicy; clients other
// than local pods are masqueraded, where pods are known.
func (t *Table) clusterIPRoutes(s *Service, family Family) (routes [Origins]Route) {
	for o := range Origins {
		routes[o].Set = SetOf(family, s.InternalLocal)
		if t.policy.MasqueradeAll || o != FromPod && t.facts.Pods.Knows(family) {
			routes[o].Source = Masquerade
		}
	}
	return routes
}

// externalRoutes returns the routes of all kinds but ClusterIPs. With
// externalTrafficPolicy: Local, pods and this host take a short cut: they use
// all endpoints, as no load balancer chose this node for them.
func (t *Table) externalRoutes(s *Service, family Family) [Origins]Route {
	cluster, local := SetOf(family, false), SetOf(family, true)
	if !s.ExternalLocal {
		return [Origins]Route{
			FromPod:     {Set: cluster, Source: AnySource},
			FromHost:    {Set: cluster, Source: Masquerade},
			FromOutside: {Set: cluster, Source: Masquerade},
		}
	}
	routes := [Origins]Route{
		FromPod:     {Set: cluster, Source: KeepSource},
		FromHost:    {Set: cluster, Source: Masquerade},
		FromOutside: {Set: local, Source: KeepSource},
	}
	if !t.facts.Pods.Knows(family) {
		routes[FromPod] = routes[FromOutside]
	}
	return routes
}

// filter sets the source ranges of one family. Upstream leaves a family open
// that no range speaks of, and so do we unless the policy is strict.
func (t *Table) filter(f *Frontend, x *ServiceExtras, family Family) {
	for _, p := range x.SourceRanges {
		if FamilyOf(p.Addr()) != family {
			continue
		}
		if p.Bits() == 0 {
			f.Ranges = nil
			return
		}
		f.Ranges = append(f.Ranges, p)
	}
	f.Filtered = len(f.Ranges) > 0 || x.InvalidRanges || t.policy.StrictSourceRanges && len(x.SourceRanges) > 0
	f.RejectOthers = f.Filtered && x.RejectOthers
	f.Unguarded = !f.Filtered && len(x.SourceRanges) > 0
}

// admitSelf lets in what this host sends to a load balancer IP that one of its
// own devices has: its source is that IP, where the ranges let the node in.
func (f *Frontend) admitSelf(node netip.Addr) {
	if !f.Filtered || !node.IsValid() || !f.Admits(node) || f.Admits(f.Addr.Addr()) {
		return
	}
	self := netip.PrefixFrom(f.Addr.Addr(), f.Addr.Addr().BitLen())
	f.Ranges = append(slices.Clip(slices.Clone(f.Ranges)), self)
	slices.SortFunc(f.Ranges, comparePrefix)
}

// admit works out Pods and Host. Pods are known by the detector's CIDRs alone;
// this host is known by the node's own address.
func (f *Frontend) admit(facts *Facts, family Family) {
	if !f.Filtered {
		return
	}
	f.Pods, f.Host = AdmitsSome, AdmitsNone
	if f.Admits(facts.NodeIPs[family]) {
		f.Host = AdmitsAll
	}
	if facts.Pods.Interface != "" || !facts.Pods.Knows(family) {
		return
	}
	all, none := true, true
	for _, pods := range facts.Pods.CIDRs {
		if FamilyOf(pods.Addr()) == family {
			all = all && slices.ContainsFunc(f.Ranges, func(p netip.Prefix) bool { return p.Bits() <= pods.Bits() && p.Contains(pods.Addr()) })
			none = none && !slices.ContainsFunc(f.Ranges, pods.Overlaps)
		}
	}
	switch {
	case all:
		f.Pods = AdmitsAll
	case none:
		f.Pods = AdmitsNone
	}
}

func comparePrefix(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}
