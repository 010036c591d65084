// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
)

// The set of names and addresses is small, so that collisions are frequent. The
// addresses follow the plan of package lab, so that a scenario can reproduce the
// history: node N is 172.18.0.N and fd00:18::N, its pod M is 10.244.N.M and
// fd00:10:244:N::M, client K is 198.51.100.K and 2001:db8:51:100::K. Services have
// 10.96.0.0/24 and fd00:10:96::/112, load balancers and external IPs
// 203.0.113.0/24 and 2001:db8:203:113::/64.
const ownNode = "node1"

var (
	clusterPool = [proxier.Families][]string{
		{"10.96.0.1", "10.96.0.2", "10.96.0.3", "10.96.0.4"},
		{"fd00:10:96::1", "fd00:10:96::2", "fd00:10:96::3", "fd00:10:96::4"},
	}
	vipPool = [proxier.Families][]string{
		{"203.0.113.1", "203.0.113.2", "172.18.0.1", "172.18.0.77", "10.96.0.1", "10.96.0.9", "198.51.100.1"},
		{"2001:db8:203:113::1", "2001:db8:203:113::2", "fd00:18::1", "fd00:18::77", "fd00:10:96::1", "fd00:10:96::9", "2001:db8:51:100::1"},
	}
	// The first two belong to a node by the plan. The last one is like the address of a
	// node-local DNS cache.
	localPool = [proxier.Families][]string{
		{"172.18.0.1", "10.244.1.254", "172.18.0.77", "203.0.113.1", "169.254.7.7", "10.96.0.9"},
		{"fd00:18::1", "fd00:10:244:1::ffff", "fd00:18::77", "2001:db8:203:113::1", "fe80::7", "fd00:10:96::9"},
	}
	podPool = [proxier.Families][]string{
		{"10.244.1.1", "10.244.1.2", "10.244.2.1", "10.244.2.2", "10.244.3.1", "172.18.0.1"},
		{"fd00:10:244:1::1", "fd00:10:244:1::2", "fd00:10:244:2::1", "fd00:10:244:2::2", "fd00:10:244:3::1", "fd00:18::1"},
	}
	clientPool = [proxier.Families][]string{
		{"198.51.100.1", "198.51.100.2", "198.51.100.200"},
		{"2001:db8:51:100::1", "2001:db8:51:100::2", "2001:db8:51:100::c8"},
	}
	// Addresses that are invalid for a Service, or valid only in some fields.
	oddAddrs = []string{
		"", "bogus", "0.0.0.0", "::", "127.0.0.1", "127.9.9.9", "::1", "224.0.0.1", "ff02::1", "169.254.1.1", "fe80::1", "fe80::1%eth0",
		"::ffff:203.0.113.1", "203.0.113.1:80", "10.96.0.1/32", "255.255.255.255",
		"10.96.0.01", "203.0.113.001", "fd00:0010:00096::2",
	}
	rangePool = []string{
		"198.51.100.0/24", "198.51.100.1/32", "198.51.100.9/25", " 10.244.1.0/24", "172.18.0.1/31", "172.18.0.1/32", "172.18.0.0/16", "203.0.113.0/24", "0.0.0.0/0",
		"127.0.0.0/8", "2001:db8:51:100::/64", "2001:db8:51:100::1/128 ", "fd00:10:244::/62", "fd00:18::/64", "fd00:18::1/128", "2001:db8:203:113::1/64", "::/0", "fe80::/10",
	}
	oddRanges  = []string{"", "bogus", "10.0.0.1", "::ffff:10.0.0.0/104", "198.51.100.1/33", "fe80::%eth0/64", "198.51.100.0/", "0.0.0.0/0 0", "198.51.100.001/032", "172.18.0.0/016"}
	numbers    = []int32{53, 80, 443, 30080}
	oddNumbers = []int32{0, -1, 65535, 65536, 65616, 1 << 30, -65456}
	portNames  = []string{"", "p", "q", "r"}
	protocols  = []v1.Protocol{v1.ProtocolTCP, v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolUDP, v1.ProtocolSCTP, ""}
	zoneNames  = []string{"z1", "z1", "z2", "z3"}
	nodeNames  = []string{ownNode, ownNode, "node2", "node3"}
	devices    = []string{"", "", "pod1", "pod2", "pod22", "eth0"}

	nodePortLists = [][]string{
		nil, nil, {"primary"}, {"all"}, {"localhost"}, {"primary", "localhost"}, {"0.0.0.0/0"}, {"::/0"}, {"0.0.0.0/0", "::/0"},
		{"172.18.0.0/16"}, {"172.18.0.77/32"}, {"fd00:18::/64", "172.18.0.1/32"}, {"127.0.0.0/8"}, {"127.0.0.1/32"}, {"::1/128"},
		{"127.0.0.0/9", "fe80::/10"}, {"localhost", "172.18.0.0/16"}, {"primary", "203.0.113.0/24"}, {"primary", "127.0.0.1/32"},
		{"126.0.0.0/7"}, {"203.0.113.0/24", "2001:db8:203:113::/64"}, {"10.0.0.0/8"}, {"localhost", "::/0"}, {"all", "172.18.0.0/16"},
		{"10.0.0.0/8", "fd00:18::/63"},
	}
)

