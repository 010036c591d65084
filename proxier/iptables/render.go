// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// chain is a chain of one service port, in the nat table.
type chain struct {
	name  string
	rules []string
	stamp stamp
}

// entry is a rule of one service port in a shared chain.
type entry struct {
	shared sharedName
	slot   slot
	rule   string
}

// portRules are the rules of a decision in one family.
type portRules struct {
	chains  []chain
	names   []string // of the chains
	entries []entry
}

// renderer turns decisions into rules. It decides nothing: the routes say what an origin may
// do, and whether its address is masqueraded.
type renderer struct {
	family proxier.Family
	// The source, or the device, of packets of local pods. Where both are empty, no packet
	// counts as one of a pod.
	podSource, podDevice string
	// uplinks are the names of the devices by which pods of other nodes come in, separated
	// by spaces. They matter with podSource.
	uplinks string
	// comments reports whether rules have comments. They are for people, who do not read thousands
	// of rules.
	comments bool
}

func newRenderer(family proxier.Family, rules *proxier.NodeRules, comments bool) *renderer {
	r, pods := &renderer{family: family, comments: comments}, &rules.Pods
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
			r.uplinks = strings.Join(rules.Uplinks, " ")
		}
	}
	return r
}

func (r *renderer) knowsPods() bool { return r.podSource != "" || r.podDevice != "" }

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

// setPrefixes begin the names of the chains of the cluster and of the local set.
var setPrefixes = [2]string{clusterPrefix, localPrefix}

// setIndex is the index of a set of the family: 0 for that of the cluster, 1 for the local one.
func setIndex(s proxier.Set) int {
	if s.Local() {
		return 1
	}
	return 0
}

// render returns the rules of a decision in this family.
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
		case f.Conflict != nil || proxier.FamilyOf(f.Addr.Addr()) != r.family || f.Addr.Addr().IsLoopback():
		case !f.Kind.External():
			internal = append(internal, f)
		default:
			external = append(external, f)
		}
	}
	var used [2]bool
	for _, f := range slices.Concat(internal, external) {
		for _, route := range f.Routes {
			used[setIndex(route.Set)] = true
		}
	}
	for s := range p.members {
		if used[s] && len(p.members[s]) > 0 {
			p.set(s, internal)
		}
	}
	p.translate(used)
	for _, f := range internal {
		if which(f, p.empty) != allOrigins {
			p.serve(f, " cluster IP", p.chain(setPrefixes[setIndex(f.Routes[0].Set)]))
		}
		p.refuse(f, servicesFilter)
	}
	if len(external) > 0 {
		p.external(external)
	}
	if d.HealthCheckNodePort != 0 {
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

// set writes the chain that picks one of the endpoints of a set.
func (p *portRenderer) set(s int, internal []*proxier.Frontend) {
	var rules []rule
	for _, f := range internal {
		masquerade := p.dialled(f, " cluster IP")
		masquerade.target = markMasqChain
		here := which(f, func(r proxier.Route) bool { return setIndex(r.Set) == s && !p.empty(r) })
		rules = append(rules, p.from(masquerade, which(f, masquerades)&here, allOrigins&^here)...)
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
	left := 0 // weight of the endpoints that were not tried
	for _, e := range members {
		left += p.d.Weight(e.Backend)
	}
	for i, e := range members {
		leads := rule{comment: p.comment(p.name + " -> " + e.text), target: e.chain}
		if i < len(members)-1 {
			leads.matches = probability(p.d.Weight(e.Backend), left)
		}
		left -= p.d.Weight(e.Backend)
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

// translate writes the chain of each endpoint. One that dials itself is masqueraded.
func (p *portRenderer) translate(used [2]bool) {
	for i := range p.endpoints {
		e := &p.endpoints[i]
		if !(used[0] && e.Members&proxier.InCluster != 0 || used[1] && e.Members&proxier.InLocal != 0) {
			continue
		}
		dnat := rule{protocol: p.d.Name.Protocol, comment: p.comment(p.name), target: "DNAT --to-destination " + e.text}
		if p.d.Affinity > 0 {
			dnat.matches = "-m recent --set --name " + e.chain + p.recentMask()
		}
		p.add(e.chain, []rule{
			{source: only(e.Addr.Addr()), comment: p.comment(p.name), target: markMasqChain},
			dnat,
		})
	}
}

// dialled matches what is sent to a frontend.
func (p *portRenderer) dialled(f *proxier.Frontend, what string) rule {
	r := rule{protocol: p.d.Name.Protocol, comment: p.comment(p.name + what), port: portText(f.Addr.Port())}
	if !f.Kind.Wildcard() {
		r.dest = only(f.Addr.Addr())
	}
	return r
}

// serve adds the rule that leads from a frontend to a chain.
func (p *portRenderer) serve(f *proxier.Frontend, what, target string) {
	r := p.dialled(f, what)
	r.target = target
	if f.Kind.Wildcard() {
		p.share(nodePortsNAT, portSlot(p.d.Name.Protocol, f.Addr.Port()), r)
		return
	}
	p.share(servicesNAT, addrSlot(f.Addr.Addr()), r)
}

func (p *portRenderer) share(shared sharedName, at slot, r rule) {
	p.out.entries = append(p.out.entries, entry{shared: shared, slot: at, rule: r.String()})
}

// refuse adds the rules that reject or drop packets of origins without endpoints. Those of
// other origins are translated before they come to a filter.
func (p *portRenderer) refuse(f *proxier.Frontend, shared sharedName) {
	refused := which(f, p.empty)
	if refused == 0 {
		return
	}
	at := addrSlot(f.Addr.Addr())
	if f.Kind.Wildcard() {
		shared, at = nodePortsFilter, portSlot(p.d.Name.Protocol, f.Addr.Port())
	}
	for _, verdict := range []proxier.Verdict{proxier.Reject, proxier.Drop} {
		some := refused & which(f, func(r proxier.Route) bool { return p.d.Empty[r.Set] == verdict })
		r := p.dialled(f, " has no endpoints")
		r.target = p.rejects()
		if verdict == proxier.Drop {
			r = p.dialled(f, " has no local endpoints")
			r.target = "DROP"
		}
		for _, r := range p.from(r, some, allOrigins&^refused) {
			// A client outside the source ranges gets no answer.
			if !f.Filtered || verdict == proxier.Drop {
				p.share(shared, at, r)
				continue
			}
			for _, prefix := range f.Ranges {
				r.source = prefix.String()
				p.share(shared, at, r)
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

// admitHealthChecks accepts the health checks that load balancers send to this process,
// whatever the host's own rules say.
func (p *portRenderer) admitHealthChecks() {
	port := p.d.HealthCheckNodePort
	p.share(healthChecksFilter, portSlot(proxier.TCP, port), rule{
		protocol: proxier.TCP, comment: p.comment(p.name + " health check node port"), port: portText(port), target: "ACCEPT",
	})
}
