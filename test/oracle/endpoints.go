// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"net/netip"
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
)

// copyOf is an endpoint of one slice.
type copyOf struct {
	discoveryv1.Endpoint
	slice string
}

// endpoints are those of a service port in a family.
func (c *Cluster) endpoints(owner proxier.ServicePortName, f proxier.Family) map[netip.AddrPort]Endpoint {
	// Duplicates of an address and port count once (S22).
	counts := map[netip.AddrPort]copyOf{}
	copies := map[netip.AddrPort]int{}
	for _, slice := range c.slicesOf(owner.NamespacedName, f) {
		for _, p := range slice.Ports {
			if !usable(p) || *p.Name != owner.Port || protocolOf(p) != owner.Protocol {
				continue
			}
			for _, e := range slice.Endpoints {
				addr, ok := endpointAddr(e, f)
				if !ok {
					continue
				}
				at, e := netip.AddrPortFrom(addr, uint16(*p.Port)), copyOf{e, slice.Name}
				if copies[at] == 0 || better(e, counts[at]) {
					counts[at] = e
				}
				copies[at]++
			}
		}
	}

	// Topology considers only ready endpoints (S27).
	ready := 0
	byNode, byZone := true, c.Facts.Zone != ""
	thisNode, thisZone := false, false
	for _, e := range counts {
		if isReady(e.Endpoint) {
			ready++
			byNode = byNode && len(nodeHints(e)) > 0
			byZone = byZone && len(zoneHints(e)) > 0
			thisNode = thisNode || c.hintedNode(e)
			thisZone = thisZone || c.hintedZone(e)
		}
	}
	localReady := 0
	for _, e := range counts {
		if isReady(e.Endpoint) && c.onNode(e.Endpoint) {
			localReady++
		}
	}

	judged := map[netip.AddrPort]Endpoint{}
	for at, e := range counts {
		j := Endpoint{
			Slice: e.slice, Copies: copies[at],
			OnNode: c.onNode(e.Endpoint), Serving: isServing(e.Endpoint), Terminating: isTerminating(e.Endpoint),
		}
		j.Cluster = condition(e, ready) // S24
		if j.Cluster == proxier.Ready {
			switch {
			case byNode && thisNode:
				if !c.hintedNode(e) {
					j.Cluster = proxier.OtherNode
				}
			case byZone && thisZone:
				if !c.hintedZone(e) {
					j.Cluster = proxier.OtherZone
				}
			}
		}
		j.Local = condition(e, localReady) // S25
		if !j.OnNode {
			j.Local = proxier.Remote
		}
		judged[at] = j
	}
	return judged
}

// condition returns the role of an endpoint by its conditions and the number of ready endpoints.
func condition(e copyOf, ready int) proxier.Why {
	switch {
	case isReady(e.Endpoint):
		return proxier.Ready
	case !isTerminating(e.Endpoint):
		return proxier.NotReady
	case !isServing(e.Endpoint): // S26
		return proxier.NotServing
	case ready > 0:
		return proxier.Terminating
	}
	return proxier.StillServing
}

// better reports whether a copy of an endpoint takes precedence over another one: one that is
// not terminating, then a ready one, then a serving one, then the first one by the name of its
// slice.
func better(e, o copyOf) bool {
	switch {
	case isTerminating(e.Endpoint) != isTerminating(o.Endpoint):
		return isTerminating(o.Endpoint)
	case isReady(e.Endpoint) != isReady(o.Endpoint):
		return isReady(e.Endpoint)
	case isServing(e.Endpoint) != isServing(o.Endpoint):
		return isServing(e.Endpoint)
	}
	return e.slice < o.slice
}

// slicesOf returns the slices of a Service in a family (S02, S20).
func (c *Cluster) slicesOf(service types.NamespacedName, f proxier.Family) []*discoveryv1.EndpointSlice {
	want := discoveryv1.AddressTypeIPv4
	if f == proxier.IPv6 {
		want = discoveryv1.AddressTypeIPv6
	}
	var list []*discoveryv1.EndpointSlice
	for _, s := range c.Slices {
		_, headless := s.Labels[proxier.LabelHeadless]
		if !headless && s.AddressType == want && s.Namespace == service.Namespace &&
			s.Labels[discoveryv1.LabelServiceName] == service.Name {
			list = append(list, s)
		}
	}
	return list
}

// endpointAddr returns the only address of an endpoint that is used (S20).
func endpointAddr(e discoveryv1.Endpoint, f proxier.Family) (netip.Addr, bool) {
	if len(e.Addresses) == 0 {
		return netip.Addr{}, false
	}
	addr, err := parseAddr(e.Addresses[0])
	return addr, err == nil && plain(addr) && family(addr) == f
}

// usable reports whether a port of a slice can be served (S10).
func usable(p discoveryv1.EndpointPort) bool {
	if p.Name == nil || p.Port == nil {
		return false
	}
	_, valid := portNumber(*p.Port)
	return valid && protocolOf(p) != 0
}

func protocolOf(p discoveryv1.EndpointPort) proxier.Protocol {
	protocol, err := proxier.ParseProtocol(ptr.Deref(p.Protocol, ""))
	if err != nil {
		return 0
	}
	return protocol
}

// The conditions with their defaults (S21).
func isReady(e discoveryv1.Endpoint) bool       { return ptr.Deref(e.Conditions.Ready, true) }
func isServing(e discoveryv1.Endpoint) bool     { return ptr.Deref(e.Conditions.Serving, true) }
func isTerminating(e discoveryv1.Endpoint) bool { return ptr.Deref(e.Conditions.Terminating, false) }

// onNode reports whether an endpoint is on this node (S23).
func (c *Cluster) onNode(e discoveryv1.Endpoint) bool {
	return e.NodeName != nil && *e.NodeName == c.NodeName
}

func nodeHints(e copyOf) []discoveryv1.ForNode {
	if e.Hints == nil {
		return nil
	}
	return e.Hints.ForNodes
}

func zoneHints(e copyOf) []discoveryv1.ForZone {
	if e.Hints == nil {
		return nil
	}
	return e.Hints.ForZones
}

func (c *Cluster) hintedNode(e copyOf) bool {
	return slices.ContainsFunc(nodeHints(e), func(h discoveryv1.ForNode) bool { return h.Name == c.NodeName })
}

func (c *Cluster) hintedZone(e copyOf) bool {
	return slices.ContainsFunc(zoneHints(e), func(h discoveryv1.ForZone) bool { return h.Name == c.Facts.Zone })
}
