// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
)

// Model is a Cluster of decision tables: every node has a proxier whose tier
// only stores decisions, and Model simulates the path of a packet from node to
// node. At each node, it compares the tier's verdict with the table's explanation.
type Model struct {
	scenario  *Scenario
	config    Config
	nodes     []*modelNode
	objects   map[string]metav1.Object
	announced []Announce
	problems  []proxier.Problem
	affinity  map[affinityKey]netip.AddrPort
	flows     map[string]modelFlow
}

type modelNode struct {
	name    string
	object  *v1.Node
	extra   []netip.Addr // added by Address
	says    []proxier.BackendOverride
	proxier *proxier.Proxier
	tier    *modelTier
}

// affinityKey identifies an affinity entry: one per client, service port and node.
type affinityKey struct {
	node   string
	port   proxier.ServicePortName
	client netip.Addr
}

type modelFlow struct {
	port    proxier.ServicePortName
	backend netip.AddrPort
	answer  Answer
}

var (
	_ Cluster = (*Model)(nil)
	_ Tables  = (*Model)(nil)
)

// NewModel makes a cluster for one run of a scenario.
func NewModel(s *Scenario) *Model {
	return &Model{
		scenario: s, objects: map[string]metav1.Object{},
		affinity: map[affinityKey]netip.AddrPort{}, flows: map[string]modelFlow{},
	}
}

