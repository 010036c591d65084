// SPDX-License-Identifier: Apache-2.0

// Package explain is the answer to "what becomes of this flow on this node, and
// why": the form in which kube-proxy serves it and tandemctl prints it.
package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// Path and the names of its parameters, at which kube-proxy answers.
const (
	Path             = "/debug/explain"
	ParamSource      = "src"
	ParamDestination = "dst"
	ParamProtocol    = "protocol"
	ParamDevice      = "device"
)

// Explanation is the answer, as JSON. Fields may be added; none changes its
// name or its meaning.
type Explanation struct {
	// Node on which the flow was looked at.
	Node string `json:"node"`
	Flow Flow   `json:"flow"`
	// Verdict is forward, reject (the client is told at once), drop (silence) or
	// pass (it is for no Service and goes where it was going). Reason is why.
	Verdict string `json:"verdict"`
	Reason  string `json:"reason"`
	Origin  Origin `json:"origin"`
	// Frontend that the destination belongs to; null for none. Everything below
	// is about it.
	Frontend *Frontend `json:"frontend"`
	// Endpoints that were considered, sorted by address.
	Endpoints []Endpoint `json:"endpoints"`
	// Tiers of this node and whether they carry the frontend; empty where no
	// process was asked.
	Tiers []Tier `json:"tiers"`
	// Notes are what one should know besides. Those that begin with "Warning:"
	// are about something that is probably not meant so.
	Notes []string `json:"notes"`
}

// Flow that was asked about.
type Flow struct {
	// Source is an address, with a port where one was given.
	Source      string         `json:"source"`
	Destination netip.AddrPort `json:"destination"`
	Protocol    string         `json:"protocol"`
	// Device by which it came in; empty for one that this host sends.
	Device string `json:"device,omitempty"`
}

// Origin is who sends the flow, as far as Services make a difference.
type Origin struct {
	Kind   string `json:"kind"` // pod, host or outside
	Reason string `json:"reason"`
}

// Frontend is an address of a service port, and what it does for the origin.
type Frontend struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Port      string `json:"port"` // its name; empty for an unnamed one
	Protocol  string `json:"protocol"`
	// Kind is ClusterIP, LoadBalancer, ExternalIP or NodePort. The address of a
	// NodePort is the unspecified one.
	Kind    string         `json:"kind"`
	Address netip.AddrPort `json:"address"`
	Match   string         `json:"match"` // why the destination belongs to it

	// Set of endpoints: ipv4/cluster, ipv4/local, ipv6/cluster or ipv6/local.
	Set string `json:"set"`
	// Source is whose address endpoints see: keep (the client's), masquerade
	// (this node's) or any-source (either, as it suits the tier).
	Source string `json:"source"`
	// SourceRanges are in force if not null; Admitted says whether they, or
	// their absence, let the source in.
	SourceRanges []netip.Prefix `json:"sourceRanges"`
	Admitted     bool           `json:"admitted"`
	// AffinitySeconds is how long a client stays with its endpoint; 0 for not
	// at all.
	AffinitySeconds int64 `json:"affinitySeconds"`
	// Rivals are service ports that claim the same address and do not get it.
	Rivals []string `json:"rivals"`
}

// Endpoint is one that was considered.
type Endpoint struct {
	Address netip.AddrPort `json:"address"`
	Slice   string         `json:"slice"` // EndpointSlice it stands in
	OnNode  bool           `json:"onNode"`
	// Eligible ones share the connections. Reason is why this one is, or is not:
	// ready, still-serving; not-ready, not-serving, terminating, other-zone,
	// other-node, remote, duplicate.
	Eligible    bool   `json:"eligible"`
	Reason      string `json:"reason"`
	Terminating bool   `json:"terminating"`
	// Hairpin says that it is the client itself.
	Hairpin bool `json:"hairpin"`
}

// Tier is one that could carry the frontend.
type Tier struct {
	Name    string `json:"name"`
	Carries bool   `json:"carries"`
	// Detail is why it does not, or what is to be known of it.
	Detail string `json:"detail,omitempty"`
}

// Tiers asks those of a node about the frontend of an explanation.
type Tiers func(*proxier.Explanation) []Tier

// Of explains a flow by the decision table of a node. Without a process to ask,
// tiers is nil.
func Of(node string, table *proxier.Table, flow proxier.Flow, tiers Tiers) *Explanation {
	from := table.Explain(flow)
	e := &Explanation{
		Node: node,
		Flow: Flow{
			Source: flow.Source.Addr().String(), Destination: flow.Destination,
			Protocol: flow.Protocol.String(), Device: flow.Device,
		},
		Verdict:   from.Outcome.String(),
		Reason:    from.Reason,
		Origin:    Origin{Kind: from.Origin.String(), Reason: originReason(from.Origin, flow, &from.Facts)},
		Endpoints: []Endpoint{}, Tiers: []Tier{}, Notes: []string{},
	}
	if flow.Source.Port() != 0 {
		e.Flow.Source = flow.Source.String()
	}
	if from.Frontend != nil {
		e.frontend(&from)
		if tiers != nil {
			e.Tiers = append(e.Tiers, tiers(&from)...)
		}
	}
	e.note(&from)
	return e
}

