// SPDX-License-Identifier: Apache-2.0

// Package nodefacts collects the facts about this node that decisions depend on: from the
// configuration, the Node object and the kernel.
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

// Settings are the facts and the policy from a configuration.
type Settings struct {
	Policy proxier.Policy
	// Warnings are about settings that may be mistakes.
	Warnings []string

	pods     proxier.Detector // without the Node's pod CIDRs
	nodeCIDR bool             // the Node's pod CIDRs identify pods
	bind     netip.Addr       // overrides the addresses of the Node, if valid
}

// New makes Settings from a valid configuration.
func New(c *config.Config, gate featuregate.FeatureGate) (*Settings, error) {
	k, t, rules := &c.KubeProxy, &c.Tandem, c.Rules()
	nodePorts, warnings, err := proxier.ParseNodePortSelector(rules.NodePortAddresses, rules.LocalhostNodePorts)
	if err != nil {
		return nil, err
	}
	s := &Settings{
		Policy: proxier.Policy{
			MasqueradeAll: rules.MasqueradeAll, NodePorts: nodePorts,
			IgnoreExternalIPs: !gate.Enabled(config.AllowServiceExternalIPs), StrictSourceRanges: t.StrictSourceRanges,
			KeepTCP: t.EBPF.ResetRemovedBackends, MasqueradeLocalBackends: t.EBPF.MasqueradeLocalBackends,
		},
		Warnings: warnings,
	}
	lb := &t.LoadBalancer
	algorithm, err := proxier.ParseAlgorithm(lb.Algorithm)
	if err != nil {
		return nil, fmt.Errorf("loadBalancer.algorithm: %w", err)
	}
	s.Policy.Balancing = proxier.Balancing{Algorithm: algorithm, TableSize: lb.MaglevTableSize, Seed: uint64(lb.MaglevSeed)}
	if s.Policy.Forwarding, err = proxier.ParseForwarding(lb.Mode); err != nil {
		return nil, fmt.Errorf("loadBalancer.mode: %w", err)
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

// NeedsPodCIDRs reports whether the Node's podCIDRs are required to recognise pods.
func (s *Settings) NeedsPodCIDRs() bool { return s.nodeCIDR }

// Facts returns the facts before the Node is known.
func (s *Settings) Facts() proxier.Facts {
	var f proxier.Facts
	s.Revise(nil, &f)
	return f
}

// Revise updates the facts after a change of settings, with the Node if it is known. It does not
// change other facts.
func (s *Settings) Revise(node *v1.Node, f *proxier.Facts) {
	f.Pods, f.NodeIPs = s.pods, s.nodeIPs(nil)
	if node != nil {
		s.FromNode(node, f)
	}
}

// FromNode updates the facts that depend on the Node. It does not change other facts.
func (s *Settings) FromNode(node *v1.Node, f *proxier.Facts) {
	f.Zone, f.Labels = node.Labels[v1.LabelTopologyZone], node.Labels
	f.NodeIPs = s.nodeIPs(node)
	f.ExternalIPs = externalIPs(node)
	if s.nodeCIDR {
		f.Pods = proxier.Detector{CIDRs: firstOfEachFamily(node.Spec.PodCIDRs)}
	}
}

// externalIPs are the external addresses of a Node, sorted.
func externalIPs(node *v1.Node) (list []netip.Addr) {
	if node == nil {
		return nil
	}
	for _, address := range node.Status.Addresses {
		if a, err := proxier.ParseAddr(address.Address); err == nil && address.Type == v1.NodeExternalIP {
			list = append(list, a)
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}

var loopback = [proxier.Families]netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}

// nodeIPs returns for each family the configured address, or the first address of the Node
// (internal before external), or loopback.
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
				if a, err := proxier.ParseAddr(address.Address); err == nil && address.Type == kind {
					orElse(a)
				}
			}
		}
	}
	for _, a := range loopback {
		orElse(a)
	}
	return ips
}

// KnowsNodeIP reports whether the facts have an address of the node.
func KnowsNodeIP(f *proxier.Facts) bool { return f.NodeIPs != loopback }

func firstOfEachFamily(cidrs []string) (list []netip.Prefix) {
	for _, text := range cidrs {
		p, err := proxier.ParseCIDR(text)
		if err != nil {
			continue // the API server validates them
		}
		if !slices.ContainsFunc(list, func(o netip.Prefix) bool { return o.Addr().Is4() == p.Addr().Is4() }) {
			list = append(list, p)
		}
	}
	return list
}
