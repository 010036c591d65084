// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"net/netip"
	"slices"
	"time"
	"unsafe"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/maglev"
)

// FrontendEntry is an entry of the frontend map.
type FrontendEntry struct {
	Key   FrontendKey
	Value FrontendValue
}

// KeyOf is the key of a frontend of a decision.
func KeyOf(d *proxier.Decision, i int) FrontendKey {
	f := &d.Frontends[i]
	key := FrontendKey{Addr: FromAddr(f.Addr.Addr()), Port: NetworkPort(f.Addr.Port()), Proto: uint8(d.Name.Protocol), Scope: ScopeAddress}
	switch {
	case f.Kind.Wildcard():
		key.Scope = ScopeNode
	case f.Addr.Addr().IsLoopback():
		key.Scope = ScopeHost
	}
	return key
}

// NewFrontend is the entry of a frontend.
func NewFrontend(d *proxier.Decision, i int, service uint32) FrontendEntry {
	return NewFrontendEntry(KeyOf(d, i), FrontendValue{
		Service: service, Flags: frontendFlags(d, &d.Frontends[i]), Affinity: uint32(d.Affinity / time.Second),
	})
}

func frontendFlags(d *proxier.Decision, f *proxier.Frontend) uint32 {
	flags := uint32(f.Kind) << FrontendKindShift
	if d.Affinity > 0 && d.Balancing.Algorithm == proxier.Maglev {
		flags |= FrontendByClient
	}
	for origin, r := range f.Routes {
		route := uint32(0)
		if r.Set.Local() {
			route |= RouteLocal
		}
		switch r.Source {
		case proxier.Masquerade:
			route |= RouteMasquerade
		case proxier.AnySource:
			route |= RouteAnySource
		}
		if r.Direct {
			route |= RouteDirect
		}
		flags |= route << (origin * RouteBits)
	}
	if f.Left != nil { // those of sockets are not in the map
		flags |= FrontendLeft
	}
	if !f.Filtered {
		return flags
	}
	flags |= FrontendFiltered
	if f.RejectOthers {
		flags |= FrontendReject
	}
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

// OwnPrefix is the prefix of nothing but the frontend's own address.
func OwnPrefix(f *proxier.Frontend) netip.Prefix {
	return netip.PrefixFrom(f.Addr.Addr(), f.Addr.Addr().BitLen())
}

// PortBit is the number of the bit in tdm_port that reports whether a port has frontends.
func PortBit(k *FrontendKey) uint32 {
	bit := uint32(ToAddrPort(k.Addr, k.Port).Port())
	if proxier.Protocol(k.Proto) == proxier.UDP {
		bit += 64 * PortWords / 2
	}
	return bit
}

// Decode is the frontend of an entry, without its source ranges.
func (f *FrontendEntry) Decode() proxier.Frontend {
	addr := ToAddrPort(f.Key.Addr, f.Key.Port)
	family := proxier.FamilyOf(addr.Addr())
	out := proxier.Frontend{Addr: addr, Kind: proxier.Kind(f.Value.Flags >> FrontendKindShift), Filtered: f.Value.Flags&FrontendFiltered != 0, RejectOthers: f.Value.Flags&FrontendReject != 0}
	for origin := range out.Routes {
		out.Routes[origin] = f.Value.route(family, proxier.Origin(origin))
	}
	return out
}

func (v *FrontendValue) route(family proxier.Family, origin proxier.Origin) (r proxier.Route) {
	bits := v.Flags >> (uint32(origin) * RouteBits)
	r.Set = proxier.SetOf(family, bits&RouteLocal != 0)
	switch {
	case bits&RouteMasquerade != 0:
		r.Source = proxier.Masquerade
	case bits&RouteAnySource != 0:
		r.Source = proxier.AnySource
	}
	r.Direct = bits&RouteDirect != 0
	return r
}

// keyWords are a frontend's key as the programs load it.
const keyWords = unsafe.Sizeof(FrontendKey{}) / 4

// The hash of connections is the checksum by which programs know that a value is complete, and belongs to its key.
var _ [1]struct{} = [maglev.HashFactor - CheckFactor + 1]struct{}{}

// frontendCheck is frontend_check() of bpf/frontend.h.
func frontendCheck(key *FrontendKey, value *FrontendValue) uint32 {
	var words [keyWords + 3]uint32
	*(*[keyWords]uint32)(words[:]) = *(*[keyWords]uint32)(unsafe.Pointer(key))
	words[keyWords], words[keyWords+1], words[keyWords+2] = value.Service, value.Flags, value.Affinity
	return maglev.Hash(words[:])
}

// NewFrontendEntry adds the checksum to the value.
func NewFrontendEntry(key FrontendKey, value FrontendValue) FrontendEntry {
	value.Check = frontendCheck(&key, &value)
	return FrontendEntry{Key: key, Value: value}
}

// IsWhole says that the checksum is right, without which programs ignore the entry.
func (f *FrontendEntry) IsWhole() bool { return f.Value.Check == frontendCheck(&f.Key, &f.Value) }
