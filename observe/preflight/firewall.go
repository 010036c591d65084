// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/kernel/nftables"
	"github.com/tandem-proxy/tandem/kernel/xtables"
)

// firewalls finds what filters forwarded packets.
func firewalls(f *Facts) (list []Finding) {
	const means = "Packets of clients outside that mode ebpf translates on a device have no DNAT status in conntrack. A filter that admits forwarded packets by that status alone rejects those to endpoints on this node."
	if by := signs(sign("table", f.table("firewalld")), sign("chain", f.chain("FWD_+"))); by != "" {
		list = append(list, Finding{
			Remark, "firewall", "firewalld (" + by + ")", means,
			"Admit packets to pods: firewall-cmd --permanent --zone=trusted --add-source=CIDR for the CIDRs of pods, or --add-interface for the devices of the CNI.",
		})
	}
	if by := sign("chain", f.chain("ufw-+")); by != "" {
		list = append(list, Finding{
			Remark, "firewall", "ufw (" + by + ")", means,
			"Admit packets to pods: ufw route allow to CIDR for the CIDRs of pods.",
		})
	}
	for _, t := range f.Rules {
		if c := t.Chain("FORWARD"); t.Name == "filter" && c != nil && c.Policy == "DROP" {
			list = append(list, Finding{
				Remark, "firewall", fmt.Sprintf("policy DROP of chain FORWARD (%s, %s)", t.Family, t.Variant), means,
				"Check that a rule of the CNI admits packets to the CIDRs of pods (-d CIDR -j ACCEPT), or add one.",
			})
		}
	}
	for _, c := range f.Chains {
		if c.Hook == "forward" && c.Policy == "drop" && c.Table != "firewalld" {
			list = append(list, Finding{
				Remark, "firewall", fmt.Sprintf("policy drop of chain %s, table %s %s of nf_tables", c.Name, c.Family, c.Table), means,
				"Check that a rule admits packets to the CIDRs of pods.",
			})
		}
	}
	return list
}

// beforeDNAT finds filters that see packets before their destination is translated.
func beforeDNAT(f *Facts) (list []Finding) {
	const means = "It filters packets by the address and port of a Service (NodePort, load balancer IP). In mode ebpf, programs translate packets of clients outside before it sees them, so these rules no longer apply to Services."
	const set = "Use loadBalancerSourceRanges or policies on pods instead, or serve such Services by rules (annotation tandem-proxy.dev/fast-path=disabled), or run mode iptables on this node."
	for _, t := range f.Rules {
		if t.Name != "raw" && t.Name != "mangle" {
			continue
		}
		if rule := dropsIn(t.Table, "PREROUTING"); rule != "" {
			list = append(list, Finding{Remark, "policy", fmt.Sprintf("table %s of iptables drops packets (%s, %s): %s", t.Name, t.Family, t.Variant, rule), means, set})
		}
	}
	told := map[string]bool{}
	for _, c := range f.Chains {
		table := c.Family + " " + c.Table
		early := c.Hook == "prerouting" && c.Priority < nftables.PriorityDNAT || c.Family == "netdev" && c.Hook != ""
		if !early || told[table] || c.Table == "kube-proxy" || c.Policy != "drop" && !slices.Contains(f.Dropping, table) {
			continue
		}
		told[table] = true
		list = append(list, Finding{
			Remark, "policy", fmt.Sprintf("table %s of nf_tables drops packets, and its chain %s (%s, priority %d) is before DNAT", table, c.Name, c.Hook, c.Priority), means, set,
		})
	}
	return list
}

// dropsIn returns the first rule that drops, of a chain and of those it leads to. Reverse path
// filters do not count: they are about the source.
func dropsIn(t *xtables.Table, from string) string {
	seen := map[string]bool{}
	var look func(name string) string
	look = func(name string) string {
		c := t.Chain(name)
		if c == nil || seen[name] {
			return ""
		}
		seen[name] = true
		if c.Policy == "DROP" {
			return "policy of chain " + name
		}
		for _, rule := range c.Rules {
			target := targetOf(rule)
			if strings.Contains(rule, "-m rpfilter") {
				continue
			}
			if target == "DROP" || target == "REJECT" {
				return "-A " + name + " " + rule
			}
			if found := look(target); found != "" {
				return found
			}
		}
		return ""
	}
	return look(from)
}

// targetOf is where a rule leads.
func targetOf(rule string) string {
	words := strings.Fields(rule)
	for i, w := range words {
		if (w == "-j" || w == "-g") && i+1 < len(words) {
			return words[i+1]
		}
	}
	return ""
}
