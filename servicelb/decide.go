// SPDX-License-Identifier: Apache-2.0

package servicelb

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// Objects are what decisions depend on.
type Objects struct {
	Services []*v1.Service
	Nodes    []*v1.Node
	// Slices are those of a Service.
	Slices func(types.NamespacedName) []*discoveryv1.EndpointSlice
	// Healthy reports whether the proxy of a node answers; nil if that is not checked.
	Healthy func(node string) bool
	// Report is what the kube-proxy of a node says; nil if it says nothing, as others do not. The function is nil if none is asked.
	Report func(node string) *nodereport.Report
	// HostPorts are those of the pods of a node; nil if they are not known.
	HostPorts func(node string) []HostPort
	// Listens reports whether a process of the host listens on a port at an address of a node without a report; nil if that is not
	// checked.
	Listens func(Claim) bool
	// Overdue reports whether an address that a Service has in its status is not served for so long that it has to be withdrawn; nil
	// for never.
	Overdue func(*v1.Service, netip.Addr) bool
}

// Options of decisions.
type Options struct {
	// DefaultClass takes Services without a loadBalancerClass too.
	DefaultClass bool
	// EachNode has every node be reached at its ExternalIPs, or else at its InternalIPs. Otherwise, once any node has an ExternalIP, only
	// ExternalIPs count, as K3s has it.
	EachNode bool
	// Rootless has the status be the loopback address, as K3s has it where a user without privileges runs the node.
	Rootless bool
	// Listeners is what a process of a host means that listens at a port which a Service wants, if its annotation does not say.
	Listeners ListenerPolicy
	// Forbidden are annotations that count for nothing.
	Forbidden []string
}

// ListenerPolicy is what happens if a process of a host listens at a port that a Service wants.
type ListenerPolicy string

// The policies.
const (
	// ListenersRefuse leaves the port to the process. It is the default.
	ListenersRefuse ListenerPolicy = "refuse"
	// ListenersWarn gives it to the Service, and says so.
	ListenersWarn ListenerPolicy = "warn"
	// ListenersShadow gives it to the Service.
	ListenersShadow ListenerPolicy = "shadow"
)

// ParseListenerPolicy parses a policy by its name.
func ParseListenerPolicy(name string) (ListenerPolicy, error) {
	switch p := ListenerPolicy(name); p {
	case ListenersRefuse, ListenersWarn, ListenersShadow:
		return p, nil
	}
	return "", fmt.Errorf("%.32q is none of %s, %s and %s", name, ListenersRefuse, ListenersWarn, ListenersShadow)
}

// Claim is a port of a node that a Service wants.
type Claim struct {
	Addr     netip.Addr
	Port     int32
	Protocol v1.Protocol
}

func (c Claim) String() string {
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(c.Addr, uint16(c.Port)), c.Protocol)
}

// Code is why a Service lacks an address.
type Code string

// The codes.
const (
	NoNodes           Code = "NoNodes"
	PortTaken         Code = "PortTaken"
	PortReserved      Code = "PortReserved"
	HostListens       Code = "HostListens"
	Probing           Code = "Probing"
	NotServed         Code = "NotServed"
	LeftOut           Code = "LeftOut"
	NoEndpoints       Code = "NoEndpoints"
	InvalidAnnotation Code = "InvalidAnnotation"
)

// Reason is why a Service lacks an address, or that something of it is ignored.
type Reason struct {
	Code    Code
	Message string
}

// Outcome is what a Service gets.
type Outcome struct {
	Service *v1.Service
	// Ingress is for the status.
	Ingress []v1.LoadBalancerIngress
	// Probing are the addresses that nodes are to serve, before it is known that they do, and LeftOut those that annotations of the
	// Service keep from it: nodes are asked on, to notice when that changes.
	Probing, LeftOut []netip.Addr
	// Direct says that endpoints on all nodes see the client's address.
	Direct bool
	// Reasons are why it lacks addresses, Warnings what else its owner should know, and Ignored annotations without an effect.
	Reasons, Warnings []Reason
	Ignored           []string
}

