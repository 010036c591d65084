// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
)

// Chains, with upstream's names.
const (
	nodePortChain     = "KUBE-NODE-PORT"
	loadBalancerChain = "KUBE-LOAD-BALANCER"
	rangesChain       = "KUBE-SOURCE-RANGES-FIREWALL"
	filterChain       = "KUBE-IPVS-FILTER"
	outFilterChain    = "KUBE-IPVS-OUT-FILTER"
)

const isNew = "-m conntrack --ctstate NEW "

func comment(text string) string { return `-m comment --comment "` + text + `" ` }

// ConstantRules are the rules that this tier needs. They do not depend on Services, whose
// addresses are in sets.
type ConstantRules struct {
	// Before are rules that stand before those of a chain that the tier of the rules has
	// itself.
	Before []Chain
	// Chains are further ones, and Jumps lead to them, behind those to its own.
	Chains []Chain
	Jumps  []Jump
}

// Chain is a chain, or a part of it, with rules in the words of iptables-save.
type Chain struct {
	Table, Name string
	Rules       []string
}

// Jump is a rule in a chain of the kernel's.
type Jump struct{ Table, From, Rule string }

// constantRules are a function of the configuration and of the node alone.
func (o *Options) constantRules(f proxier.Family, rules *proxier.NodeRules) ConstantRules {
	in := func(name setName, parts string) string { return set{name, f}.match(parts) }
	const mark = " -j KUBE-MARK-MASQ"
	services := []string{
		comment("Kubernetes service load balancer ip + port") + in(loadBalancer, "dst,dst") + " -j " + loadBalancerChain,
		o.clusterIPs(f, rules) + mark,
		comment("Kubernetes service external ip + port for masquerade and filter purpose") + in(externalIP, "dst,dst") + mark,
	}
	// What IPVS is to have, no other rule does: not those of NodePorts either.
	for _, name := range []setName{clusterIP, loadBalancer, externalIP, externalIPLocal} {
		services = append(services, in(name, "dst,dst")+" -j ACCEPT")
	}
	loopback := [proxier.Families]string{"127.0.0.0/8", "::1/128"}[f]
	services = append(services, "! -d "+loopback+" -m addrtype --dst-type LOCAL -j "+nodePortChain)

	masquerade := "MASQUERADE"
	if o.Tools == nil || o.Tools.RandomFully() {
		masquerade += " --random-fully"
	}
	reject := [proxier.Families]string{"icmp-port-unreachable", "icmp6-port-unreachable"}[f]
	filter := []string{}
	for _, name := range []setName{loadBalancer, clusterIP, externalIP, externalIPLocal} {
		filter = append(filter, in(name, "dst,dst")+" -j RETURN")
	}
	filter = append(filter, in(healthCheckNodePort, "dst")+" -j RETURN",
		// Upstream's jump to this chain, which may be there as well, is for all packets.
		isNew+in(boundIPs, "dst")+" -j REJECT --reject-with "+reject)
	ranges := []string{
		in(loadBalancerSourceCIDR, "dst,dst,src") + " -j RETURN",
		in(loadBalancerSourceIP, "dst,dst,src") + " -j RETURN",
		"-j DROP",
	}
	guarded := comment("Kubernetes service load balancer ip + port for load balancer with sourceRange") + in(loadBalancerFW, "dst,dst") + " -j " + rangesChain
	return ConstantRules{
		Before: []Chain{
			{Table: "nat", Name: "KUBE-SERVICES", Rules: services},
			{Table: "nat", Name: "KUBE-POSTROUTING", Rules: []string{
				comment("Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose") + in(loopBack, "dst,dst,src") + " -j " + masquerade,
			}},
			{Table: "filter", Name: "KUBE-PROXY-FIREWALL", Rules: []string{guarded}},
			{Table: "filter", Name: "KUBE-NODEPORTS", Rules: []string{
				"-p tcp " + comment("Kubernetes health check node port") + in(healthCheckNodePort, "dst") + " -j ACCEPT",
			}},
		},
		Chains: []Chain{
			{Table: "nat", Name: loadBalancerChain, Rules: []string{in(loadBalancerLocal, "dst,dst") + " -j RETURN", "-j KUBE-MARK-MASQ"}},
			{Table: "nat", Name: nodePortChain, Rules: nodePorts(f)},
			{Table: "filter", Name: rangesChain, Rules: ranges},
			{Table: "filter", Name: filterChain, Rules: filter},
			// Before LOCAL_OUT of IPVS, unlike the table filter.
			{Table: "mangle", Name: rangesChain, Rules: ranges},
			{Table: "mangle", Name: outFilterChain, Rules: []string{guarded}},
		},
		Jumps: []Jump{
			// What rules refuse is not for KUBE-IPVS-FILTER to reject. Elsewhere they
			// come by themselves.
			{Table: "filter", From: "INPUT", Rule: isNew + comment("kubernetes service portals") + "-j KUBE-SERVICES"},
			{Table: "filter", From: "INPUT", Rule: isNew + comment("kubernetes ipvs access filter") + "-j " + filterChain},
			{Table: "mangle", From: "OUTPUT", Rule: isNew + comment("kubernetes ipvs access filter") + "-j " + outFilterChain},
		},
	}
}

// clusterIPs matches packets to ClusterIPs that must be masqueraded.
func (o *Options) clusterIPs(f proxier.Family, rules *proxier.NodeRules) string {
	to := comment("Kubernetes service cluster ip + port for masquerade purpose")
	dialled := to + set{clusterIP, f}.match("dst,dst")
	pods := &rules.Pods
	switch {
	case o.MasqueradeAll:
		return dialled
	case !pods.Knows(f):
		// This host, whose source is what it dials.
		return to + set{clusterIP, f}.match("src,dst")
	case pods.Interface != "" && pods.InterfacePrefix:
		return "! -i " + pods.Interface + "+ " + dialled
	case pods.Interface != "":
		return "! -i " + pods.Interface + " " + dialled
	}
	for _, p := range pods.CIDRs {
		if proxier.FamilyOf(p.Addr()) == f {
			return fmt.Sprintf("! -s %s %s", p, dialled)
		}
	}
	return dialled
}

// nodePorts returns the rules for packets to an address of this node.
func nodePorts(f proxier.Family) (list []string) {
	for _, p := range []proxier.Protocol{proxier.TCP, proxier.UDP, proxier.SCTP} {
		sets := nodePortSets[p]
		parts := "dst"
		if allSets[sets[0]].is != bitmapPort {
			parts = "dst,dst"
		}
		protocol := map[proxier.Protocol]string{proxier.TCP: "tcp", proxier.UDP: "udp", proxier.SCTP: "sctp"}[p]
		match := func(name setName) string { return "-p " + protocol + " " + set{name, f}.match(parts) }
		list = append(list,
			match(sets[1])+" -j ACCEPT",
			match(sets[0])+" -j KUBE-MARK-MASQ",
			match(sets[0])+" -j ACCEPT")
	}
	return list
}
