// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
)

// The tests in northsouth_*_test.go have clients outside the cluster, whose packets do not pass
// any socket program. They dial the Service "web" at
//
//	172.18.0.1:30080  [fd00:18::1]:30080         node1, where the tier runs
//	203.0.113.10:80   [2001:db8:203:113::10]:80  a load balancer IP, routed to node1
//
// and reach port 8080 of "here", a pod of node1, or of "there", a pod of node2, where no tier
// runs.
const (
	nodePort = 30080
	lbPort   = 80
)

var (
	lb4 = netip.MustParseAddr("203.0.113.10")
	lb6 = netip.MustParseAddr("2001:db8:203:113::10")
)

// edge is the node that clients connect to, with the other participants.
type edge struct {
	*node
	two         *lab.Node
	client      *lab.Client
	here, there *lab.Pod
}

// newEdge starts a tier that serves the Service without endpoints. The pods have no listeners.
func newEdge(t testing.TB, opts Options, network ...lab.Options) *edge {
	t.Helper()
	l := lab.NewT(t, network...)
	e := &edge{node: &node{lab: l, at: l.Node("node1")}, two: l.Node("node2"), client: l.Client("client")}
	e.here, e.there = e.at.Pod("here"), e.two.Pod("there")
	for _, a := range []netip.Addr{lb4, lb6} {
		if err := l.Announce(netip.PrefixFrom(a, a.BitLen()), e.at); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		e.close()
		if err := cleanupOn(e.at); err != nil {
			t.Error(err)
		}
	})
	e.begin(t, opts, nil)
	e.sync(t)
	return e
}

// begin starts a process that knows the node and the Service. change may modify the Service; nil
// leaves it alone. NodePorts are served only at the node's primary addresses.
func (e *edge) begin(t testing.TB, opts Options, change func(*v1.Service)) {
	t.Helper()
	tier, err := openOn(t, e.at, opts)
	if err != nil {
		t.Fatal(err)
	}
	e.tier = tier
	e.Proxier, err = proxier.New(proxier.Options{
		NodeName: e.at.Name, Tier: tier, Runner: proxier.DefaultRunnerOptions(), Facts: edgeFacts(e.at),
		Policy: proxier.Policy{NodePorts: proxier.NodePortSelector{Primary: true}, KeepTCP: opts.ResetRemoved},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := tier.SetUplinks(t.Context(), uplinksOf(t, e.at)); err != nil {
		t.Fatal(err)
	}
	e.OnServiceSynced()
	e.OnEndpointSlicesSynced()
	e.OnServiceAdd(edgeService(change))
}

// besides is an address of the node at which NodePorts are not served.
var besides = netip.MustParseAddr("172.18.0.77")

func edgeFacts(at *lab.Node) proxier.Facts {
	f := proxier.Facts{
		NodeIPs:    [proxier.Families]netip.Addr{at.Addr4, at.Addr6},
		LocalAddrs: []netip.Addr{netip.MustParseAddr("127.0.0.1"), at.Addr4, besides, netip.IPv6Loopback(), at.Addr6},
		Pods:       proxier.Detector{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}},
	}
	slices.SortFunc(f.LocalAddrs, netip.Addr.Compare)
	return f
}

func edgeService(change func(*v1.Service)) *v1.Service {
	s := dualService()
	s.Spec.Type = v1.ServiceTypeLoadBalancer
	for i := range s.Spec.Ports {
		s.Spec.Ports[i].NodePort = nodePort
	}
	s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: lb4.String()}, {IP: lb6.String()}}
	if change != nil {
		change(s)
	}
	return s
}

// use makes the pods the endpoints.
func (e *edge) use(t testing.TB, pods ...*lab.Pod) {
	t.Helper()
	e.setPods(pods...)
	e.sync(t)
}

// entry is an address that clients dial.
type entry struct {
	network string // tcp or udp
	kind    string
	to      netip.AddrPort
}

func (n entry) String() string {
	family := "4"
	if n.to.Addr().Is6() {
		family = "6"
	}
	return n.network + family + " by " + n.kind
}

// entries returns the entries of the given protocols, by default of both.
func (e *edge) entries(networks ...string) (list []entry) {
	if len(networks) == 0 {
		networks = []string{"tcp", "udp"}
	}
	for _, network := range networks {
		for _, own := range e.addrs() {
			list = append(list, entry{network, "node port", netip.AddrPortFrom(own, nodePort)})
		}
		for _, lb := range []netip.Addr{lb4, lb6} {
			list = append(list, entry{network, "load balancer IP", netip.AddrPortFrom(lb, lbPort)})
		}
	}
	return list
}

// addrs returns the addresses of the node.
func (e *edge) addrs() []netip.Addr { return []netip.Addr{e.at.Addr4, e.at.Addr6} }

// addrOf returns the sandbox's address of the same family.
func addrOf(s *lab.Sandbox, family netip.Addr) netip.Addr {
	if family.Is4() {
		return s.Addr4
	}
	return s.Addr6
}

// counted reads packet counters by result, as differences since the last call.
type counted struct {
	tier *Tier
	last map[string]uint64
}

func (c *counted) since(t testing.TB) map[string]uint64 {
	t.Helper()
	list, err := c.tier.Packets()
	if err != nil {
		t.Fatal(err)
	}
	now, since := map[string]uint64{}, map[string]uint64{}
	for _, p := range list {
		now[p.Result] = p.Count
		if n := p.Count - c.last[p.Result]; n > 0 {
			since[p.Result] = n
		}
	}
	c.last = now
	return since
}

// outcomesOf are the counters of all Services together.
func outcomesOf(t testing.TB, tier *Tier) (node, outside proxier.Outcomes) {
	t.Helper()
	list, err := tier.Traffic()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		node, outside = node.Plus(s.Node), outside.Plus(s.Outside)
	}
	return node, outside
}

// TestOutcomesByClient: connections of clients on the node and outside are counted apart, whatever their result.
func TestOutcomesByClient(t *testing.T) {
	e := newEdge(t, Options{})
	clients := [2]struct {
		name string
		from *lab.Sandbox
		to   netip.AddrPort
	}{{"a pod", e.here.Sandbox, netip.AddrPortFrom(vip4, 80)}, {"a client outside", e.client.Sandbox, netip.AddrPortFrom(lb4, lbPort)}}
	var want [2]proxier.Outcomes
	each := func(what string, answered bool, counted func(*proxier.Outcomes) *uint64) {
		t.Helper()
		for i, c := range clients {
			if _, err := c.from.Ask(shortly(t), "udp", c.to); (err == nil) != answered {
				t.Errorf("%s asks %s: %v", c.name, c.to, err)
			}
			*counted(&want[i])++
			node, outside := outcomesOf(t, e.tier)
			if d := cmp.Diff(want, [2]proxier.Outcomes{node, outside}); d != "" {
				t.Errorf("%s is %s: on the node and outside (-want +got):\n%s", c.name, what, d)
			}
		}
	}
	each("rejected", false, func(o *proxier.Outcomes) *uint64 { return &o.Rejected })
	e.use(t, serve(t, e.there))
	each("served", true, func(o *proxier.Outcomes) *uint64 { return &o.Connections })
	clients[0].to = clients[1].to // ClusterIPs have no source ranges
	e.OnServiceUpdate(nil, edgeService(func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24"} }))
	e.sync(t)
	each("dropped", false, func(o *proxier.Outcomes) *uint64 { return &o.Dropped })
}