// Configure starts the proxies, or updates their configuration.
func (m *Model) Configure(ctx context.Context, c Config) error {
	same := m.nodes != nil && m.config.SameProcess(c)
	m.config = c
	if m.nodes == nil {
		for _, n := range m.scenario.Nodes {
			object, err := m.scenario.NodeObject(n.Name)
			if err != nil {
				return err
			}
			m.nodes = append(m.nodes, &modelNode{name: n.Name, object: object})
		}
	}
	for _, n := range m.nodes {
		if !same {
			if err := m.start(ctx, n); err != nil {
				return err
			}
			continue
		}
		if err := m.learn(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// start starts a node's proxy. After a restart, objects arrive in another order.
func (m *Model) start(ctx context.Context, n *modelNode) error {
	policy, err := m.config.Policy()
	if err != nil {
		return err
	}
	n.tier = &modelTier{}
	n.proxier, err = proxier.New(proxier.Options{
		NodeName: n.name, Facts: m.facts(n), Policy: policy, Tier: n.tier, Reporter: m,
		NodeFacts: func(object *v1.Node, f *proxier.Facts) {
			n.object = object
			*f = m.facts(n)
		},
	})
	if err != nil {
		return err
	}
	for _, k := range slices.Sorted(maps.Keys(m.objects)) {
		Feed(n.proxier, n.name, ObjectChange{New: m.objects[k]})
	}
	n.proxier.OnServiceSynced()
	n.proxier.OnEndpointSlicesSynced()
	err = n.proxier.Sync(ctx)
	n.tier.changes = nil
	return err
}

// learn updates the proxy's facts about its node.
func (m *Model) learn(ctx context.Context, n *modelNode) error {
	n.proxier.UpdateFacts(func(f *proxier.Facts) { *f = m.facts(n) })
	return n.proxier.Sync(ctx)
}

// uplink is the device of a node by which all but its pods come in.
const uplink = "eth0"

func (m *Model) facts(n *modelNode) proxier.Facts {
	f := proxier.Facts{Zone: n.object.Labels[v1.LabelTopologyZone], Labels: n.object.Labels, ServiceCIDRs: m.config.ServiceCIDRs, Uplinks: []string{uplink}}
	for _, kind := range []v1.NodeAddressType{v1.NodeInternalIP, v1.NodeExternalIP} {
		for _, a := range n.object.Status.Addresses {
			addr, err := netip.ParseAddr(a.Address)
			if a.Type == kind && err == nil && !f.NodeIPs[proxier.FamilyOf(addr)].IsValid() {
				f.NodeIPs[proxier.FamilyOf(addr)] = addr
			}
		}
	}
	f.LocalAddrs, f.Overrides = m.localAddrs(n), n.says
	d := &m.config.Detect
	switch d.Mode {
	case DetectClusterCIDR:
		f.Pods.CIDRs = d.CIDRs
	case DetectNodeCIDR:
		for _, text := range n.object.Spec.PodCIDRs {
			if p, err := netip.ParsePrefix(text); err == nil {
				f.Pods.CIDRs = append(f.Pods.CIDRs, p)
			}
		}
	case DetectBridgeInterface, DetectInterfaceNamePrefix:
		f.Pods.Interface, f.Pods.InterfacePrefix = d.Interface, d.Mode == DetectInterfaceNamePrefix
	}
	return f
}

func (m *Model) localAddrs(n *modelNode) []netip.Addr {
	list := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}
	for family := range proxier.Families {
		list = append(list, m.scenario.Addr(n.name, family), m.scenario.gateway(n.name, family))
	}
	list = append(list, n.extra...)
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}

// Report implements proxier.Reporter.
func (m *Model) Report(p proxier.Problem) { m.problems = append(m.problems, p) }

// Apply passes changed objects to all proxies.
func (m *Model) Apply(ctx context.Context, changes []ObjectChange) error {
	for _, c := range changes {
		if c.New != nil {
			m.objects[key(c.New)] = c.New
		} else {
			delete(m.objects, key(c.Old))
		}
	}
	for _, n := range m.nodes {
		for _, c := range changes {
			Feed(n.proxier, n.name, c)
		}
		if err := n.proxier.Sync(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Announce routes a prefix to nodes.
func (m *Model) Announce(_ context.Context, prefix netip.Prefix, nodes []string) error {
	m.announced = slices.DeleteFunc(m.announced, func(a Announce) bool { return a.Prefix == prefix })
	if len(nodes) > 0 {
		m.announced = append(m.announced, Announce{prefix, nodes})
	}
	// The longest prefix wins.
	slices.SortFunc(m.announced, func(a, b Announce) int { return b.Prefix.Bits() - a.Prefix.Bits() })
	return nil
}

// Address adds an address to a node, or removes it.
func (m *Model) Address(ctx context.Context, node string, addr netip.Addr, gone bool) error {
	n := m.node(node)
	n.extra = slices.DeleteFunc(n.extra, func(a netip.Addr) bool { return a == addr })
	if !gone {
		n.extra = append(n.extra, addr)
	}
	return m.learn(ctx, n)
}

// Override is what an operator says of a backend.
func (m *Model) Override(ctx context.Context, node string, o proxier.BackendOverride) error {
	n := m.node(node)
	n.says = slices.DeleteFunc(slices.Clone(n.says), func(p proxier.BackendOverride) bool {
		p.State = o.State
		return p == o
	})
	if o.State != proxier.ActiveState {
		n.says = append(n.says, o)
		slices.SortFunc(n.says, func(a, b proxier.BackendOverride) int { return a.Compare(&b) })
	}
	return m.learn(ctx, n)
}

// Restart restarts a node's proxy.
func (m *Model) Restart(ctx context.Context, node string) error { return m.start(ctx, m.node(node)) }

func (m *Model) node(name string) *modelNode { return m.nodes[m.scenario.node(name)] }

// Table returns the table of a node as text.
func (m *Model) Table(node string) string { return m.node(node).proxier.Table().Dump() }

// Changes returns the changes of a node's table since the last call.
func (m *Model) Changes(node string) []proxier.PortChange {
	t := m.node(node).tier
	defer func() { t.changes = nil }()
	return t.changes
}

// HealthChecks returns the health checks of a node.
func (m *Model) HealthChecks(node string) map[types.NamespacedName]proxier.HealthCheck {
	return m.node(node).proxier.Table().HealthChecks()
}

// Problems returns the problems reported so far.
func (m *Model) Problems() []proxier.Problem { return m.problems }

// Reach simulates a call.
func (m *Model) Reach(_ context.Context, p Probe) (Observation, error) {
	if p.Flow != "" {
		return m.flow(p)
	}
	o, _, err := m.call(p)
	return o, err
}

// flow continues a connection as long as its backend exists.
func (m *Model) flow(p Probe) (Observation, error) {
	f, open := m.flows[p.Flow]
	if open && p.Protocol != proxier.UDP {
		return Observation{Answers: []Answer{f.answer}, Path: Proxied}, nil
	}
	o, arrivals, err := m.call(p)
	if err != nil {
		return o, err
	}
	if open && len(arrivals) > 0 {
		// Clients keep a backend that their Service still has, even if it is not eligible any more.
		d := arrivals[0].decision
		if d != nil && d.Name == f.port && slices.ContainsFunc(d.Backends, func(b proxier.Backend) bool { return b.Addr == f.backend }) {
			return Observation{Answers: []Answer{f.answer}, Path: Proxied}, nil
		}
	}
	delete(m.flows, p.Flow)
	if len(o.Answers) == 0 {
		return o, nil
	}
	o.Answers = o.Answers[:1]
	e := arrivals[0]
	for _, b := range e.backends {
		if m.nameOf(b.Addr()) == o.Answers[0].Server {
			m.flows[p.Flow] = modelFlow{port: e.decision.Name, backend: b, answer: o.Answers[0]}
			break
		}
	}
	return o, nil
}

// arrival is a packet at a node: the tier's verdict and the table's explanation.
type arrival struct {
	verdict
	proxier.Explanation
	node string
}

// call simulates the first packet of a call. If the network chooses among several
// nodes, it returns an arrival for each of them.
func (m *Model) call(p Probe) (Observation, []arrival, error) {
	s := m.scenario
	home := s.NodeOf(p.From)
	if s.kindOf(p.From) == "pod" && p.To.Addr().IsLoopback() {
		// Packets to a pod's loopback address never reach the node.
		return Observation{Failures: []Failure{ConnectionRefused}, Path: Passed}, nil, nil
	}
	flow := proxier.Flow{Source: netip.AddrPortFrom(m.source(p.From, p.To.Addr()), 0), Destination: p.To, Protocol: p.Protocol}
	if home != "" {
		if s.kindOf(p.From) == "pod" {
			flow.Device = fmt.Sprintf("pod%d", s.podNumber(p.From))
		}
		a, err := m.arrive(home, flow)
		if err != nil {
			return Observation{}, nil, err
		}
		if a.outcome != proxier.Pass {
			o, err := m.outcome(p, a)
			return o, []arrival{a}, err
		}
		if p.To.Addr().IsLoopback() || slices.Contains(m.localAddrs(m.node(home)), p.To.Addr()) {
			return m.passed(p.To.Addr())
		}
	}
	flow.Device = uplink
	var o Observation
	var arrivals []arrival
	nodes := m.towards(p, home)
	for _, node := range nodes {
		a, err := m.arrive(node, flow)
		if err != nil {
			return o, nil, err
		}
		if a.outcome == proxier.Pass {
			continue
		}
		here, err := m.outcome(p, a)
		if err != nil {
			return o, nil, err
		}
		arrivals = append(arrivals, a)
		o.Answers, o.Failures, o.Path = append(o.Answers, here.Answers...), append(o.Failures, here.Failures...), here.Path
	}
	switch {
	case len(arrivals) == 0:
		return m.passed(p.To.Addr())
	case len(arrivals) < len(nodes):
		return o, nil, fmt.Errorf("%s is routed to several nodes, but only some serve it", p.To.Addr())
	}
	return o, arrivals, nil
}

// source returns the source address of a call.
func (m *Model) source(from string, to netip.Addr) netip.Addr {
	if m.scenario.kindOf(from) == "host" && (to.IsLoopback() || slices.Contains(m.localAddrs(m.node(from)), to)) {
		return to // a host's connections to itself have equal source and destination addresses
	}
	return m.scenario.Addr(from, proxier.FamilyOf(to))
}

// towards returns the nodes to which the network routes packets that leave home. Home is
// a node, or empty for clients.
func (m *Model) towards(p Probe, home string) []string {
	s, to := m.scenario, p.To.Addr()
	if p.Via != "" {
		return []string{p.Via}
	}
	if owner := s.owner(to.String()); owner != "" {
		if node := s.NodeOf(owner); node != "" && node != home {
			return []string{node}
		}
		return nil
	}
	for _, a := range m.announced {
		if a.Prefix.Contains(to) {
			return slices.DeleteFunc(slices.Clone(a.Nodes), func(n string) bool { return n == home })
		}
	}
	return nil
}

// nameOf returns the name of the current owner of an address; empty for none.
func (m *Model) nameOf(a netip.Addr) string {
	for _, n := range m.nodes {
		if slices.Contains(n.extra, a) {
			return n.name
		}
	}
	return m.scenario.owner(a.String())
}

func (m *Model) arrive(node string, f proxier.Flow) (arrival, error) {
	n := m.node(node)
	a := arrival{n.tier.decide(f, m.localAddrs(n)), n.proxier.Table().Explain(f), node}
	if err := a.agrees(&a.Explanation); err != nil {
		return a, fmt.Errorf("at %s: %w", node, err)
	}
	return a, nil
}

func (m *Model) passed(to netip.Addr) (Observation, []arrival, error) {
	f := TimedOut
	if to.IsLoopback() || m.nameOf(to) != "" {
		f = ConnectionRefused
	}
	return Observation{Failures: []Failure{f}, Path: Passed}, nil, nil
}

// outcome returns what the client observes if a tier acts as the table says.
func (m *Model) outcome(p Probe, a arrival) (Observation, error) {
	o := Observation{Path: Proxied}
	switch a.outcome {
	case proxier.Rejected:
		o.Failures = []Failure{ConnectionRefused}
		return o, nil
	case proxier.Dropped:
		o.Failures = []Failure{TimedOut}
		return o, nil
	}
	eligible := a.backends
	if a.decision.Affinity > 0 {
		k := affinityKey{a.node, a.decision.Name, a.Flow.Source.Addr()}
		was, known := m.affinity[k]
		if !known || !slices.Contains(eligible, was) {
			was = eligible[len(m.affinity)%len(eligible)]
			m.affinity[k] = was
		}
		eligible = []netip.AddrPort{was}
	}
	for _, backend := range eligible {
		answer, err := m.deliver(p, a, backend)
		if err != nil {
			return o, err
		}
		o.Answers = append(o.Answers, answer)
	}
	return o, nil
}

// deliver returns who answers at a backend's address, and which source it sees.
func (m *Model) deliver(p Probe, a arrival, backend netip.AddrPort) (Answer, error) {
	answer := Answer{Server: m.nameOf(backend.Addr())}
	source := a.Flow.Source.Addr()
	switch {
	case answer.Server == "":
		return answer, fmt.Errorf("endpoint %s belongs to no pod or node", backend)
	case backend.Addr() == source, a.route.Source == proxier.AnySource:
	case a.route.Source == proxier.Masquerade && answer.Server == a.node:
		// Packets to a backend of the same node may be delivered without masquerading.
	case a.route.Source == proxier.Masquerade:
		answer.Source = m.scenario.Addr(a.node, proxier.FamilyOf(source))
	default:
		answer.Source = source
		// The reply must pass the node that translated the request.
		if a.node != m.scenario.NodeOf(p.From) && a.node != m.scenario.NodeOf(answer.Server) {
			return answer, fmt.Errorf("the reply of %s to %s bypasses %s, which alone can translate it back: no tier can serve this", answer.Server, p.From, a.node)
		}
	}
	return answer, nil
}
