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

// AtNodes is a service port that ServiceLB serves.
type AtNodes struct {
	*Decision
	Port uint16
	// Asked are the addresses in the status, and those that are to be probed, sorted. They belong to the table.
	Asked []netip.Addr
}

// At returns the frontend of an address that was asked for; nil if there is none on this node.
func (a *AtNodes) At(addr netip.Addr) *Frontend {
	for i := range a.Frontends {
		if f := &a.Frontends[i]; f.Kind == LoadBalancer && f.Addr.Addr() == addr {
			return f
		}
	}
	return nil
}

// AtNodes returns the service ports that ServiceLB serves, sorted by their names.
func (t *Table) AtNodes() (list []AtNodes) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for e := range t.atNodes {
		s := e.decided.service
		var asked []netip.Addr
		if s.More != nil {
			asked = s.More.LoadBalancerIPs
		}
		for i, index := range e.ports { // in the order of the Service's ports
			list = append(list, AtNodes{t.rows[index].decision, s.Ports[i].Port, asked})
		}
	}
	slices.SortFunc(list, func(a, b AtNodes) int { return a.Name.compare(b.Name) })
	return list
}