// generator makes random objects. The probabilities of features are drawn once per
// world, so that rare features are frequent in some worlds.
type generator struct {
	*rand.Rand
	services []types.NamespacedName
	slices   []types.NamespacedName

	clusterIPs, vips [proxier.Families][]string
	numbers          []int32
	sourceRanges     []string

	families  []proxier.Family // of most Services
	ports     []v1.ServicePort // name and protocol of most ports
	hints     string           // "", zone, node, both, mixed
	odd       float64          // probability of invalid values
	unready   float64
	local     float64 // traffic policies Local
	ranges    float64 // source ranges
	nodePorts float64
	external  float64 // external and load balancer IPs
	duplicate float64 // endpoints that are also in another slice
}

func newGenerator(seed uint64) *generator {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 0x9e3779b97f4a7c15))}
	for range 1 + g.IntN(6) {
		name := types.NamespacedName{Namespace: pick(g, "a", "a", "b"), Name: fmt.Sprintf("s%d", g.IntN(4))}
		if !slices.Contains(g.services, name) {
			g.services = append(g.services, name)
		}
	}
	for range 4 + g.IntN(24) {
		name := types.NamespacedName{Namespace: pick(g, g.services...).Namespace, Name: fmt.Sprintf("sl%d", g.IntN(10))}
		if !slices.Contains(g.slices, name) {
			g.slices = append(g.slices, name)
		}
	}
	g.clusterIPs, g.vips, g.numbers = clusterPool, vipPool, numbers
	if g.chance(0.3) {
		// All Services have the same.
		g.numbers = g.numbers[:1]
		for f := range proxier.Families {
			a := pick(g, vipPool[f]...)
			g.clusterIPs[f], g.vips[f] = []string{clusterPool[f][0], clusterPool[f][0], a}, []string{clusterPool[f][0], a}
		}
	}
	for range 5 {
		g.sourceRanges = append(g.sourceRanges, pick(g, rangePool...))
	}
	if g.chance(0.5) { // include the node
		g.sourceRanges = append(g.sourceRanges, "172.18.0.1/32", "fd00:18::1/128", "172.18.0.1/32", "fd00:18::1/128")
	}
	for range 1 + g.IntN(3) {
		g.ports = append(g.ports, g.port())
	}
	g.families = pick(g, []proxier.Family{proxier.IPv4}, []proxier.Family{proxier.IPv6}, []proxier.Family{proxier.IPv4, proxier.IPv6},
		[]proxier.Family{proxier.IPv6, proxier.IPv4})
	g.hints = pick(g, "", "zone", "node", "both", "mixed")
	g.odd = pick(g, 0, 0.02, 0.1)
	g.unready = pick(g, 0.1, 0.4, 0.8)
	g.local = pick(g, 0.1, 0.5, 0.9)
	g.ranges = pick(g, 0.1, 0.3, 0.7)
	g.nodePorts = pick(g, 0.2, 0.8)
	g.external = pick(g, 0.2, 0.7)
	g.duplicate = pick(g, 0, 0.1, 0.5)
	return g
}