// Manages reports whether a Service is served.
func (o *Options) Manages(s *v1.Service) bool {
	if s.Spec.Type != v1.ServiceTypeLoadBalancer {
		return false
	}
	if s.Spec.LoadBalancerClass == nil {
		return o.DefaultClass
	}
	return *s.Spec.LoadBalancerClass == Class
}

// Decide returns what the Services get that are served, in the order in which they choose: by priority, then age, then UID. No two
// get one port of one address.
func Decide(o Objects, opts Options) []Outcome { return new(Planner).Decide(o, opts) }

// Decide is Decide, and reuses what has not changed since the last time. The options have to be the same.
func (p *Planner) Decide(o Objects, opts Options) (list []Outcome) {
	type candidate struct {
		*v1.Service
		wishes
	}
	var candidates []candidate
	for _, s := range o.Services {
		if opts.Manages(s) && s.DeletionTimestamp.IsZero() {
			candidates = append(candidates, candidate{s, opts.wishesOf(s)})
		}
	}
	slices.SortFunc(candidates, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.priority, a.priority), a.CreationTimestamp.Time.Compare(b.CreationTimestamp.Time), cmp.Compare(a.UID, b.UID))
	})
	d := decider{Objects: o, opts: opts, owners: map[Claim]string{}, nodePorts: map[nodePort]string{}, wanted: map[nodePort]int{}, fit: fitNodes(&o)}
	d.noteNodePorts()
	for _, c := range candidates {
		for i := range c.Spec.Ports {
			d.wanted[portOf(&c.Spec.Ports[i])]++
		}
	}
	p.begin(d.fit)
	list = make([]Outcome, 0, len(candidates))
	for _, c := range candidates {
		d.want(c.Service, &c.wishes)
		out, known := p.recall(&d, c.Service)
		if !known {
			d.volatile = false
			out = d.decide(c.Service, c.wishes)
			p.keep(&d, &out)
		}
		list = append(list, out)
	}
	p.end()
	return list
}

// wantedPort is a port of a Service.
type wantedPort struct {
	nodePort
	contested bool    // other Services want it too
	refused   *Reason // why it is to be had nowhere; nil if it is
}

func portOf(p *v1.ServicePort) nodePort { return nodePort{p.Port, protocolOf(p)} }

type nodePort struct {
	port     int32
	protocol v1.Protocol
}

type decider struct {
	Objects
	opts      Options
	owners    map[Claim]string    // Services that got a port which several want
	nodePorts map[nodePort]string // Services that have it on every node
	wanted    map[nodePort]int    // how many Services want a port
	fit       []fitNode

	volatile   bool         // the decision depends on more than a Planner compares
	ports      []wantedPort // of the Service that is decided about
	candidates []address    // scratch
	places     []netip.Addr // scratch
}

// fitNode is a node that may have addresses of Services.
type fitNode struct {
	*v1.Node
	internal, external []address
	report             *nodereport.Report // nil if there is none
	hostPorts          []HostPort
}

// address is one of a node, as value and text.
type address struct {
	netip.Addr
	text string
}

// noteNodePorts: NodePorts of all Services are taken on every node, as are the ports of their health checks.
func (d *decider) noteNodePorts() {
	for _, s := range d.Services {
		if p := s.Spec.HealthCheckNodePort; p != 0 {
			d.nodePorts[nodePort{p, v1.ProtocolTCP}] = nameOf(s)
		}
		for i := range s.Spec.Ports {
			if p := &s.Spec.Ports[i]; p.NodePort != 0 {
				d.nodePorts[nodePort{p.NodePort, protocolOf(p)}] = nameOf(s)
			}
		}
	}
}

func protocolOf(p *v1.ServicePort) v1.Protocol { return cmp.Or(p.Protocol, v1.ProtocolTCP) }

func nameOf(s *v1.Service) string { return s.Namespace + "/" + s.Name }

