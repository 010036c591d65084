// SPDX-License-Identifier: Apache-2.0

// Package nodefacts finds out what decisions need to know of this node: what
// the configuration, the Node object and the kernel say of it.
package nodefacts

import (
	"fmt"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/component-base/featuregate"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/proxier"
)

// Settings are what a configuration says of the facts and the policy.
type Settings struct {
	Policy proxier.Policy
	// Warnings are for an operator who may not have meant it.
	Warnings []string

	pods     proxier.Detector // without what the Node has to say
	nodeCIDR bool             // the Node says which addresses pods have
	bind     netip.Addr       // the node's address whatever its Node says; none if invalid
}

// New reads a configuration that validates.
func New(c *config.Config, gate featuregate.FeatureGate) (*Settings, error) {
	k, t := &c.KubeProxy, &c.Tandem
	nodePorts, warnings, err := proxier.ParseNodePortSelector(k.NodePortAddresses, *k.IPTables.LocalhostNodePorts)
	if err != nil {
		return nil, err
	}
	s := &Settings{
		Policy: proxier.Policy{
			MasqueradeAll: k.IPTables.MasqueradeAll, NodePorts: nodePorts,
			IgnoreExternalIPs: !gate.Enabled(config.AllowServiceExternalIPs), StrictSourceRanges: t.StrictSourceRanges,
			KeepTCP: t.EBPF.ResetRemovedBackends,
		},
		Warnings: warnings,
	}
	switch k.DetectLocalMode {
	case "", config.LocalModeClusterCIDR:
		if s.pods.CIDRs, err = config.ParseClusterCIDR(k.ClusterCIDR); err != nil {
			return nil, fmt.Errorf("clusterCIDR: %w", err)
		}
	case config.LocalModeNodeCIDR:
		s.nodeCIDR = true
	case config.LocalModeBridgeInterface:
		s.pods.Interface = k.DetectLocal.BridgeInterface
	case config.LocalModeInterfaceNamePrefix:
		s.pods.Interface, s.pods.InterfacePrefix = k.DetectLocal.InterfaceNamePrefix, true
	}
	if a, err := proxier.ParseAddr(k.BindAddress); err == nil && !a.IsUnspecified() {
		s.bind = a
	}
	return s, nil
}

// NeedsPodCIDRs says whether only the Node's podCIDRs tell pods from others.
func (s *Settings) NeedsPodCIDRs() bool { return s.nodeCIDR }

// Facts before the Node is known.
func (s *Settings) Facts() proxier.Facts {
	var f proxier.Facts
	s.Revise(nil, &f)
	return f
}

// Revise takes over facts of other settings, with what the Node says, if it is known. The
// other facts are left alone.
func (s *Settings) Revise(node *v1.Node, f *proxier.Facts) {
	f.Pods, f.NodeIPs = s.pods, s.nodeIPs(nil)
	if node != nil {
		s.FromNode(node, f)
	}
}

// FromNode takes over what the Node says, and leaves the other facts alone.
func (s *Settings) FromNode(node *v1.Node, f *proxier.Facts) {
	f.Zone = node.Labels[v1.LabelTopologyZone]
	f.NodeIPs = s.nodeIPs(node)
	if s.nodeCIDR {
		f.Pods = proxier.Detector{CIDRs: firstOfEachFamily(node.Spec.PodCIDRs)}
	}
}

var loopback = [proxier.Families]netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}

// nodeIPs are the configured address, else the first of the Node's, internal
// ones first, else loopback.
func (s *Settings) nodeIPs(node *v1.Node) [proxier.Families]netip.Addr {
	var ips [proxier.Families]netip.Addr
	orElse := func(a netip.Addr) {
		if at := &ips[proxier.FamilyOf(a)]; a.IsValid() && !at.IsValid() {
			*at = a
		}
	}
	orElse(s.bind)
	if node != nil {
		for _, kind := range []v1.NodeAddressType{v1.NodeInternalIP, v1.NodeExternalIP} {
			for _, address := range node.Status.Addresses {
				if a, err := netip.ParseAddr(address.Address); err == nil && address.Type == kind {
					orElse(a.Unmap())
				}
			}
		}
	}
	for _, a := range loopback {
		orElse(a)
	}
	return ips
}

// KnowsNodeIP says whether the node has an address of its own by the facts.
func KnowsNodeIP(f *proxier.Facts) bool { return f.NodeIPs != loopback }

func firstOfEachFamily(cidrs []string) (list []netip.Prefix) {
	for _, text := range cidrs {
		p, err := netip.ParsePrefix(text)
		if err != nil || p.Addr().Is4In6() {
			continue // the API server validates them
		}
		if !slices.ContainsFunc(list, func(o netip.Prefix) bool { return o.Addr().Is4() == p.Addr().Is4() }) {
			list = append(list, p.Masked())
		}
	}
	return list
}