// originReason is why the source counts as what it does.
func originReason(origin proxier.Origin, flow proxier.Flow, facts *proxier.Facts) string {
	source, pods := flow.Source.Addr(), &facts.Pods
	switch origin {
	case proxier.FromPod:
		for _, p := range pods.CIDRs {
			if p.Contains(source) {
				return fmt.Sprintf("its address is in %s, a range of pods", p)
			}
		}
		return fmt.Sprintf("it comes in by %s, as packets of pods do", flow.Device)
	case proxier.FromHost:
		if source.IsLoopback() {
			return "its address is a loopback address"
		}
		return "its address is one of this node's"
	}
	const neither = "its address is not one of this node's"
	switch {
	case !pods.Knows(proxier.FamilyOf(source)):
		return fmt.Sprintf("%s, and nothing is configured that tells pods of %s from others", neither, proxier.FamilyOf(source))
	case pods.Interface == "":
		return neither + ", nor in a range of pods"
	case flow.Device == "":
		return neither + ", and no device is given that it comes in by"
	}
	return fmt.Sprintf("%s, and packets of pods do not come in by %s", neither, flow.Device)
}

func (e *Explanation) frontend(from *proxier.Explanation) {
	d, f, set := from.Decision, from.Frontend, from.Route.Set
	match := "the address is a frontend"
	if f.Kind.Wildcard() {
		match = "the port is a NodePort, and NodePorts are served at this address"
	}
	e.Frontend = &Frontend{
		Namespace: d.Name.Namespace, Name: d.Name.Name, Port: d.Name.Port, Protocol: d.Name.Protocol.String(),
		Kind: f.Kind.String(), Address: f.Addr, Match: match,
		Set: set.String(), Source: from.Route.Source.String(),
		Admitted:        f.Admits(from.Flow.Source.Addr()),
		AffinitySeconds: int64(d.Affinity.Seconds()),
		Rivals:          []string{},
	}
	if f.Filtered {
		e.Frontend.SourceRanges = append([]netip.Prefix{}, f.Ranges...)
	}
	for _, r := range from.Rivals {
		e.Frontend.Rivals = append(e.Frontend.Rivals, r.String())
	}
	for i := range from.Endpoints {
		j := &from.Endpoints[i]
		why := j.Cluster
		if set.Local() {
			why = j.Local
		}
		reason := why.String()
		if j.Duplicate {
			reason = "duplicate"
		}
		e.Endpoints = append(e.Endpoints, Endpoint{
			Address: j.Addr, Slice: j.Slice, OnNode: j.Backend.Local, Eligible: j.In(set), Reason: reason,
			Terminating: j.Terminating, Hairpin: j.Hairpin,
		})
	}
}

// note adds what one should know besides.
func (e *Explanation) note(from *proxier.Explanation) {
	add := func(format string, args ...any) { e.Notes = append(e.Notes, fmt.Sprintf(format, args...)) }
	family := proxier.FamilyOf(from.Flow.Destination.Addr())
	if f := from.Frontend; f != nil {
		if f.Unguarded {
			add("Warning: loadBalancerSourceRanges of %s/%s has no %s range, so anybody is let in by %s. Add one, or set strictSourceRanges.",
				e.Frontend.Namespace, e.Frontend.Name, family, family)
		}
		if from.Outcome == proxier.Forward && from.Route.Source == proxier.AnySource {
			add("any-source: where packets are translated the client is hidden behind this node, as with upstream's kube-proxy; balancing at its socket has nothing to hide.")
		}
		if slices.ContainsFunc(e.Endpoints, func(p Endpoint) bool { return p.Hairpin }) {
			add("The client is one of the endpoints. A connection that is led back to it may show any source.")
		}
	}
	if from.Outcome == proxier.Dropped && from.Flow.Device == "" {
		add("To sockets of this node a drop is an error at once (EPERM), not silence.")
	}
	if d := &from.Facts.Pods; d.Interface != "" && from.Flow.Device == "" && from.Origin == proxier.FromOutside {
		add("Pods are told by the device their packets come in by (%s). Name one to explain a flow of a pod.", deviceText(d))
	}
}

func deviceText(d *proxier.Detector) string {
	if d.InterfacePrefix {
		return d.Interface + "*"
	}
	return d.Interface
}

// service is the name of the service port: namespace/name:port.
func (f *Frontend) service() string {
	return strings.TrimSuffix(f.Namespace+"/"+f.Name+":"+f.Port, ":")
}