// fitNodes are nodes that are Ready, whose proxy answers, and that the label of any node admits.
func fitNodes(o *Objects) (fit []fitNode) {
	allowList := slices.ContainsFunc(o.Nodes, func(n *v1.Node) bool { _, there := n.Labels[LabelEnable]; return there })
	for _, n := range o.Nodes {
		if allowList && n.Labels[LabelEnable] != "true" || !isReady(n) || !n.DeletionTimestamp.IsZero() {
			continue
		}
		if o.Healthy == nil || o.Healthy(n.Name) {
			f := fitNode{Node: n, internal: addressesOf(n, v1.NodeInternalIP), external: addressesOf(n, v1.NodeExternalIP)}
			if o.Report != nil {
				f.report = o.Report(n.Name)
			}
			if o.HostPorts != nil {
				f.hostPorts = o.HostPorts(n.Name)
			}
			fit = append(fit, f)
		}
	}
	slices.SortFunc(fit, func(a, b fitNode) int { return strings.Compare(a.Name, b.Name) })
	return fit
}

func isReady(n *v1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c v1.NodeCondition) bool { return c.Type == v1.NodeReady && c.Status == v1.ConditionTrue })
}

func (d *decider) decide(s *v1.Service, w wishes) Outcome {
	out := Outcome{Service: s, Warnings: w.invalid, Ignored: w.ignored}
	assigned := d.assign(&out, &w)
	if len(assigned) == 0 {
		out.Reasons, out.Warnings = append(out.Warnings, out.Reasons...), nil // of the annotations first, which may be why
	}
	out.Direct = out.Direct && len(assigned) > 0
	slices.SortFunc(assigned, func(a, b address) int {
		return cmp.Or(cmp.Compare(slices.Index(s.Spec.IPFamilies, familyOf(a.Addr)), slices.Index(s.Spec.IPFamilies, familyOf(b.Addr))), a.Compare(b.Addr))
	})
	if d.opts.Rootless && len(assigned) > 0 {
		for _, a := range assigned { // nodes serve those all the same
			out.Probing = append(out.Probing, a.Addr)
		}
		assigned = append(assigned[:0], address{text: "127.0.0.1"})
	}
	out.Ingress = make([]v1.LoadBalancerIngress, len(assigned))
	for i, a := range assigned {
		out.Ingress[i] = v1.LoadBalancerIngress{IP: a.text, IPMode: &vip}
	}
	slices.SortFunc(out.Probing, netip.Addr.Compare)
	slices.SortFunc(out.LeftOut, netip.Addr.Compare)
	return out
}

// assign returns the addresses that a Service gets, and notes why it lacks others.
func (d *decider) assign(out *Outcome, w *wishes) (assigned []address) {
	s := out.Service
	lacks := func(code Code, format string, args ...any) {
		out.Reasons = append(out.Reasons, Reason{code, fmt.Sprintf(format, args...)})
	}
	nodes := d.fit
	if pool, there := s.Labels[LabelPool]; there {
		nodes = keep(nodes, func(n fitNode) bool { return n.Labels[LabelPool] == pool })
	}
	if len(nodes) == 0 {
		lacks(NoNodes, "no node is Ready with a kube-proxy that answers, and has the labels that are asked for")
		return nil
	}
	serves := func(fitNode, v1.IPFamily) bool { return true }
	if s.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal {
		with := endpointsOf(d.Slices(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}))
		serves = func(n fitNode, f v1.IPFamily) bool { return with[onNode{n.Name, f}] }
		for _, f := range s.Spec.IPFamilies {
			if !slices.ContainsFunc(nodes, func(n fitNode) bool { return serves(n, f) }) {
				lacks(NoEndpoints, "externalTrafficPolicy is Local, and no fit node has a ready endpoint of %s", f)
			}
		}
		if n := len(out.Reasons); n > 0 && n == len(s.Spec.IPFamilies) {
			return nil
		}
	}
	in := func(a netip.Addr) bool { return slices.Contains(s.Spec.IPFamilies, familyOf(a)) }
	external := slices.ContainsFunc(nodes, func(n fitNode) bool {
		return slices.ContainsFunc(n.external, func(a address) bool { return in(a.Addr) && serves(n, familyOf(a.Addr)) })
	})
	found, seen := false, make(map[netip.Addr]bool, len(nodes))
	var leftOut []Reason
	out.Direct = true
	name := nameOf(s)
	assigned = make([]address, 0, len(nodes))
	for i := range nodes {
		n := &nodes[i]
		var known *nodereport.Service
		if n.report != nil {
			known = n.report.Services[name]
		}
		d.candidates = n.candidates(d.candidates[:0], w, in, external, d.opts.EachNode)
		for _, a := range d.candidates {
			if seen[a.Addr] || !serves(*n, familyOf(a.Addr)) { // two nodes may share one
				continue
			}
			found, seen[a.Addr] = true, true
			unserved := n.unserved(s, known, a.Addr)
			if unserved != nil && unserved.Code == LeftOut { // others may have the port there
				out.LeftOut, leftOut = append(out.LeftOut, a.Addr), append(leftOut, *unserved)
				continue
			}
			if why := d.claim(out, name, n, known, a, w); why != nil {
				out.Reasons = append(out.Reasons, *why)
				continue
			}
			switch {
			case unserved == nil:
			case has(s, a.text) && (d.Overdue == nil || !d.Overdue(s, a.Addr)):
				d.volatile = true // a node that has to program a change may say so for a moment
			default:
				out.Probing = append(out.Probing, a.Addr)
				out.Reasons = append(out.Reasons, *unserved)
				continue
			}
			out.Direct = out.Direct && isDirect(s, known, a.Addr)
			assigned = append(assigned, a)
		}
	}
	switch {
	case !found && len(out.Reasons) == 0:
		lacks(NoNodes, "no fit node has an address that is asked for")
	case len(assigned)+len(out.Reasons) == 0:
		out.Reasons = leftOut
	}
	return assigned
}

