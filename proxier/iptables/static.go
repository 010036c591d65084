// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

const isNew = "-m conntrack --ctstate NEW"

const externalComment = "kubernetes externally-visible service portals"

// toExternal leads connections of this host, and forwarded ones, to the rules about external addresses.
// Upstream has a jump in FORWARD for that, and none in OUTPUT. Its --cleanup removes no jump that it does
// not know, but empties KUBE-SERVICES.
var toExternal = rule{comment: externalComment, target: externalServicesChain}.String()

// jumps are upstream's, in the order that they need in each chain: chains that reject come
// before those that drop. Both see new connections only.
func jumps(loopback bool) (list []Jump) {
	add := func(table, from, matches, comment, target string) {
		list = append(list, Jump{table, from, strings.TrimSpace(matches + " " + rule{comment: comment, target: target}.String())})
	}
	add("nat", "PREROUTING", "", "kubernetes service portals", servicesChain)
	add("nat", "OUTPUT", "", "kubernetes service portals", servicesChain)
	add("nat", "POSTROUTING", "", "kubernetes postrouting rules", postroutingChain)
	for _, from := range []string{"INPUT", "FORWARD", "OUTPUT"} {
		if from == "INPUT" {
			add("filter", from, isNew, externalComment, externalServicesChain)
		} else {
			add("filter", from, isNew, "kubernetes service portals", servicesChain) // and from there to the external ones
		}
		add("filter", from, isNew, "kubernetes load balancer firewall", proxyFirewallChain)
		switch from {
		case "INPUT":
			add("filter", from, "", "kubernetes health check service ports", nodePortsChain)
		case "FORWARD":
			add("filter", from, "", "kubernetes forwarding rules", forwardChain)
		}
	}
	if loopback {
		// kubelet writes the same.
		list = append(list, Jump{"filter", "INPUT", "-j " + firewallChain}, Jump{"filter", "OUTPUT", "-j " + firewallChain},
			Jump{"filter", firewallChain, martians})
	}
	return list
}

// inOrder reports whether a chain has rules in this order, whatever is between them.
func inOrder(there, rules []string) bool {
	for _, r := range rules {
		at := slices.Index(there, r)
		if at < 0 {
			return false
		}
		there = there[at+1:]
	}
	return true
}

// static are the chains whose rules depend only on options, and on whether NodePorts are
// served at loopback addresses.
func (f *family) static() (nat, filter []chain) {
	o := f.opts
	mark := fmt.Sprintf("%#x/%#[1]x", o.mark())
	masquerade := "MASQUERADE"
	if o.Tools.RandomFully() {
		masquerade += " --random-fully"
	}
	marks := []string{"-j MARK --set-xmark " + mark}
	if f.loopback && f.counting {
		// All connections from a loopback address to an endpoint pass this chain, as they have
		// to be masqueraded. Upstream has a rule like this for each NodePort.
		marks = append(marks, rule{dest: loopbackRange[f.name], comment: "kubernetes NodePorts at loopback addresses", matches: countIn(loopbackCounter)}.String())
	}
	nat = []chain{
		{name: markMasqChain, rules: marks},
		{name: postroutingChain, rules: []string{
			"-m mark ! --mark " + mark + " -j RETURN",
			// In a second pass, such as through a tunnel, it is not masqueraded again.
			fmt.Sprintf("-j MARK --set-xmark %#x/0x0", o.mark()),
			rule{comment: "kubernetes service traffic requiring SNAT", target: masquerade}.String(),
		}},
	}
	var forward []string
	if !o.KeepInvalid {
		invalid := "-m conntrack --ctstate INVALID "
		if f.counting {
			invalid += countIn(invalidCounter) + " "
		}
		forward = append(forward, invalid+"-j DROP")
	}
	forward = append(forward,
		rule{comment: "kubernetes forwarding rules", matches: "-m mark --mark " + mark, target: "ACCEPT"}.String(),
		rule{comment: "kubernetes forwarding conntrack rule", matches: "-m conntrack --ctstate RELATED,ESTABLISHED", target: "ACCEPT"}.String())
	return nat, []chain{{name: forwardChain, rules: forward}}
}

// martians drops packets of neighbours to loopback addresses, which route_localnet would
// accept (CVE-2020-8558).
var martians = rule{
	source: "! 127.0.0.0/8", dest: "127.0.0.0/8", comment: "block incoming localnet connections",
	matches: "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT", target: "DROP",
}.String()

var loopbackRange = [proxier.Families]string{"127.0.0.0/8", "::1/128"}

// notTranslated is for filters, which see translated packets to local endpoints as well as
// packets that clients sent to such addresses.
const notTranslated = "-m conntrack ! --ctstate DNAT"

// nodePorts are the rules that lead to a chain of NodePorts from the addresses at which those
// are served. matches narrows them.
func nodePorts(family proxier.Family, rules *proxier.NodeRules, target, matches string) (list []string) {
	const comment = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"
	if rules.AllNodePortAddrs[family] {
		list = append(list, rule{dest: not(loopbackRange[family]), comment: comment, matches: strings.TrimSpace(toLocal + " " + matches), target: target}.String())
	} else {
		for _, a := range rules.NodePortAddrs {
			if proxier.FamilyOf(a) == family {
				list = append(list, rule{dest: only(a), comment: comment, matches: matches, target: target}.String())
			}
		}
	}
	if family == proxier.IPv6 {
		return list // it has no route_localnet
	}
	for _, p := range rules.Loopback[family] {
		// From this host only: martians drops packets that are not translated yet.
		list = append(list, rule{dest: p.String(), comment: comment, matches: strings.TrimSpace(fromLocal + " " + matches), target: target}.String())
	}
	return list
}

// unserved rejects packets to unallocated addresses of Services.
func (r *renderer) unserved(rules *proxier.NodeRules) (list []string) {
	for _, p := range rules.Unserved {
		if proxier.FamilyOf(p.Addr()) == r.family {
			list = append(list, rule{
				dest: p.String(), comment: "kubernetes unallocated ClusterIPs", matches: "-m addrtype ! --dst-type LOCAL", target: r.rejects(),
			}.String())
		}
	}
	return list
}
