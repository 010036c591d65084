// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/placement"
)

// plan is what a service port is in the kernel, but for rules.
type plan struct {
	servers []claimed
	addrs   []netip.Addr // those that are to be this node's
	members []member
}

// Why rules serve a frontend. A virtual server treats all clients alike, and shares no
// session affinity with another.
var (
	errOrigins  = errors.New("clients from pods, from this host and from outside get different endpoints")
	errSilence  = errors.New("packets without a local endpoint are to be dropped, and a virtual server rejects them")
	errAffinity = errors.New("session affinity spans several addresses, and a virtual server has its own")
	errRejects  = errors.New("clients that the source ranges do not admit are to be rejected, and the constant rules drop them")
	errSources  = errors.New("whether to masquerade depends on the client in a way that the constant rules do not cover")
	errLoopback = errors.New("rules decide about a hostIP that is a loopback address")
	errOnLink   = errors.New("the address is in a subnet of this node and may belong to another machine, which this node could not reach then")
)

// planner works out plans.
type planner struct {
	opts      *Options
	nodeRules proxier.NodeRules
	// links are the prefixes of this node's devices.
	links []netip.Prefix
	// unusable is why there are no virtual servers of a family.
	unusable [proxier.Families]error

	list [candidates]placement.Candidate // made when it is first used
}

// refuses says why virtual servers are not to serve a frontend.
func (p *planner) refuses(d *proxier.Decision, f *proxier.Frontend) error {
	if f.Addr.Addr().IsLoopback() {
		return errLoopback
	}
	if err := p.unusable[proxier.FamilyOf(f.Addr.Addr())]; err != nil || p.opts.UpstreamSemantics {
		return err
	}
	to := f.Routes[0].Set
	switch {
	case slices.ContainsFunc(f.Routes[:], func(r proxier.Route) bool { return r.Set != to }):
		return errOrigins
	case d.Empty[to] == proxier.Drop && d.Size(to) == 0:
		return errSilence
	case d.Affinity > 0 && slices.ContainsFunc(d.Frontends, func(o proxier.Frontend) bool {
		return o.Conflict == nil && o.Addr != f.Addr && proxier.FamilyOf(o.Addr.Addr()) == proxier.FamilyOf(f.Addr.Addr())
	}):
		return errAffinity
	case f.RejectOthers:
		return errRejects
	case !p.showsSource(f):
		return errSources
	case p.onLink(f):
		return errOnLink
	}
	return nil
}

// onLink reports whether an address may be another machine's, as external IPs often are: on
// kube-ipvs0 all that this node sends there, and replies from here, would end here. With
// strict ARP, those of load balancers are meant to be on kube-ipvs0 of all nodes.
func (p *planner) onLink(f *proxier.Frontend) bool {
	if is := kindOf[f.Kind]; !is.foreign || is.announced && p.opts.StrictARP {
		return false
	}
	return !p.isLocal(f.Addr.Addr()) && slices.ContainsFunc(p.links, func(l netip.Prefix) bool { return l.Contains(f.Addr.Addr()) })
}

func (p *planner) isLocal(a netip.Addr) bool {
	_, local := slices.BinarySearchFunc(p.nodeRules.LocalAddrs, a, netip.Addr.Compare)
	return local
}

// showsSource reports whether the constant rules treat the source as decided. Connections of
// this host need no masquerading: their source is the address of the frontend.
func (p *planner) showsSource(f *proxier.Frontend) bool {
	knows := p.nodeRules.Pods.Knows(proxier.FamilyOf(f.Addr.Addr()))
	pod, outside := true, true
	if !f.Kind.External() {
		pod, outside = p.opts.MasqueradeAll, p.opts.MasqueradeAll || knows
	}
	return f.Routes[proxier.FromOutside].Source.HidesClient() == outside && (!knows || f.Routes[proxier.FromPod].Source.HidesClient() == pod)
}

// The candidates for a frontend.
const (
	byServers = iota
	byRules
	candidates
)

// candidates are virtual servers, and rules for all that those refuse. Rules serve NodePorts
// at loopback addresses also: no packet from there gets to LOCAL_IN.
func (p *planner) candidates() [candidates]placement.Candidate {
	return [candidates]placement.Candidate{
		byServers: {Refuses: p.refuses},
		byRules: {Also: func(_ *proxier.Decision, f *proxier.Frontend) bool {
			return f.Kind.Wildcard() && len(p.nodeRules.Loopback[proxier.FamilyOf(f.Addr.Addr())]) > 0
		}},
	}
}

// assign is the part of a decision that rules serve; nil for none.
func (p *planner) assign(d *proxier.Decision) *proxier.Decision {
	if p.list[byServers].Refuses == nil {
		p.list = p.candidates()
	}
	var parts [candidates]*proxier.Decision
	placement.Assign(p.list[:], d, parts[:])
	return parts[byRules]
}

