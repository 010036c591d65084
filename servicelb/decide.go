// SPDX-License-Identifier: Apache-2.0

package servicelb

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"strings"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Objects are what decisions depend on.
type Objects struct {
	Services []*v1.Service
	Nodes    []*v1.Node
	// Slices are those of a Service.
	Slices func(types.NamespacedName) []*discoveryv1.EndpointSlice
	// Healthy reports whether the proxy of a node answers; nil if that is not checked.
	Healthy func(node string) bool
	// Listens reports whether a process of the host listens on a port at an address of a node; nil if that is not checked.
	Listens func(Claim) bool
}

// Options of decisions.
type Options struct {
	// DefaultClass takes Services without a loadBalancerClass too.
	DefaultClass bool
	// EachNode has every node be reached at its ExternalIPs, or else at its InternalIPs. Otherwise, once any node has an ExternalIP, only
	// ExternalIPs count, as K3s has it.
	EachNode bool
	// Listeners is what a process of a host means that listens at a port which a Service wants, if its annotation does not say.
	Listeners ListenerPolicy
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
func Decide(o Objects, opts Options) (list []Outcome) {
	type candidate struct {
		*v1.Service
		wishes
	}
	var candidates []candidate
	for _, s := range o.Services {
		if opts.Manages(s) && s.DeletionTimestamp.IsZero() {
			candidates = append(candidates, candidate{s, wishesOf(s)})
		}
	}
	slices.SortFunc(candidates, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.priority, a.priority), a.CreationTimestamp.Time.Compare(b.CreationTimestamp.Time), cmp.Compare(a.UID, b.UID))
	})
	d := decider{Objects: o, opts: opts, owners: map[Claim]string{}, nodePorts: map[nodePort]string{}, fit: fitNodes(&o)}
	d.noteNodePorts()
	for _, c := range candidates {
		list = append(list, d.decide(c.Service, c.wishes))
	}
	return list
}

type nodePort struct {
	port     int32
	protocol v1.Protocol
}

type decider struct {
	Objects
	opts      Options
	owners    map[Claim]string    // Services that got a port
	nodePorts map[nodePort]string // Services that have it on every node
	fit       []fitNode
}

// fitNode is a node that may have addresses of Services.
type fitNode struct {
	*v1.Node
	internal, external []address
}

// address is one of a node, as value and text.
type address struct {
	netip.Addr
	text string
}

// noteNodePorts: NodePorts of all Services are taken on every node.
func (d *decider) noteNodePorts() {
	for _, s := range d.Services {
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
			fit = append(fit, fitNode{n, addressesOf(n, v1.NodeInternalIP), addressesOf(n, v1.NodeExternalIP)})
		}
	}
	slices.SortFunc(fit, func(a, b fitNode) int { return strings.Compare(a.Name, b.Name) })
	return fit
}

func isReady(n *v1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c v1.NodeCondition) bool { return c.Type == v1.NodeReady && c.Status == v1.ConditionTrue })
}

func (d *decider) decide(s *v1.Service, w wishes) Outcome {
	out := Outcome{Service: s, Reasons: w.invalid, Ignored: w.ignored}
	nodes := d.fit
	if pool, there := s.Labels[LabelPool]; there {
		nodes = keep(nodes, func(n fitNode) bool { return n.Labels[LabelPool] == pool })
	}
	if len(nodes) == 0 {
		out.Reasons = append(out.Reasons, Reason{NoNodes, "no node is Ready with a kube-proxy that answers, and has the labels that are asked for"})
		return out
	}
	if s.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal {
		with := nodesWithEndpoints(d.Slices(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}))
		if nodes = keep(nodes, func(n fitNode) bool { return with[n.Name] }); len(nodes) == 0 {
			out.Reasons = append(out.Reasons, Reason{NoEndpoints, "externalTrafficPolicy is Local, and no fit node has a ready endpoint"})
			return out
		}
	}
	in := func(a address) bool { return slices.Contains(s.Spec.IPFamilies, familyOf(a.Addr)) }
	external := slices.ContainsFunc(nodes, func(n fitNode) bool { return slices.ContainsFunc(n.external, in) })
	found, seen := false, make(map[netip.Addr]bool, len(nodes))
	vip := v1.LoadBalancerIPModeVIP
	var order []netip.Addr // of out.Ingress
	for _, n := range nodes {
		list := n.external
		if !slices.ContainsFunc(list, in) && (!external || d.opts.EachNode) {
			list = n.internal
		}
		for _, a := range list {
			if !in(a) || !w.wants(a.Addr) || seen[a.Addr] { // two nodes may share one
				continue
			}
			found, seen[a.Addr] = true, true
			if why := d.claim(&out, a, &w); why != nil {
				out.Reasons = append(out.Reasons, *why)
				continue
			}
			out.Ingress = append(out.Ingress, v1.LoadBalancerIngress{IP: a.text, IPMode: &vip})
			order = append(order, a.Addr)
		}
	}
	if !found {
		out.Reasons = append(out.Reasons, Reason{NoNodes, "no fit node has an address that is asked for"})
	}
	sort.Sort(&byFamily{out.Ingress, order, s.Spec.IPFamilies})
	return out
}