var vip = v1.LoadBalancerIPModeVIP // of all addresses; immutable

// candidates appends the addresses of a node that a Service may have.
func (n *fitNode) candidates(list []address, w *wishes, in func(netip.Addr) bool, external, eachNode bool) []address {
	of := n.external
	if !slices.ContainsFunc(of, func(a address) bool { return in(a.Addr) }) && (!external || eachNode) {
		of = n.internal
	}
	for _, a := range of {
		if in(a.Addr) && w.wants(a.Addr, "") {
			list = append(list, a)
		}
	}
	if !w.restricts || n.report == nil {
		return list
	}
	for _, a := range n.report.Addresses {
		if in(a.Address) && w.wants(a.Address, a.Interface) && !slices.ContainsFunc(list, func(o address) bool { return o.Addr == a.Address }) {
			list = append(list, address{a.Address, a.Address.String()})
		}
	}
	return list
}

// places appends the addresses at which packets for an address of a node arrive there: those that a router may translate it to, if the node
// does not have it itself (proxier.Table serves the Service there).
func (n *fitNode) places(list []netip.Addr, a address, w *wishes) []netip.Addr {
	list = append(list, a.Addr)
	is := func(o address) bool { return o.Addr == a.Addr }
	if n.report == nil || !slices.ContainsFunc(n.external, is) || slices.ContainsFunc(n.internal, is) ||
		slices.ContainsFunc(n.report.Addresses, func(o nodereport.Address) bool { return o.Address == a.Addr }) {
		return list
	}
	if i := slices.IndexFunc(n.internal, func(o address) bool { return familyOf(o.Addr) == familyOf(a.Addr) }); i >= 0 {
		list = append(list, n.internal[i].Addr)
	}
	for _, o := range n.report.Addresses {
		if !w.restricts && familyOf(o.Address) == familyOf(a.Addr) && !slices.Contains(list, o.Address) {
			list = append(list, o.Address)
		}
	}
	return list
}

// lost reports whether a node has said that an address is not its own. External addresses may be translated on the way.
func (n *fitNode) lost(a netip.Addr) bool {
	return len(n.report.Addresses) > 0 && !slices.ContainsFunc(n.report.Addresses, func(o nodereport.Address) bool { return o.Address == a }) &&
		!slices.ContainsFunc(n.external, func(o address) bool { return o.Addr == a })
}

