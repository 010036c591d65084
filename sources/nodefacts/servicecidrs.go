// SPDX-License-Identifier: Apache-2.0

package nodefacts

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/tandem-proxy/tandem/proxier"
)

// ServiceCIDRs collects the ranges of all ServiceCIDR objects. A range counts
// before its object is ready, and until it is gone, as it does upstream.
type ServiceCIDRs struct {
	mu      sync.Mutex
	objects map[string][]netip.Prefix
}

// Set takes an object over, without ranges for one that is gone, and returns
// the ranges of all, sorted.
func (s *ServiceCIDRs) Set(name string, cidrs []string) []netip.Prefix {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []netip.Prefix
	for _, text := range cidrs {
		if p, err := netip.ParsePrefix(text); err == nil && !p.Addr().Is4In6() { // the API server validates them
			list = append(list, p.Masked())
		}
	}
	if s.objects == nil {
		s.objects = map[string][]netip.Prefix{}
	}
	if len(list) == 0 {
		delete(s.objects, name)
	} else {
		s.objects[name] = list
	}
	var all []netip.Prefix
	for _, list := range s.objects {
		all = append(all, list...)
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

// FeedTo makes what a source calls for each ServiceCIDR a change of the facts.
func (s *ServiceCIDRs) FeedTo(update func(func(*proxier.Facts))) func(name string, cidrs []string) {
	return func(name string, cidrs []string) {
		all := s.Set(name, cidrs)
		update(func(f *proxier.Facts) { f.ServiceCIDRs = all })
	}
}