func keep(list []fitNode, is func(fitNode) bool) (kept []fitNode) {
	for _, n := range list {
		if is(n) {
			kept = append(kept, n)
		}
	}
	return kept
}

// claim takes all ports of a Service at an address, or none and returns why.
func (d *decider) claim(out *Outcome, a address, w *wishes) *Reason {
	s := out.Service
	listeners := cmp.Or(w.listeners, d.opts.Listeners, ListenersRefuse)
	var claims []Claim
	var warnings []Reason
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		c := Claim{a.Addr, p.Port, protocolOf(p)}
		switch owner, other := d.owners[c], d.nodePorts[nodePort{p.Port, c.Protocol}]; {
		case slices.Contains(ReservedPorts, p.Port) && !slices.Contains(w.reserved, p.Port):
			return &Reason{PortReserved, fmt.Sprintf("port %d is reserved for the host; annotation %s can name it", p.Port, AnnotationReservedPorts)}
		case owner != "":
			return &Reason{PortTaken, fmt.Sprintf("%s is taken by %s", c, owner)}
		case other != "":
			return &Reason{PortTaken, fmt.Sprintf("port %d/%s is a NodePort of %s", p.Port, c.Protocol, other)}
		case listeners != ListenersShadow && d.Listens != nil && !has(s, a.text) && d.Listens(c):
			if listeners == ListenersRefuse {
				return &Reason{HostListens, fmt.Sprintf("a process of the host listens on %s", c)}
			}
			warnings = append(warnings, Reason{HostListens, fmt.Sprintf("a process of the host listens on %s, and gets no connections from outside there any more", c)})
		}
		claims = append(claims, c)
	}
	for _, c := range claims {
		d.owners[c] = nameOf(s)
	}
	out.Warnings = append(out.Warnings, warnings...)
	return nil
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

// byFamily sorts addresses by the Service's families, and then by value.
type byFamily struct {
	list     []v1.LoadBalancerIngress
	addrs    []netip.Addr
	families []v1.IPFamily
}

func (b *byFamily) Len() int { return len(b.list) }

func (b *byFamily) Swap(i, j int) {
	b.list[i], b.list[j] = b.list[j], b.list[i]
	b.addrs[i], b.addrs[j] = b.addrs[j], b.addrs[i]
}

func (b *byFamily) Less(i, j int) bool {
	if x, y := slices.Index(b.families, familyOf(b.addrs[i])), slices.Index(b.families, familyOf(b.addrs[j])); x != y {
		return x < y
	}
	return b.addrs[i].Less(b.addrs[j])
}

// nodesWithEndpoints are nodes with an endpoint that is ready, or terminates and still serves (KEP-1669). Who made the slice does not matter.
func nodesWithEndpoints(slices []*discoveryv1.EndpointSlice) map[string]bool {
	nodes := map[string]bool{}
	for _, s := range slices {
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			c := &e.Conditions
			serves := c.Serving != nil && *c.Serving && c.Terminating != nil && *c.Terminating
			if e.NodeName != nil && (c.Ready == nil || *c.Ready || serves) {
				nodes[*e.NodeName] = true
			}
		}
	}
	return nodes
}
