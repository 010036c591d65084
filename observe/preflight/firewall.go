// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"fmt"
	"strings"
)

// firewalls finds what forwards only connections that it knows.
func firewalls(f *Facts) (list []Finding) {
	for _, found := range f.Firewalls {
		what := found.String()
		if strings.Contains(what, "firewalld") {
			what = "firewalld: " + what
		} else if f.chain("ufw-+") != "" {
			what = "ufw: " + what
		}
		list = append(list, Finding{
			Remark, "firewall", what,
			"It forwards only connections that it allows or that netfilter translates. In mode ebpf, iptables rules serve clients outside this node of Services with local endpoints, unless it accepts all packets to these. Rules are slower.",
			"To serve them by eBPF: accept packets to the CIDRs of pods (-d CIDR -j ACCEPT in chain FORWARD, ufw route allow to CIDR). If a rule that Tandem does not recognise accepts them already, set ebpf.ignoreHostFilters.",
		})
	}
	return list
}

// beforeDNAT finds filters that see packets before their destination is translated.
func beforeDNAT(f *Facts) (list []Finding) {
	for _, r := range f.BeforeDNAT {
		list = append(list, Finding{
			Remark, "policy", fmt.Sprintf("%s filters %s before DNAT", r.Where, r.Match),
			"It filters packets by what clients dial (NodePort, load balancer IP). In mode ebpf, iptables rules serve the affected Services, so that it applies. They are slower.",
			"Use loadBalancerSourceRanges or policies on pods instead, or serve clients past it: ebpf.ignoreHostFilters.",
		})
	}
	return list
}