func pick[T any](g *generator, of ...T) T { return of[g.IntN(len(of))] }

func (g *generator) chance(p float64) bool { return g.Float64() < p }

// port returns a port with name and protocol.
func (g *generator) port() v1.ServicePort {
	if len(g.ports) > 0 && g.chance(0.9) {
		return pick(g, g.ports...)
	}
	return v1.ServicePort{Name: pick(g, portNames...), Protocol: pick(g, protocols...)}
}

func (g *generator) family() proxier.Family { return proxier.Family(g.IntN(int(proxier.Families))) }

// some returns up to n random elements of a list, possibly with duplicates.
func some[T any](g *generator, n int, of ...T) []T {
	var list []T
	for range g.IntN(n + 1) {
		list = append(list, pick(g, of...))
	}
	return list
}

// Facts and policy.

func (g *generator) facts() proxier.Facts {
	var f proxier.Facts
	for _, field := range factFields {
		field(g, &f)
	}
	return f
}

func (g *generator) changeFacts(f proxier.Facts) proxier.Facts {
	for range 1 + g.IntN(2) {
		pick(g, factFields...)(g, &f)
	}
	return f
}

var factFields = []func(*generator, *proxier.Facts){
	func(g *generator, f *proxier.Facts) {
		f.Labels = map[string]string{"role": pick(g, "edge", "edge", "core", "")}
	},
	func(g *generator, f *proxier.Facts) { f.Zone = pick(g, "z1", "z1", "z2", "") },
	func(g *generator, f *proxier.Facts) {
		f.NodeIPs = [proxier.Families]netip.Addr{}
		for family := range proxier.Families {
			if !g.chance(0.2) {
				f.NodeIPs[family] = netip.MustParseAddr(pick(g, localPool[family][0], localPool[family][2]))
			}
		}
	},
	func(g *generator, f *proxier.Facts) {
		f.LocalAddrs = nil
		for family := range proxier.Families {
			for i, a := range localPool[family] {
				if i < 2 && g.chance(0.8) || g.chance(0.4) {
					f.LocalAddrs = append(f.LocalAddrs, netip.MustParseAddr(a))
				}
			}
		}
		if g.chance(0.7) {
			f.LocalAddrs = append(f.LocalAddrs, netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback())
		}
		slices.SortFunc(f.LocalAddrs, netip.Addr.Compare)
	},
	func(g *generator, f *proxier.Facts) {
		v4, v6 := netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")
		f.Pods = pick(g,
			proxier.Detector{},
			proxier.Detector{CIDRs: []netip.Prefix{v4}},
			proxier.Detector{CIDRs: []netip.Prefix{v6}},
			proxier.Detector{CIDRs: []netip.Prefix{v4, v6}},
			proxier.Detector{CIDRs: []netip.Prefix{v4, v6}},
			proxier.Detector{Interface: "pod1"},
			proxier.Detector{Interface: "pod", InterfacePrefix: true},
		)
	},
	func(g *generator, f *proxier.Facts) {
		if f.Uplinks = plainUplinks; g.chance(0.2) {
			f.Uplinks = pick(g, nil, []string{"eth0", "pod2"})
		}
	},
	func(g *generator, f *proxier.Facts) {
		v4, v6 := netip.MustParsePrefix("10.96.0.0/24"), netip.MustParsePrefix("fd00:10:96::/112")
		f.ServiceCIDRs = pick(g, nil, []netip.Prefix{v4}, []netip.Prefix{v6}, []netip.Prefix{v4, v6}, []netip.Prefix{netip.MustParsePrefix("10.96.0.0/30"), v6})
	},
}

// settings are nodePortAddresses and localhostNodePorts, as configured.
type settings struct {
	nodePortAddresses  []string
	localhostNodePorts bool
}

