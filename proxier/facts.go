// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Facts are what decisions need to know of this node and its cluster. They
// change while the process runs.
type Facts struct {
	// Zone is the topology.kubernetes.io/zone label; empty where it has none.
	Zone string
	// Labels are those of the Node; nil if it is unknown. The map is immutable.
	Labels map[string]string
	// NodeIPs are the node's address of each family; the zero Addr for none.
	NodeIPs [Families]netip.Addr
	// ExternalIPs are the external addresses of the Node object, sorted. A device of the node need not have them: a router may
	// translate them.
	ExternalIPs []netip.Addr
	// LocalAddrs are the addresses of this node's devices, sorted, without
	// those that a proxy put there to receive Services (kube-ipvs0).
	LocalAddrs []netip.Addr
	// Pods distinguishes local pods from other sources.
	Pods Detector
	// Uplinks are the names of the devices by which traffic of other machines comes in,
	// sorted.
	Uplinks []string
	// UplinkAddrs are the addresses of those devices, sorted.
	UplinkAddrs []DeviceAddr
	// Filters can drop packets before their destination is translated, and Firewalls drop what
	// netfilter has not translated. They are known where a tier translates ahead of netfilter.
	Filters   []Filter
	Firewalls []Firewall
	// Overrides are what operators say of backends, in the order of BackendOverride.Compare.
	Overrides []BackendOverride
	// ServiceCIDRs are what ClusterIPs are allocated from; empty if unknown.
	ServiceCIDRs []netip.Prefix
}

// DeviceAddr is an address of a device.
type DeviceAddr struct {
	Addr   netip.Addr
	Device string
}

// Compare is the order of UplinkAddrs.
func (a DeviceAddr) Compare(b DeviceAddr) int {
	return cmp.Or(a.Addr.Compare(b.Addr), strings.Compare(a.Device, b.Device))
}

// Cluster is what a tier has to know of all nodes for direct server return. No decision depends on it.
type Cluster struct {
	// Nodes are their addresses, and Pods the ranges of the addresses of their pods.
	Nodes []netip.Addr
	Pods  []netip.Prefix
}

// Policy is what decisions depend on by configuration.
type Policy struct {
	// MasqueradeAll hides the source of everything that goes to a ClusterIP.
	MasqueradeAll bool
	// NodePorts selects the addresses at which NodePorts are served.
	NodePorts NodePortSelector
	// IgnoreExternalIPs is the feature gate AllowServiceExternalIPs=false.
	IgnoreExternalIPs bool
	// StrictSourceRanges closes the hole that upstream leaves: ranges of one
	// family alone leave load balancer IPs of the other one open to all sources.
	StrictSourceRanges bool
	// MasqueradeLocalBackends hides clients outside from backends on this node too, where a service
	// port masquerades them: those of externalTrafficPolicy Cluster.
	MasqueradeLocalBackends bool
	// NoLoopbackHostIPs says that no tier serves a hostIP that is a loopback address.
	NoLoopbackHostIPs bool
	// KeepTCP makes decisions include every TCP endpoint of the API, even those that get no
	// new connections. It is for tiers that end connections to all other endpoints.
	KeepTCP bool
	// Balancing is that of Services which do not say otherwise.
	Balancing Balancing
	// Forwarding is likewise that of Services which do not say otherwise; UnsetForwarding where no tier can do anything but
	// SNAT, whatever they say.
	Forwarding Forwarding
}

// Detector distinguishes packets of this node's pods from others
// (detectLocalMode). The zero Detector knows none.
type Detector struct {
	// CIDRs of the pods (ClusterCIDR, NodeCIDR); one family or both.
	CIDRs []netip.Prefix
	// Interface is the device that packets of pods come in by
	// (BridgeInterface), or with InterfacePrefix the beginning of its name
	// (InterfaceNamePrefix). It serves both families.
	Interface       string
	InterfacePrefix bool
}

// Knows reports whether pods of that family can be distinguished at all.
func (d *Detector) Knows(family Family) bool {
	return d.Interface != "" || slices.ContainsFunc(d.CIDRs, func(p netip.Prefix) bool { return FamilyOf(p.Addr()) == family })
}

