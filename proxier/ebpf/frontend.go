// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"slices"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

type frontendEntry struct {
	key   frontendKey
	value frontendValue
}

func keyOf(d *proxier.Decision, i int) frontendKey {
	f := &d.Frontends[i]
	key := frontendKey{Addr: bpfAddr(f.Addr.Addr()), Port: bpfPort(f.Addr.Port()), Proto: uint8(d.Name.Protocol), Scope: ScopeAddress}
	if f.Kind == proxier.NodePort {
		key.Scope = ScopeNode
	}
	return key
}

// newFrontend is the entry of a frontend.
func newFrontend(d *proxier.Decision, i int, service uint32) frontendEntry {
	return makeFrontend(keyOf(d, i), frontendValue{
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
	if slices.Contains(f.Ranges, ownPrefix(f)) {
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

func ownPrefix(f *proxier.Frontend) netip.Prefix {
	return netip.PrefixFrom(f.Addr.Addr(), f.Addr.Addr().BitLen())
}

// set is the id of the set that clients of that origin are led to.
func (f *frontendEntry) set(origin proxier.Origin) uint32 {
	family := proxier.FamilyOf(goAddr(f.key.Addr))
	return f.value.Service*SetsPerService + uint32(f.value.route(family, origin).Set)
}

// frontend is what an entry says, but for its ranges.
func (f *frontendEntry) frontend() proxier.Frontend {
	addr := goAddrPort(f.key.Addr, f.key.Port)
	family := proxier.FamilyOf(addr.Addr())
	out := proxier.Frontend{Addr: addr, Kind: proxier.Kind(f.value.Flags >> FrontendKindShift), Filtered: f.value.Flags&FrontendFiltered != 0}
	for origin := range out.Routes {
		out.Routes[origin] = f.value.route(family, proxier.Origin(origin))
	}
	return out
}

func (v *frontendValue) route(family proxier.Family, origin proxier.Origin) (r proxier.Route) {
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