func (g *generator) policy() (proxier.Policy, settings) {
	s := settings{pick(g, nodePortLists...), g.chance(0.5)}
	selector, _, err := proxier.ParseNodePortSelector(s.nodePortAddresses, s.localhostNodePorts)
	if err != nil {
		panic(fmt.Sprintf("nodePortAddresses %q: %v", s.nodePortAddresses, err))
	}
	return proxier.Policy{
		MasqueradeAll: g.chance(0.2), NodePorts: selector, IgnoreExternalIPs: g.chance(0.15), StrictSourceRanges: g.chance(0.25),
	}, s
}

// Events.

// Events are the kinds of changes of objects in a step.
type Events func(g *generator, there *objects, first bool) []event

var (
	// Small has a few Services and slices with many collisions.
	Small Events = (*generator).events
	// Large has one Service with about 2048 endpoints or more.
	Large Events = (*generator).largeEvents
	// Crowded is Small plus a crowd of other Services that are added and removed.
	Crowded Events = (*generator).crowdedEvents
)

// next makes a step: events, changed facts, or both.
func (g *generator) next(make Events, p *player, first bool) step {
	if first || g.chance(0.7) {
		return step{events: make(g, &p.there, first)}
	}
	facts := g.changeFacts(p.facts)
	st := step{facts: &facts}
	if g.chance(0.3) {
		st.events = make(g, &p.there, first)
	}
	return st
}

func (g *generator) events(there *objects, first bool) []event {
	var events []event
	if first {
		for _, name := range g.services {
			if g.chance(0.8) {
				events = append(events, event{service: g.service(name)})
			}
		}
		for _, name := range g.slices {
			if g.chance(0.9) {
				events = append(events, event{slice: g.slice(name)})
			}
		}
		g.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
		return events
	}
	n := 1 + g.IntN(4)
	if g.chance(0.1) {
		n = 30
	}
	for range n {
		var e event
		if g.chance(0.5) {
			name := pick(g, g.services...)
			old := there.services[name]
			switch {
			case old == nil || g.chance(0.15):
				e.service = g.service(name)
			case g.chance(0.15):
				e = event{service: old, gone: true}
			case g.chance(0.05):
				e.service = old.DeepCopy()
			default:
				e.service = g.changeService(old)
			}
			events = append(events, e)
			if old != nil && g.chance(0.1) {
				events = append(events, event{service: old})
			}
			continue
		}
		name := pick(g, g.slices...)
		old := there.slices[name]
		switch {
		case old == nil || g.chance(0.1):
			e.slice = g.slice(name)
		case g.chance(0.15):
			e = event{slice: old, gone: true}
		case g.chance(0.05):
			e.slice = old.DeepCopy()
		default:
			e.slice = g.changeSlice(old)
		}
		events = append(events, e)
		if old != nil && g.chance(0.1) {
			events = append(events, event{slice: old})
		}
	}
	return events
}

// largeEvents makes events for one large Service.
func (g *generator) largeEvents(there *objects, first bool) []event {
	name := types.NamespacedName{Namespace: "a", Name: "s0"}
	if first {
		g.services = []types.NamespacedName{name}
		g.slices = nil
		if g.chance(0.5) {
			g.families = []proxier.Family{proxier.IPv4, proxier.IPv6}
		}
		events := []event{{service: g.service(name)}}
		for i := range 20 + g.IntN(10) {
			g.slices = append(g.slices, types.NamespacedName{Namespace: "a", Name: fmt.Sprintf("sl%d", i)})
			events = append(events, event{slice: g.largeSlice(g.slices[i])})
		}
		return events
	}
	if g.chance(0.1) {
		e := event{service: g.service(name)}
		if old := there.services[name]; old != nil {
			e = event{service: g.changeService(old), gone: g.chance(0.2)}
		}
		return []event{e}
	}
	var events []event
	for range 1 + g.IntN(2) {
		name := pick(g, g.slices...)
		e := event{slice: g.largeSlice(name)}
		if old := there.slices[name]; old != nil && g.chance(0.9) {
			e = event{slice: g.changeSlice(old), gone: g.chance(0.2)}
		}
		events = append(events, e)
	}
	return events
}

