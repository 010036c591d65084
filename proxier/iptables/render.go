// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"net/netip"
	"slices"
	"strconv"

	"github.com/tandem-proxy/tandem/proxier"
)

// chain is a chain of one service port, in the nat table.
type chain struct {
	name  string
	rules []string
	stamp stamp
}

// entry is a rule of one service port in a chain that all share.
type entry struct {
	hub  hubName
	slot slot
	rule string
}

// portRules is what a decision is in one family.
type portRules struct {
	chains  []chain
	names   []string // of the chains
	entries []entry
}

// renderer writes decisions as rules. It decides nothing: what an origin may do, and
// what becomes of its address, is in the routes.
type renderer struct {
	family proxier.Family
	// pods are the source, or the device, of packets of local pods; nobody is a
	// pod if both are empty.
	podSource, podDevice string
	// comments are for people. Where there is much to read, nobody does.
	comments bool
}

func newRenderer(family proxier.Family, pods *proxier.Detector, comments bool) *renderer {
	r := &renderer{family: family, comments: comments}
	if pods.Interface != "" {
		r.podDevice = pods.Interface
		if pods.InterfacePrefix {
			r.podDevice += "+"
		}
		return r
	}
	for _, p := range pods.CIDRs {
		if proxier.FamilyOf(p.Addr()) == family {
			r.podSource = p.String() // there is at most one of a family
		}
	}
	return r
}

func (r *renderer) knowsPods() bool { return r.podSource != "" || r.podDevice != "" }

// origins is a set of them.
type origins uint8

func (o origins) has(x proxier.Origin) bool { return o&(1<<x) != 0 }

const everybody origins = 1<<proxier.Origins - 1

// from narrows a rule to some origins. What becomes of the others does not matter if
// they are in others.
func (r *renderer) from(of rule, some, others origins) (list []rule) {
	if !r.knowsPods() {
		others |= 1 << proxier.FromPod
	}
	switch {
	case some == 0:
		return nil
	case some|others == everybody:
		return []rule{of}
	case others.has(proxier.FromPod), !some.has(proxier.FromPod):
		if !others.has(proxier.FromPod) {
			of.source, of.device = not(r.podSource), not(r.podDevice)
		}
		host, outside := some.has(proxier.FromHost), some.has(proxier.FromOutside)
		switch {
		case host && !outside && !others.has(proxier.FromOutside):
			of.matches = fromLocal
		case outside && !host && !others.has(proxier.FromHost):
			of.matches = "-m addrtype ! --src-type LOCAL"
		}
		return []rule{of}
	}
	pods := of
	pods.source, pods.device = r.podSource, r.podDevice
	return append([]rule{pods}, r.from(of, some&^(1<<proxier.FromPod), others)...)
}

func not(value string) string {
	if value == "" {
		return ""
	}
	return "! " + value
}

// portRenderer renders one decision.
type portRenderer struct {
	*renderer
	d         *proxier.Decision
	name      string
	endpoints []endpoint
	members   [2][]*endpoint // of the cluster and of the local set
	out       portRules
}

// endpoint is a backend of the family.
type endpoint struct {
	*proxier.Backend
	text  string // its address and port
	chain string
}

// setPrefixes are of the chains of the cluster and of the local set.
var setPrefixes = [2]string{clusterPrefix, localPrefix}

// render writes a decision as rules of this family; nothing for none.
func (r *renderer) render(d *proxier.Decision) portRules {
	p := &portRenderer{renderer: r, d: d, name: d.Name.String()}
	for i := range d.Backends {
		if b := &d.Backends[i]; proxier.FamilyOf(b.Addr.Addr()) == r.family {
			text := b.Addr.String()
			p.endpoints = append(p.endpoints, endpoint{b, text, chainName(endpointPrefix, &d.Name, text)})
		}
	}
	for i := range p.endpoints {
		for s := range p.members {
			if e := &p.endpoints[i]; e.Members&(1<<s) != 0 {
				p.members[s] = append(p.members[s], e)
			}
		}
	}
	var internal, external []*proxier.Frontend
	for i := range d.Frontends {
		f := &d.Frontends[i]
		switch {
		case f.Conflict != nil || proxier.FamilyOf(f.Addr.Addr()) != r.family:
		case f.Kind == proxier.ClusterIP:
			internal = append(internal, f)
		default:
			external = append(external, f)
		}
	}
	var used [2]bool
	for _, f := range slices.Concat(internal, external) {
		for _, route := range f.Routes {
			used[route.Set&1] = true
		}
	}
	for s := range p.members {
		if used[s] && len(p.members[s]) > 0 {
			p.set(s, internal)
		}
	}
	p.lead(used)
	for _, f := range internal {
		if which(f, p.empty) != everybody {
			p.serve(f, " cluster IP", p.chain(setPrefixes[f.Routes[0].Set&1]))
		}
		p.refuse(f, servicesFilter)
	}
	if len(external) > 0 {
		p.external(external)
	}
	if d.HealthCheckNodePort != 0 && len(internal)+len(external) > 0 {
		p.admitHealthChecks()
	}
	return p.out
}

