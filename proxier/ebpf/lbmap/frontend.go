// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"net/netip"
	"slices"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

type FrontendEntry struct {
	Key   FrontendKey
	Value FrontendValue
}

func KeyOf(d *proxier.Decision, i int) FrontendKey {
	f := &d.Frontends[i]
	key := FrontendKey{Addr: FromAddr(f.Addr.Addr()), Port: NetworkPort(f.Addr.Port()), Proto: uint8(d.Name.Protocol), Scope: ScopeAddress}
	if f.Kind == proxier.NodePort {
		key.Scope = ScopeNode
	}
	return key
}

// NewFrontend is the entry of a frontend.
func NewFrontend(d *proxier.Decision, i int, service uint32) FrontendEntry {
	return NewFrontendEntry(KeyOf(d, i), FrontendValue{
		Service: service, Flags: frontendFlags(&d.Frontends[i]), Affinity: uint32(d.Affinity / time.Second),
	})
}

func frontendFlags(f *proxier.Frontend) uint32 {
	flags := uint32(f.Kind) << FrontendKindShift
	for origin, r := range f.Routes {
		route := uint32(0)
		if r.Set.Member() == proxier.InLocal {
			route |= RouteLocal
		}
		switch r.Source {
		case proxier.Masquerade:
			route |= RouteMasquerade
		case proxier.AnySource:
			route |= RouteAnySource
		}
		flags |= route << (origin * RouteBits)
	}
	if !f.Filtered {
		return flags
	}
	flags |= FrontendFiltered
	if slices.Contains(f.Ranges, OwnPrefix(f)) {
		flags |= FrontendSelf
	}
	switch f.Pods {
	case proxier.AdmitsAll:
		flags |= FrontendAllPods
	case proxier.AdmitsSome:
		flags |= FrontendSomePods
	}
	if f.Host == proxier.AdmitsAll {
		flags |= FrontendHost
	}
	return flags
}

func OwnPrefix(f *proxier.Frontend) netip.Prefix {
	return netip.PrefixFrom(f.Addr.Addr(), f.Addr.Addr().BitLen())
}

// SetID is the id of the set that clients of that origin are led to.
func (f *FrontendEntry) SetID(origin proxier.Origin) uint32 {
	family := proxier.FamilyOf(ToAddr(f.Key.Addr))
	return f.Value.Service*SetsPerService + uint32(f.Value.route(family, origin).Set)
}

// Decode is what an entry says, but for its ranges.
func (f *FrontendEntry) Decode() proxier.Frontend {
	addr := ToAddrPort(f.Key.Addr, f.Key.Port)
	family := proxier.FamilyOf(addr.Addr())
	out := proxier.Frontend{Addr: addr, Kind: proxier.Kind(f.Value.Flags >> FrontendKindShift), Filtered: f.Value.Flags&FrontendFiltered != 0}
	for origin := range out.Routes {
		out.Routes[origin] = f.Value.route(family, proxier.Origin(origin))
	}
	return out
}

func (v *FrontendValue) route(family proxier.Family, origin proxier.Origin) (r proxier.Route) {
	bits := v.Flags >> (uint32(origin) * RouteBits)
	r.Set = proxier.V4Cluster
	if family == proxier.IPv6 {
		r.Set = proxier.V6Cluster
	}
	if bits&RouteLocal != 0 {
		r.Set++
	}
	switch {
	case bits&RouteMasquerade != 0:
		r.Source = proxier.Masquerade
	case bits&RouteAnySource != 0:
		r.Source = proxier.AnySource
	}
	return r
}