func (g *generator) largeSlice(name types.NamespacedName) *discoveryv1.EndpointSlice {
	s := g.slice(name)
	s.Endpoints = nil
	base, _ := strconv.Atoi(name.Name[2:])
	for i := range 100 {
		e := g.endpoint(s)
		if len(e.Addresses) > 0 && g.chance(0.95) {
			n := base*95 + i // some are also in the next slice
			e.Addresses[0] = fmt.Sprintf([]string{"10.244.%d.%d", "fd00:10:244:%x::%x"}[g.sliceFamily(s)], 1+n/200, 1+n%200)
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

// Flows.

// flow returns a random flow to an existing destination, or a similar one.
func (g *generator) flow(frontends []Frontend, c *Cluster) proxier.Flow {
	f := g.family()
	protocol := pick(g, proxier.TCP, proxier.TCP, proxier.UDP, proxier.UDP, proxier.SCTP)
	addr := pick(g, pick(g, clusterPool[f], vipPool[f], localPool[f], clientPool[f], podPool[f])...)
	port := uint16(pick(g, 53, 80, 443, 30080, 30081, 81, 65535))
	dst := netip.AddrPortFrom(netip.MustParseAddr(addr), port)
	vip := false
	if len(frontends) > 0 && g.chance(0.9) {
		at := pick(g, frontends...)
		if at.Owner.Namespace == crowdNamespace && g.chance(0.8) {
			at = g.apart(frontends)
		}
		dst, vip = at.Addr, at.Kind == proxier.LoadBalancer
		f = family(dst.Addr())
		if g.chance(0.95) {
			protocol = at.Owner.Protocol
		}
		if dst.Addr().IsUnspecified() {
			dst = netip.AddrPortFrom(netip.MustParseAddr(g.nodePortAddr(f, c)), dst.Port())
		} else if dst.Addr().Next().IsValid() && g.chance(0.03) {
			dst = netip.AddrPortFrom(dst.Addr().Next(), dst.Port())
		}
		if g.chance(0.03) {
			dst = netip.AddrPortFrom(dst.Addr(), port)
		}
	}
	flow := proxier.Flow{Destination: dst, Protocol: protocol, Device: pick(g, devices...)}
	src := g.source(dst.Addr(), f, c)
	if vip && g.chance(0.2) {
		src = dst.Addr()
	}
	flow.Source = netip.AddrPortFrom(src, uint16(pick(g, 0, 40000)))
	return flow
}

func (g *generator) nodePortAddr(f proxier.Family, c *Cluster) string {
	switch g.IntN(8) {
	case 0:
		return []string{pick(g, "127.0.0.1", "127.0.0.1", "127.5.5.5", "127.200.0.1"), "::1"}[f]
	case 1:
		return []string{"0.0.0.0", "::"}[f]
	}
	for _, a := range c.Facts.LocalAddrs {
		if family(a) == f && c.nodePortsAt(a, proxier.FromHost) && g.chance(0.3) {
			return a.String()
		}
	}
	return pick(g, localPool[f]...)
}

func (g *generator) source(dst netip.Addr, f proxier.Family, c *Cluster) netip.Addr {
	switch g.IntN(12) {
	case 0, 1:
		return netip.MustParseAddr(pick(g, podPool[f]...))
	case 3, 4:
		return netip.MustParseAddr(pick(g, localPool[f]...))
	case 2, 5:
		return dst
	case 6:
		return netip.MustParseAddr([]string{"127.0.0.1", "::1"}[f])
	case 7, 8: // the edges of source ranges
		if len(c.Services) > 0 {
			if mine, _, _ := ranges(pick(g, c.Services...), f); len(mine) > 0 {
				p := pick(g, mine...).Masked()
				a := p.Addr()
				if g.chance(0.5) {
					a = last(p)
				}
				if g.chance(0.5) {
					a = pick(g, a.Next(), a.Prev())
				}
				if a.IsValid() && a.Is4() == (f == proxier.IPv4) {
					return a
				}
			}
		}
	case 9:
		if addrs := c.Facts.LocalAddrs; len(addrs) > 0 {
			if a := pick(g, addrs...); family(a) == f {
				return a
			}
		}
	}
	return netip.MustParseAddr(pick(g, clientPool[f]...))
}

// last address of a prefix.
func last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