// chain is the name of one of the port's chains.
func (p *portRenderer) chain(prefix string) string { return chainName(prefix, &p.d.Name, "") }

func (p *portRenderer) add(name string, rules []rule) {
	c := chain{name: name, rules: make([]string, len(rules))}
	for i := range rules {
		c.rules[i] = rules[i].String()
	}
	c.stamp = stampOf(c.rules)
	p.out.chains, p.out.names = append(p.out.chains, c), append(p.out.names, name)
}

func (p *portRenderer) comment(text string) string {
	if !p.comments {
		return ""
	}
	return text
}

// empty says whether a route leads nowhere.
func (p *portRenderer) empty(r proxier.Route) bool { return len(p.members[r.Set&1]) == 0 }

// hides says whether a connection gets this node's address. Packets are translated
// here, so that AnySource does.
func hides(r proxier.Route) bool { return r.Source != proxier.KeepSource }

// which are the origins whose route is so.
func which(f *proxier.Frontend, is func(proxier.Route) bool) (o origins) {
	for origin, route := range f.Routes {
		if is(route) {
			o |= 1 << origin
		}
	}
	return o
}

// set writes the chain that leads to one of so many endpoints.
func (p *portRenderer) set(s int, internal []*proxier.Frontend) {
	var rules []rule
	for _, f := range internal {
		masquerade := p.dialled(f, " cluster IP")
		masquerade.target = markMasqChain
		here := which(f, func(r proxier.Route) bool { return int(r.Set&1) == s && !p.empty(r) })
		rules = append(rules, p.from(masquerade, which(f, hides)&here, everybody&^here)...)
	}
	members := p.members[s]
	if p.d.Affinity > 0 {
		for _, e := range members {
			rules = append(rules, rule{
				comment: p.comment(p.name + " -> " + e.text), target: e.chain,
				matches: "-m recent --rcheck --seconds " + strconv.Itoa(int(p.d.Affinity.Seconds())) + " --reap --name " + e.chain + p.recentMask(),
			})
		}
	}
	for i, e := range members {
		leads := rule{comment: p.comment(p.name + " -> " + e.text), target: e.chain}
		if left := len(members) - i; left > 1 {
			leads.matches = probability(left)
		}
		rules = append(rules, leads)
	}
	p.add(p.chain(setPrefixes[s]), rules)
}

func (r *renderer) recentMask() string {
	if r.family == proxier.IPv6 {
		return " --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource"
	}
	return " --mask 255.255.255.255 --rsource"
}

// lead writes the chain of each endpoint: one that dials itself is masqueraded.
func (p *portRenderer) lead(used [2]bool) {
	for i := range p.endpoints {
		e := &p.endpoints[i]
		if !(used[0] && e.Members&proxier.InCluster != 0 || used[1] && e.Members&proxier.InLocal != 0) {
			continue
		}
		translate := rule{protocol: p.d.Name.Protocol, comment: p.comment(p.name), target: "DNAT --to-destination " + e.text}
		if p.d.Affinity > 0 {
			translate.matches = "-m recent --set --name " + e.chain + p.recentMask()
		}
		p.add(e.chain, []rule{
			{source: only(e.Addr.Addr()), comment: p.comment(p.name), target: markMasqChain},
			translate,
		})
	}
}

// dialled matches what is sent to a frontend.
func (p *portRenderer) dialled(f *proxier.Frontend, what string) rule {
	r := rule{protocol: p.d.Name.Protocol, comment: p.comment(p.name + what), port: portText(f.Addr.Port())}
	if f.Kind != proxier.NodePort {
		r.dest = only(f.Addr.Addr())
	}
	return r
}

// serve has a frontend lead to a chain.
func (p *portRenderer) serve(f *proxier.Frontend, what, target string) {
	r := p.dialled(f, what)
	r.target = target
	if f.Kind == proxier.NodePort {
		p.share(nodePortsNAT, portSlot(p.d.Name.Protocol, f.Addr.Port()), r)
		return
	}
	p.share(servicesNAT, addrSlot(f.Addr.Addr()), r)
}

func (p *portRenderer) share(hub hubName, at slot, r rule) {
	p.out.entries = append(p.out.entries, entry{hub: hub, slot: at, rule: r.String()})
}

