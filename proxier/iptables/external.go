// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// externalNames are what upstream's comments call such frontends.
var externalNames = map[proxier.Kind]string{
	proxier.LoadBalancer: " loadbalancer IP", proxier.ExternalIP: " external IP", proxier.HostIP: " hostIP",
}

// untranslated is the target of packets that a filter will refuse. They must leave the nat table:
// if a device of this node has the address, a NodePort of the same number would match next.
const untranslated = "ACCEPT"

// external writes the rules of load balancer IPs, external IPs and the NodePort, whose routes
// are the same.
func (p *portRenderer) external(list []*proxier.Frontend) {
	served := which(list[0], p.empty) != allOrigins
	if served {
		p.add(p.chain(externalPrefix), p.routes(list[0]))
	}
	var guarded []*proxier.Frontend
	for _, f := range list {
		p.refuse(f, externalServicesFilter)
		if f.Kind.AnswersEcho() {
			p.share(servicesNAT, addrSlot(f.Addr.Addr()), p.echo(f.Addr.Addr()))
		}
		switch {
		case served && !f.Filtered:
			p.serve(f, externalNames[f.Kind], p.chain(externalPrefix))
		case served && len(f.Ranges) > 0:
			p.serve(f, externalNames[f.Kind], p.chain(rangesPrefix))
		case !f.Kind.Wildcard():
			p.serve(f, externalNames[f.Kind], untranslated)
		}
		if !f.Filtered {
			continue
		}
		guarded = append(guarded, f)
		r := p.dialled(f, " traffic not accepted by "+p.chain(rangesPrefix))
		if r.target = "DROP"; f.RejectOthers {
			r.target = p.rejects()
		}
		p.share(firewallFilter, addrSlot(f.Addr.Addr()), r)
	}
	if len(guarded) > 0 && served {
		p.ranges(guarded)
	}
}

// routes are the rules of the chain for external addresses, origin by origin: a packet that
// follows a route does not come back.
func (p *portRenderer) routes(f *proxier.Frontend) (rules []rule) {
	whole := f.Routes[proxier.FromOutside]
	same := func(o proxier.Origin) bool {
		r := f.Routes[o]
		return r.Set == whole.Set && masquerades(r) == masquerades(whole)
	}
	about := " for " + p.name + " external destinations"
	lead := func(of rule, o proxier.Origin, who, leads string) {
		route := f.Routes[o]
		if p.empty(route) {
			of.target = untranslated
			rules = append(rules, of)
			return
		}
		if masquerades(route) {
			masquerade := of
			masquerade.comment, masquerade.target = p.comment("masquerade "+who+about), markMasqChain
			rules = append(rules, masquerade)
		}
		of.comment, of.target = p.comment(leads+about), p.chain(setPrefixes[setIndex(route.Set)])
		rules = append(rules, of)
	}
	if p.knowsPods() && !same(proxier.FromPod) {
		for uplink := range strings.FieldsSeq(p.uplinks) {
			lead(rule{source: p.podSource, device: uplink}, proxier.FromOutside, "traffic of pods of other nodes", "traffic of pods of other nodes")
		}
		lead(rule{source: p.podSource, device: p.podDevice}, proxier.FromPod, "pod traffic", "pod traffic")
	}
	if !same(proxier.FromHost) {
		lead(rule{matches: fromLocal}, proxier.FromHost, "LOCAL traffic", "route LOCAL traffic")
	}
	if p.empty(whole) {
		return append(rules, rule{target: untranslated})
	}
	if masquerades(whole) {
		rules = append(rules, rule{comment: p.comment("masquerade traffic" + about), target: markMasqChain})
	}
	return append(rules, rule{target: p.chain(setPrefixes[setIndex(whole.Set)])})
}

// ranges writes the chain that accepts source ranges only.
func (p *portRenderer) ranges(list []*proxier.Frontend) {
	var rules []rule
	alike := !slices.ContainsFunc(list, func(f *proxier.Frontend) bool { return !slices.Equal(f.Ranges, list[0].Ranges) })
	for _, f := range list {
		for _, prefix := range f.Ranges {
			r := rule{source: prefix.String(), comment: p.comment(p.name + externalNames[f.Kind]), target: p.chain(externalPrefix)}
			if !alike {
				r.dest = only(f.Addr.Addr())
			}
			rules = append(rules, r)
		}
		if alike {
			break
		}
	}
	if len(rules) > 0 {
		p.add(p.chain(rangesPrefix), append(rules, rule{target: untranslated}))
	}
}

// echo is the rule that has this node answer echo requests to an address.
func (r *renderer) echo(a netip.Addr) rule {
	if r.family == proxier.IPv6 {
		return rule{dest: only(a), matches: "-p ipv6-icmp -m icmp6 --icmpv6-type 128", target: "REDIRECT"}
	}
	return rule{dest: only(a), matches: "-p icmp -m icmp --icmp-type 8", target: "REDIRECT"}
}
