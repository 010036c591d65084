// SPDX-License-Identifier: Apache-2.0

package nodefacts

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/tandem-proxy/tandem/proxier"
)

// ServiceCIDRs collects the ranges of all ServiceCIDR objects. As in upstream, a range counts
// before its object is ready, and until the object is deleted.
type ServiceCIDRs struct {
	mu      sync.Mutex
	objects map[string][]netip.Prefix
}

// Set records the ranges of an object, or its deletion if there are none. It returns the ranges of
// all objects, sorted.
func (s *ServiceCIDRs) Set(name string, cidrs []string) []netip.Prefix {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []netip.Prefix
	for _, text := range cidrs {
		if p, err := proxier.ParseCIDR(text); err == nil { // the API server validates them
			list = append(list, p)
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

// Handler returns a function for OnServiceCIDR of a source. It updates the facts with each change.
func (s *ServiceCIDRs) Handler(update func(func(*proxier.Facts))) func(name string, cidrs []string) {
	return func(name string, cidrs []string) {
		all := s.Set(name, cidrs)
		update(func(f *proxier.Facts) { f.ServiceCIDRs = all })
	}
}