// unserved is why a node does not serve a Service at an address, by its report; nil if it does, or does not say.
func (n *fitNode) unserved(s *v1.Service, known *nodereport.Service, a netip.Addr) *Reason {
	if n.report == nil {
		return nil
	}
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		switch served := known.Find(string(protocolOf(p)), uint16(p.Port)).At(a); {
		case served == nil && known != nil && n.lost(a):
			return &Reason{NotServed, fmt.Sprintf("no uplink of node %s has %s, although its Node object does", n.Name, a)}
		case served == nil:
			return &Reason{Probing, fmt.Sprintf("the kube-proxy of node %s has not reported yet that it serves %s", n.Name, Claim{a, p.Port, protocolOf(p)})}
		case served.LeftOut:
			return &Reason{LeftOut, fmt.Sprintf("on node %s, %s", n.Name, served.Fault)}
		case served.Fault != "":
			return &Reason{NotServed, fmt.Sprintf("the kube-proxy of node %s does not serve %s: %s", n.Name, Claim{a, p.Port, protocolOf(p)}, served.Fault)}
		}
	}
	return nil
}

// isDirect reports whether a node has endpoints of other nodes see the client's address.
func isDirect(s *v1.Service, known *nodereport.Service, a netip.Addr) bool {
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		if served := known.Find(string(protocolOf(p)), uint16(p.Port)).At(a); served == nil || !served.Direct {
			return false
		}
	}
	return true
}

func keep(list []fitNode, is func(fitNode) bool) (kept []fitNode) {
	for _, n := range list {
		if is(n) {
			kept = append(kept, n)
		}
	}
	return kept
}

// want sets the ports of a Service.
func (d *decider) want(s *v1.Service, w *wishes) {
	d.ports = d.ports[:0]
	for i := range s.Spec.Ports {
		p := wantedPort{nodePort: portOf(&s.Spec.Ports[i])}
		p.contested = d.wanted[p.nodePort] > 1
		if slices.Contains(ReservedPorts, p.port) && !slices.Contains(w.reserved, p.port) {
			p.refused = &Reason{PortReserved, fmt.Sprintf("port %d is reserved for the host; annotation %s can name it", p.port, AnnotationReservedPorts)}
		} else if other := d.nodePorts[p.nodePort]; other != "" && other != nameOf(s) {
			p.refused = &Reason{PortTaken, fmt.Sprintf("port %d/%s is a NodePort of %s", p.port, p.protocol, other)}
		}
		d.ports = append(d.ports, p)
	}
}

// claim takes all ports of a Service at an address of a node, or none and returns why. It also returns why the address has to wait
// although it has the ports.
func (d *decider) claim(out *Outcome, name string, n *fitNode, known *nodereport.Service, a address, w *wishes) *Reason {
	s := out.Service
	listeners := cmp.Or(w.listeners, d.opts.Listeners, ListenersRefuse)
	d.places = n.places(d.places[:0], a, w)
	places := d.places
	var warnings []Reason
	var wait *Reason
	for i := range d.ports {
		p := &d.ports[i]
		c := Claim{a.Addr, p.port, p.protocol}
		if p.refused != nil {
			return p.refused
		}
		for _, at := range places {
			c := Claim{at, p.port, p.protocol}
			if owner := d.owners[c]; p.contested && owner != "" && owner != name {
				return &Reason{PortTaken, fmt.Sprintf("%s is taken by %s", c, owner)}
			}
		}
		if i := slices.IndexFunc(n.hostPorts, func(h HostPort) bool { return h.has(c) }); i >= 0 {
			if text := fmt.Sprintf("%s is a hostPort of pod %s", c, n.hostPorts[i].Pod); had(s, a) {
				warnings = append(warnings, Reason{PortTaken, text + ", which gets no connections from outside there"})
			} else {
				return &Reason{PortTaken, text}
			}
		}
		if listeners == ListenersShadow {
			continue
		}
		switch at, there := d.listener(s, n, c, a, w); {
		case there && listeners == ListenersRefuse && !had(s, a):
			return &Reason{HostListens, fmt.Sprintf("a process of the host listens on %s", at)}
		case there:
			warnings = append(warnings, Reason{HostListens, fmt.Sprintf("a process of the host listens on %s, and gets no connections from outside there", at)})
		case n.report != nil && known.Find(string(c.Protocol), uint16(c.Port)) == nil && !had(s, a):
			wait = &Reason{Probing, fmt.Sprintf("the kube-proxy of node %s has not reported yet whether a process listens on %s", n.Name, c)}
		}
	}
	for i := range d.ports {
		for _, at := range places {
			if p := &d.ports[i]; p.contested {
				d.owners[Claim{at, p.port, p.protocol}] = name
			}
		}
	}
	out.Warnings = append(out.Warnings, warnings...)
	return wait
}

