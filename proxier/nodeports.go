// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"slices"
)

// NodePortSelector selects the local addresses at which NodePorts are served
// (nodePortAddresses). The zero value is "all, but not loopback".
type NodePortSelector struct {
	// CIDRs that an address has to be in; a family that has neither a CIDR nor
	// a keyword takes all its addresses.
	CIDRs []netip.Prefix
	// The keywords (Kubernetes 1.37); a keyword speaks for both families.
	Primary, Localhost, All bool
	// Loopback serves NodePorts at loopback addresses too, where those are
	// selected: to this host alone (iptables.localhostNodePorts).
	Loopback bool
}

// ParseNodePortSelector reads nodePortAddresses. The warnings say what an
// operator may not have meant.
func ParseNodePortSelector(list []string, loopback bool) (s NodePortSelector, warnings []string, err error) {
	s.Loopback = loopback
	for i, text := range list {
		switch text {
		case "primary":
			s.Primary = true
		case "localhost":
			s.Localhost = true
		case "all":
			s.All = true
		default:
			p, err := ParseCIDR(text)
			if err != nil {
				return s, nil, fmt.Errorf("nodePortAddresses[%d]: %w, nor one of primary, localhost, all", i, err)
			}
			s.CIDRs = append(s.CIDRs, p)
		}
	}
	for family := range Families {
		if len(list) > 0 && s.unset(family) {
			warnings = append(warnings, fmt.Sprintf("nodePortAddresses has no %s CIDR: NodePorts are served at all %s addresses", family, family))
		}
	}
	return s, warnings, nil
}

// unset reports whether the selector does not mention the family.
func (s *NodePortSelector) unset(family Family) bool {
	return !s.Primary && !s.Localhost && !s.All &&
		!slices.ContainsFunc(s.CIDRs, func(p netip.Prefix) bool { return FamilyOf(p.Addr()) == family })
}

// all reports whether every address of the family is selected.
func (s *NodePortSelector) all(family Family) bool {
	return s.All || s.unset(family) || slices.ContainsFunc(s.CIDRs, func(p netip.Prefix) bool { return p.Bits() == 0 && FamilyOf(p.Addr()) == family })
}

// Selects reports whether NodePorts are served at a local address that is not a
// loopback address, given the node's own addresses.
func (s *NodePortSelector) Selects(a netip.Addr, nodeIPs [Families]netip.Addr) bool {
	family := FamilyOf(a)
	return s.all(family) || s.Primary && a == nodeIPs[family] ||
		slices.ContainsFunc(s.CIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
}

// NodeRules are what all frontends of this node have in common.
type NodeRules struct {
	// NodeIPs are the node's address of each family; the zero Addr for none.
	NodeIPs [Families]netip.Addr
	// LocalAddrs are the addresses of this node's devices, sorted.
	LocalAddrs []netip.Addr
	// NodePortAddrs are the local addresses at which NodePorts are served,
	// sorted, without loopback addresses.
	NodePortAddrs []netip.Addr
	// AllNodePortAddrs says that these are all local addresses of the family.
	AllNodePortAddrs [Families]bool
	// HealthCheckAddrs are where health checks of Services are answered: at the unspecified
	// address of the family, or at the selected addresses of this node. Loopback addresses are
	// among them if they are selected, even if NodePorts are not served there.
	HealthCheckAddrs [Families][]netip.Addr
	// Loopback are the loopback addresses at which this host alone
	// reaches NodePorts.
	Loopback [Families][]netip.Prefix
	// Pods tells where FromPod applies; at external frontends it does not to what comes in
	// by Uplinks, unless the detector goes by devices itself (Facts.ExternalOrigin).
	Pods    Detector
	Uplinks []string
	// Unserved are the ranges of ClusterIPs: a new connection to an address and
	// port in them that is no frontend is rejected, also on a live ClusterIP, but
	// for addresses that one of this node's devices has.
	Unserved []netip.Prefix
}

// NodeRules are worked out from facts and policy alone.
func (p *Policy) NodeRules(f *Facts) NodeRules {
	r := NodeRules{NodeIPs: f.NodeIPs, LocalAddrs: f.LocalAddrs, Pods: f.Pods, Uplinks: f.Uplinks, Unserved: f.ServiceCIDRs}
	for _, a := range f.LocalAddrs {
		if !a.IsLoopback() && p.NodePorts.Selects(a, f.NodeIPs) {
			r.NodePortAddrs = append(r.NodePortAddrs, a)
		}
	}
	for family := range Families {
		r.AllNodePortAddrs[family] = p.NodePorts.all(family)
		r.Loopback[family] = p.NodePorts.loopback(family)
		r.HealthCheckAddrs[family] = p.NodePorts.healthCheckAddrs(f, family)
	}
	return r
}

func (s *NodePortSelector) healthCheckAddrs(f *Facts, family Family) (list []netip.Addr) {
	if s.all(family) {
		return []netip.Addr{unspecified[family]}
	}
	for _, a := range f.LocalAddrs {
		// A link-local address means nothing without its device.
		if FamilyOf(a) == family && !a.IsLinkLocalUnicast() && (s.Selects(a, f.NodeIPs) || s.Localhost && a.IsLoopback()) {
			list = append(list, a)
		}
	}
	return list
}

var loopbacks = [Families]netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}

// loopback are the selected loopback addresses of a family.
func (s *NodePortSelector) loopback(family Family) []netip.Prefix {
	all := loopbacks[family]
	switch {
	case s.Localhost, s.Loopback && s.all(family):
		return []netip.Prefix{all}
	case !s.Loopback:
		return nil
	}
	var some []netip.Prefix
	for _, p := range s.CIDRs {
		switch {
		case !p.Overlaps(all):
		case p.Bits() <= all.Bits():
			return []netip.Prefix{all}
		default:
			some = append(some, p)
		}
	}
	return some
}

// servesNodePort reports whether NodePorts are served at an address to clients of an origin.
func (r *NodeRules) servesNodePort(a netip.Addr, from Origin) bool {
	if a.IsLoopback() {
		return from == FromHost && slices.ContainsFunc(r.Loopback[FamilyOf(a)], func(p netip.Prefix) bool { return p.Contains(a) })
	}
	_, found := slices.BinarySearchFunc(r.NodePortAddrs, a, netip.Addr.Compare)
	return found
}

// Equal compares two NodeRules.
func (r *NodeRules) Equal(o *NodeRules) bool {
	for family := range Families {
		if !slices.Equal(r.Loopback[family], o.Loopback[family]) || !slices.Equal(r.HealthCheckAddrs[family], o.HealthCheckAddrs[family]) {
			return false
		}
	}
	return r.NodeIPs == o.NodeIPs && slices.Equal(r.LocalAddrs, o.LocalAddrs) && slices.Equal(r.NodePortAddrs, o.NodePortAddrs) && r.AllNodePortAddrs == o.AllNodePortAddrs &&
		r.Pods.equal(&o.Pods) && slices.Equal(r.Uplinks, o.Uplinks) && slices.Equal(r.Unserved, o.Unserved)
}