// plan is that of a decision; nil if there is nothing of it but rules.
func (p *planner) plan(d *proxier.Decision) *plan {
	out := &plan{}
	var to [proxier.Sets][]target
	var used [proxier.Sets]bool
	is := p.opts.newServer(d)
	for i := range d.Frontends {
		f := &d.Frontends[i]
		if f.Conflict != nil || p.refuses(d, f) != nil {
			continue
		}
		set := f.Routes[proxier.FromOutside].Set
		if d.Size(set) == 0 {
			set = proxier.SetOf(set.Family(), false) // all endpoints; but for upstream's semantics, there are none either
		}
		if !used[set] {
			used[set], to[set] = true, targets(d, set)
		}
		c := &claim{server: is, nodePort: f.Kind.Wildcard(), to: to[set]}
		p.frontend(out, d, f, c)
	}
	p.admitHealthChecks(out, d)
	if len(out.servers)+len(out.members) == 0 {
		return nil
	}
	for i := range d.Backends {
		b := &d.Backends[i]
		family := proxier.FamilyOf(b.Addr.Addr())
		if b.Local && (used[proxier.SetOf(family, false)] || used[proxier.SetOf(family, true)]) {
			m := memberOf(loopBack, b.Addr, d.Name.Protocol)
			m.from = only(b.Addr.Addr())
			out.members = append(out.members, m)
		}
	}
	return out
}

// targets are the destinations of a set. Flows of UDP stay where they are while the
// endpoint is one of the service port; no connection is cut off by its destination having
// no weight.
func targets(d *proxier.Decision, set proxier.Set) (list []target) {
	for i := range d.Backends {
		b := &d.Backends[i]
		switch {
		case proxier.FamilyOf(b.Addr.Addr()) != set.Family():
		case b.In(set):
			list = append(list, target{b.Addr, d.Weight(b)})
		case d.Name.Protocol == proxier.UDP:
			list = append(list, target{b.Addr, 0})
		}
	}
	return list
}

func only(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// frontend adds what one frontend needs. Members that several addresses need are counted.
func (p *planner) frontend(out *plan, d *proxier.Decision, f *proxier.Frontend, c *claim) {
	protocol, family := d.Name.Protocol, proxier.FamilyOf(f.Addr.Addr())
	add := func(to netip.AddrPort, names ...setName) {
		for _, name := range names {
			out.members = append(out.members, memberOf(name, to, protocol))
		}
	}
	keeps := !f.Routes[proxier.FromOutside].Source.HidesClient()
	if f.Kind.Wildcard() {
		sets := nodePortSets[protocol]
		for _, a := range p.nodeRules.NodePortAddrs {
			if proxier.FamilyOf(a) != family {
				continue
			}
			at := netip.AddrPortFrom(a, f.Addr.Port())
			out.servers = append(out.servers, claimed{keyOf(at, protocol), c})
			add(at, sets[0])
			if keeps {
				add(at, sets[1])
			}
		}
		return
	}
	out.servers = append(out.servers, claimed{keyOf(f.Addr, protocol), c})
	if !p.isLocal(f.Addr.Addr()) {
		out.addrs = append(out.addrs, f.Addr.Addr())
		out.members = append(out.members, member{set: set{boundIPs, family}, addr: f.Addr.Addr()})
	}
	sets := kindOf[f.Kind].sets(keeps)
	add(f.Addr, sets...)
	p.guard(out, f, protocol)
	if f.Kind.AnswersEcho() {
		out.members = append(out.members, echoOf(sets[0], f.Addr.Addr()))
	}
}

// admitHealthChecks has the constant rules let in what load balancers ask this process,
// whichever part of the tier serves the frontends.
func (p *planner) admitHealthChecks(out *plan, d *proxier.Decision) {
	if d.HealthCheckNodePort == 0 {
		return
	}
	for family := range proxier.Families {
		if p.unusable[family] == nil {
			out.members = append(out.members, member{set: set{healthCheckNodePort, family}, port: d.HealthCheckNodePort})
		}
	}
}

// guard adds source ranges.
func (p *planner) guard(out *plan, f *proxier.Frontend, protocol proxier.Protocol) {
	if !f.Filtered {
		return
	}
	out.members = append(out.members, memberOf(loadBalancerFW, f.Addr, protocol))
	for _, r := range f.Ranges {
		m := memberOf(loadBalancerSourceCIDR, f.Addr, protocol)
		if r == only(f.Addr.Addr()) {
			m.name = loadBalancerSourceIP // this host
		}
		m.from = r.Masked()
		out.members = append(out.members, m)
	}
}