// listener returns where a process of the host listens that a Service would take connections from. Without a report of it, this is unknown once
// the Service has the address: the Service itself answers there.
func (d *decider) listener(s *v1.Service, n *fitNode, c Claim, a address, w *wishes) (at Claim, there bool) {
	if n.report == nil || n.report.NoListeners != "" {
		if d.Listens == nil || had(s, a) {
			return c, false
		}
		d.volatile = true
		return c, d.Listens(c)
	}
	for i := range n.report.Listeners {
		l := &n.report.Listeners[i]
		if l.Port != uint16(c.Port) || l.Protocol != string(c.Protocol) || d.isEndpoint(s, n, l) {
			continue
		}
		if l.At(string(c.Protocol), c.Addr, uint16(c.Port)) {
			return c, true
		}
		for _, a := range n.report.Addresses { // without the annotation, the Service is served at these too
			if !w.restricts && a.Address.Is4() == c.Addr.Is4() && l.At(string(c.Protocol), a.Address, uint16(c.Port)) {
				return Claim{a.Address, c.Port, c.Protocol}, true
			}
		}
	}
	return c, false
}

// isEndpoint reports whether what listens on a node is an endpoint of the Service itself, of a pod in the host's network.
func (d *decider) isEndpoint(s *v1.Service, n *fitNode, l *nodereport.Listener) bool {
	d.volatile = true
	for _, slice := range d.Slices(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}) {
		if !slices.ContainsFunc(slice.Ports, func(p discoveryv1.EndpointPort) bool { return p.Port != nil && *p.Port == int32(l.Port) }) {
			continue
		}
		for i := range slice.Endpoints {
			for _, text := range slice.Endpoints[i].Addresses {
				if a, err := netip.ParseAddr(text); err == nil && slices.ContainsFunc(n.Status.Addresses, func(of v1.NodeAddress) bool { return of.Address == text }) && (l.Address == a || l.Address.IsUnspecified()) {
					return true
				}
			}
		}
	}
	return false
}

// had reports whether a Service has an address already, or is to have it. A process that listens there later does not take it.
func had(s *v1.Service, a address) bool {
	return has(s, a.text) || slices.Contains(nodereport.Probed(s.Status.Conditions), a.Addr)
}

// has reports whether the status of a Service has an address: then what answers there is the Service.
func has(s *v1.Service, a string) bool {
	return slices.ContainsFunc(s.Status.LoadBalancer.Ingress, func(i v1.LoadBalancerIngress) bool { return i.IP == a })
}

// addressesOf are the addresses of a node of one type.
func addressesOf(n *v1.Node, kind v1.NodeAddressType) (list []address) {
	for _, of := range n.Status.Addresses {
		a, err := netip.ParseAddr(of.Address)
		if of.Type != kind || err != nil || a.Zone() != "" {
			continue
		}
		a = a.Unmap()
		if !slices.ContainsFunc(list, func(o address) bool { return o.Addr == a }) {
			list = append(list, address{a, a.String()})
		}
	}
	return list
}

func familyOf(a netip.Addr) v1.IPFamily {
	if a.Is4() {
		return v1.IPv4Protocol
	}
	return v1.IPv6Protocol
}

// onNode is a family on a node.
type onNode struct {
	node   string
	family v1.IPFamily
}

// endpointsOf are the nodes with an endpoint of a family that is ready, or terminates and still serves (KEP-1669). Who made the slice does
// not matter.
func endpointsOf(slices []*discoveryv1.EndpointSlice) map[onNode]bool {
	with := map[onNode]bool{}
	for _, s := range slices {
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			c := &e.Conditions
			serves := c.Serving != nil && *c.Serving && c.Terminating != nil && *c.Terminating
			if e.NodeName != nil && (c.Ready == nil || *c.Ready || serves) {
				with[onNode{*e.NodeName, v1.IPFamily(s.AddressType)}] = true
			}
		}
	}
	return with
}