// Local reports whether a packet with that source that came in by that device,
// empty for one that this host sends, is of a local pod.
func (d *Detector) Local(source netip.Addr, device string) bool {
	switch {
	case d.Interface == "":
		return slices.ContainsFunc(d.CIDRs, func(p netip.Prefix) bool { return p.Contains(source) })
	case d.InterfacePrefix:
		return strings.HasPrefix(device, d.Interface)
	}
	return device == d.Interface
}

func (d *Detector) equal(o *Detector) bool {
	return d.Interface == o.Interface && d.InterfacePrefix == o.InterfacePrefix && slices.Equal(d.CIDRs, o.CIDRs)
}

// Origin is where a client is, as far as Services make a difference.
type Origin uint8

// The origins, fit to index an array.
const (
	FromPod     Origin = iota // a local pod, by the detector
	FromHost                  // this node, by its source address
	FromOutside               // any other source
	Origins
)

func (o Origin) String() string { return [...]string{"pod", "host", "outside"}[o] }

// Origin of a packet with that source that came in by that device, empty for
// one that this host sends. A pod comes first: the host may well have an
// address out of the range of its pods.
func (f *Facts) Origin(source netip.Addr, device string) Origin {
	if f.Pods.Local(source, device) {
		return FromPod
	}
	if f.isLocal(source) {
		return FromHost
	}
	return FromOutside
}

// ExternalOrigin is Origin at a frontend that is dialled from outside the cluster as well, where
// traffic policies tell apart who came to this node. What came in by an uplink is from another
// machine: a cluster's CIDR has the pods of all nodes.
func (f *Facts) ExternalOrigin(source netip.Addr, device string) Origin {
	origin := f.Origin(source, device)
	if origin != FromPod || f.Pods.Interface != "" || !slices.Contains(f.Uplinks, device) {
		return origin
	}
	if f.isLocal(source) {
		return FromHost
	}
	return FromOutside
}

// HasAddress reports whether packets for an address come to this node: a device has it, or a router translates it.
func (f *Facts) HasAddress(a netip.Addr) bool {
	return f.isLocal(a) || slices.Contains(f.ExternalIPs, a)
}

func (f *Facts) isLocal(a netip.Addr) bool {
	if a.IsLoopback() {
		return true
	}
	_, found := slices.BinarySearchFunc(f.LocalAddrs, a, netip.Addr.Compare)
	return found
}

// decidesAlike reports whether service ports are decided alike with both, but for ClusterIPs that
// a device of this node has, Services that select nodes, and those of ServiceLB; what differs besides concerns NodeRules alone.
func (f *Facts) decidesAlike(o *Facts) bool {
	return f.Zone == o.Zone && f.NodeIPs == o.NodeIPs && f.Pods.equal(&o.Pods) && f.filtersAlike(o) && slices.Equal(f.Overrides, o.Overrides) &&
		slices.Equal(f.ExternalIPs, o.ExternalIPs)
}

// translatedIPs are the external addresses of the node that no device of it has: packets for them arrive for its own address.
func (f *Facts) translatedIPs() (list []netip.Addr) {
	for _, a := range f.ExternalIPs {
		if _, local := slices.BinarySearchFunc(f.LocalAddrs, a, netip.Addr.Compare); !local {
			list = append(list, a)
		}
	}
	return list
}

func (f *Facts) filtersAlike(o *Facts) bool {
	return slices.EqualFunc(f.Filters, o.Filters, func(a, b Filter) bool { return a.equal(&b) }) &&
		slices.EqualFunc(f.Firewalls, o.Firewalls, func(a, b Firewall) bool { return a.equal(&b) })
}

func (f *Facts) equal(o *Facts) bool {
	return f.Zone == o.Zone && maps.Equal(f.Labels, o.Labels) && f.NodeIPs == o.NodeIPs && slices.Equal(f.ExternalIPs, o.ExternalIPs) && slices.Equal(f.LocalAddrs, o.LocalAddrs) &&
		f.Pods.equal(&o.Pods) && slices.Equal(f.Uplinks, o.Uplinks) && slices.Equal(f.UplinkAddrs, o.UplinkAddrs) && slices.Equal(f.ServiceCIDRs, o.ServiceCIDRs) && f.filtersAlike(o) &&
		slices.Equal(f.Overrides, o.Overrides)
}