// refuse says what becomes of those whose route leads nowhere. All others have been
// translated before a filter sees them.
func (p *portRenderer) refuse(f *proxier.Frontend, hub hubName) {
	nobody := which(f, p.empty)
	if nobody == 0 {
		return
	}
	at := addrSlot(f.Addr.Addr())
	if f.Kind == proxier.NodePort {
		hub, at = nodePortsFilter, portSlot(p.d.Name.Protocol, f.Addr.Port())
	}
	for _, verdict := range []proxier.Verdict{proxier.Reject, proxier.Drop} {
		some := nobody & which(f, func(r proxier.Route) bool { return p.d.Empty[r.Set] == verdict })
		r := p.dialled(f, " has no endpoints")
		r.target = p.rejects()
		if verdict == proxier.Drop {
			r = p.dialled(f, " has no local endpoints")
			r.target = "DROP"
		}
		for _, r := range p.from(r, some, everybody&^nobody) {
			// Who is not let in gets no answer.
			if !f.Filtered || verdict == proxier.Drop {
				p.share(hub, at, r)
				continue
			}
			for _, prefix := range f.Ranges {
				r.source = prefix.String()
				p.share(hub, at, r)
			}
		}
	}
}

func (r *renderer) rejects() string {
	if r.family == proxier.IPv6 {
		return "REJECT --reject-with icmp6-port-unreachable"
	}
	return "REJECT --reject-with icmp-port-unreachable"
}

// admitHealthChecks lets in, whatever the host's own rules say, what load balancers ask this
// process.
func (p *portRenderer) admitHealthChecks() {
	port := p.d.HealthCheckNodePort
	p.share(healthChecksFilter, portSlot(proxier.TCP, port), rule{
		protocol: proxier.TCP, comment: p.comment(p.name + " health check node port"), port: portText(port), target: "ACCEPT",
	})
}

// externalNames are the comments of upstream.
var externalNames = map[proxier.Kind]string{
	proxier.LoadBalancer: " loadbalancer IP", proxier.ExternalIP: " external IP", proxier.NodePort: "",
}

// untranslated keeps a packet that will be refused from NodePorts of the same number,
// where a device of this node has the address.
const untranslated = "ACCEPT"

// external writes what load balancer and external IPs and the NodePort share: their
// routes are the same.
func (p *portRenderer) external(list []*proxier.Frontend) {
	served := which(list[0], p.empty) != everybody
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
		case f.Kind != proxier.NodePort:
			p.serve(f, externalNames[f.Kind], untranslated)
		}
		if !f.Filtered {
			continue
		}
		guarded = append(guarded, f)
		r := p.dialled(f, " traffic not accepted by "+p.chain(rangesPrefix))
		r.target = "DROP"
		p.share(firewallFilter, addrSlot(f.Addr.Addr()), r)
	}
	if len(guarded) > 0 && served {
		p.guard(guarded)
	}
}

// routes are the rules of the chain for external addresses: origin by origin, as one
// that was led somewhere does not come back.
func (p *portRenderer) routes(f *proxier.Frontend) (rules []rule) {
	whole := f.Routes[proxier.FromOutside]
	same := func(o proxier.Origin) bool {
		r := f.Routes[o]
		return r.Set == whole.Set && hides(r) == hides(whole)
	}
	about := " for " + p.name + " external destinations"
	lead := func(of rule, o proxier.Origin, who, leads string) {
		route := f.Routes[o]
		if p.empty(route) {
			of.target = untranslated
			rules = append(rules, of)
			return
		}
		if hides(route) {
			masquerade := of
			masquerade.comment, masquerade.target = p.comment("masquerade "+who+about), markMasqChain
			rules = append(rules, masquerade)
		}
		of.comment, of.target = p.comment(leads+about), p.chain(setPrefixes[route.Set&1])
		rules = append(rules, of)
	}
	if p.knowsPods() && !same(proxier.FromPod) {
		lead(rule{source: p.podSource, device: p.podDevice}, proxier.FromPod, "pod traffic", "pod traffic")
	}
	if !same(proxier.FromHost) {
		lead(rule{matches: fromLocal}, proxier.FromHost, "LOCAL traffic", "route LOCAL traffic")
	}
	if p.empty(whole) {
		return append(rules, rule{target: untranslated})
	}
	if hides(whole) {
		rules = append(rules, rule{comment: p.comment("masquerade traffic" + about), target: markMasqChain})
	}
	return append(rules, rule{target: p.chain(setPrefixes[whole.Set&1])})
}

// guard writes the chain of source ranges.
func (p *portRenderer) guard(list []*proxier.Frontend) {
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

// echo has this node answer echo requests to an address.
func (r *renderer) echo(a netip.Addr) rule {
	if r.family == proxier.IPv6 {
		return rule{dest: only(a), matches: "-p ipv6-icmp -m icmp6 --icmpv6-type 128", target: "REDIRECT"}
	}
	return rule{dest: only(a), matches: "-p icmp -m icmp --icmp-type 8", target: "REDIRECT"}
}
