// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"net/netip"
	"slices"
)

// loadBalancerIPs are the addresses at which a Service of type LoadBalancer is served, sorted, and a function that reports which of them were
// asked for. ServiceLB writes addresses of nodes into the status; a node of those serves the Service at its own address too if a
// router translates the one in the status, and at all addresses of its uplinks unless an annotation selects some.
func (t *Table) loadBalancerIPs(s *Service, family Family) (list []netip.Addr, asked func(netip.Addr) bool) {
	inStatus := s.More.LoadBalancerIPs
	asked = func(a netip.Addr) bool {
		_, found := slices.BinarySearchFunc(inStatus, a, netip.Addr.Compare)
		return found
	}
	if !s.AtNodes {
		return inStatus, asked
	}
	var derived []netip.Addr
	add := func(a netip.Addr) {
		if a.IsValid() && FamilyOf(a) == family && a.IsGlobalUnicast() && !asked(a) && !slices.Contains(derived, a) {
			derived = append(derived, a)
		}
	}
	translated := slices.ContainsFunc(t.facts.translatedIPs(), asked)
	if translated {
		add(t.facts.NodeIPs[family])
	}
	if s.AllAddresses && (translated || slices.ContainsFunc(inStatus, t.facts.isLocal)) {
		for _, a := range t.facts.UplinkAddrs {
			add(a.Addr)
		}
	}
	if derived == nil {
		return inStatus, asked
	}
	list = append(derived, inStatus...)
	slices.SortFunc(list, netip.Addr.Compare)
	return list, asked
}

// addressedAlike reports whether Services of ServiceLB are decided alike with both facts.
func (f *Facts) addressedAlike(o *Facts) bool {
	return slices.Equal(f.UplinkAddrs, o.UplinkAddrs) && slices.Equal(f.LocalAddrs, o.LocalAddrs)
}

// AtNodes returns the decisions about the Services that ServiceLB serves.
func (t *Table) AtNodes() (list []*Decision) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for e := range t.atNodes {
		for _, index := range e.ports {
			list = append(list, t.rows[index].decision)
		}
	}
	slices.SortFunc(list, func(a, b *Decision) int { return a.Name.compare(b.Name) })
	return list
}
