// SPDX-License-Identifier: Apache-2.0

// Package explain explains how this node treats a flow, and why: which Service it is for, which
// endpoints are eligible, and which datapath serves it. kube-proxy answers with it as JSON, and
// tandemctl prints it.
package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// The path of kube-proxy's answer, and its parameters.
const (
	Path             = "/debug/explain"
	ParamSource      = "src"
	ParamDestination = "dst"
	ParamProtocol    = "protocol"
	ParamDevice      = "device"
)

// Explanation is the answer, as JSON. Later versions may add fields. They do not rename fields
// or change their meaning.
type Explanation struct {
	// Node whose view is explained.
	Node string `json:"node"`
	Flow Flow   `json:"flow"`
	// Verdict is forward, reject (the client gets an immediate error), drop (no answer) or
	// pass (the destination is no frontend, and the flow continues unchanged). Reason is why.
	Verdict string `json:"verdict"`
	Reason  string `json:"reason"`
	Origin  Origin `json:"origin"`
	// Frontend of the destination, or null. The fields below are about it.
	Frontend *Frontend `json:"frontend"`
	// Endpoints that were considered, sorted by address.
	Endpoints []Endpoint `json:"endpoints"`
	// Tiers are the datapaths of this node and whether they serve the frontend. It is empty
	// if no process was asked.
	Tiers []Tier `json:"tiers"`
	// Notes have additional information. Those that begin with "Warning:" are about a
	// probable mistake in the configuration.
	Notes []string `json:"notes"`
}

// Flow is the flow to explain.
type Flow struct {
	// Source is an address, with a port if one was given.
	Source      string         `json:"source"`
	Destination netip.AddrPort `json:"destination"`
	Protocol    string         `json:"protocol"`
	// Device is the ingress device; empty if this host sends the flow.
	Device string `json:"device,omitempty"`
}

// Origin is where the client is. Services distinguish three origins.
type Origin struct {
	Kind   string `json:"kind"` // pod, host or outside
	Reason string `json:"reason"`
}

// Frontend is a frontend of a service port, and how it treats clients of the origin.
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

	// Set is the backend set: ipv4/cluster, ipv4/local, ipv6/cluster or ipv6/local.
	Set string `json:"set"`
	// Source is the source address that endpoints see: keep (the client's), masquerade
	// (this node's) or any-source (either, depending on the datapath).
	Source string `json:"source"`
	// SourceRanges apply if not null. Admitted reports whether the source is allowed.
	SourceRanges []netip.Prefix `json:"sourceRanges"`
	Admitted     bool           `json:"admitted"`
	// AffinitySeconds is the timeout of session affinity; 0 means no affinity.
	AffinitySeconds int64 `json:"affinitySeconds"`
	// Algorithm is random or maglev, TableSize the number of slots of the set's Maglev table; 0 for none.
	Algorithm string `json:"algorithm"`
	TableSize int    `json:"tableSize"`
	// Maglev is what eBPF programs on devices select for this flow by Maglev; null without it, or if the client's port is
	// needed and was not given.
	Maglev *Maglev `json:"maglev"`
	// Rivals are other service ports that claim the same address. They are not served
	// there.
	Rivals []string `json:"rivals"`
}

// Maglev is the slot of a flow and its endpoint, the same on every node that has these endpoints and a table of this
// size.
type Maglev struct {
	Slot     int            `json:"slot"`
	Endpoint netip.AddrPort `json:"endpoint"`
	// Hash is of the connection, or of the client with session affinity.
	Hash string `json:"hash"`
}

// Endpoint is an endpoint that was considered.
type Endpoint struct {
	Address netip.AddrPort `json:"address"`
	Slice   string         `json:"slice"` // its EndpointSlice
	OnNode  bool           `json:"onNode"`
	// Connections are balanced over the eligible endpoints. Reason is why this one is
	// eligible (ready, still-serving, last-resort) or not (not-ready, not-serving, terminating,
	// other-zone, other-node, remote, maintenance, quarantined, duplicate).
	Eligible    bool   `json:"eligible"`
	Reason      string `json:"reason"`
	Terminating bool   `json:"terminating"`
	// Weight is its share of new connections, in proportion to those of other eligible endpoints. 0 is
	// maintenance.
	Weight uint16 `json:"weight"`
	// Hairpin means that the endpoint is the client itself.
	Hairpin bool `json:"hairpin"`
}

// Tier is a datapath that could serve the frontend.
type Tier struct {
	Name    string `json:"name"`
	Carries bool   `json:"carries"`
	// Detail is why it does not, or additional information.
	Detail string `json:"detail,omitempty"`
}

// Tiers returns the datapaths of a node and whether they serve the frontend of an explanation.
type Tiers func(*proxier.Explanation) []Tier

// Of explains a flow with the decision table of a node. If no process is asked, tiers is nil.
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

// originReason explains the origin of a flow.
func originReason(origin proxier.Origin, flow proxier.Flow, facts *proxier.Facts) string {
	source, pods := flow.Source.Addr(), &facts.Pods
	switch origin {
	case proxier.FromPod:
		for _, p := range pods.CIDRs {
			if p.Contains(source) {
				return fmt.Sprintf("source address is in pod CIDR %s", p)
			}
		}
		return fmt.Sprintf("ingress device %s is a device of pods", flow.Device)
	case proxier.FromHost:
		if source.IsLoopback() {
			return "source address is a loopback address"
		}
		return "source address is one of this node's"
	}
	const neither = "source address is not one of this node's"
	switch {
	case !pods.Knows(proxier.FamilyOf(source)):
		return fmt.Sprintf("%s, and the configuration does not say which %s addresses are pods", neither, proxier.FamilyOf(source))
	case pods.Interface == "":
		return neither + ", nor in a pod CIDR"
	case flow.Device == "":
		return neither + ", and no ingress device is given"
	}
	return fmt.Sprintf("%s, and ingress device %s is not a device of pods", neither, flow.Device)
}

func (e *Explanation) frontend(from *proxier.Explanation) {
	d, f, set := from.Decision, from.Frontend, from.Route.Set
	match := "the address is a frontend"
	if f.Kind.Wildcard() {
		match = "the port is a NodePort, and this address serves NodePorts"
	}
	e.Frontend = &Frontend{
		Namespace: d.Name.Namespace, Name: d.Name.Name, Port: d.Name.Port, Protocol: d.Name.Protocol.String(),
		Kind: f.Kind.String(), Address: f.Addr, Match: match,
		Set: set.String(), Source: from.Route.Source.String(),
		Admitted:        f.Admits(from.Flow.Source.Addr()),
		AffinitySeconds: int64(d.Affinity.Seconds()),
		Algorithm:       d.Balancing.Algorithm.String(), TableSize: d.TableSize(set),
		Rivals: []string{},
	}
	if p := d.Pick(set, from.Flow.Source, from.Flow.Destination); p != nil && from.Outcome == proxier.Forward {
		e.Frontend.Maglev = &Maglev{Slot: p.Slot, Endpoint: p.Backend.Addr, Hash: "connection"}
		if p.ByClient {
			e.Frontend.Maglev.Hash = "client"
		}
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
			Terminating: j.Terminating, Weight: j.Weight, Hairpin: j.Hairpin,
		})
	}
}

// note adds notes and warnings.
func (e *Explanation) note(from *proxier.Explanation) {
	add := func(format string, args ...any) { e.Notes = append(e.Notes, fmt.Sprintf(format, args...)) }
	family := proxier.FamilyOf(from.Flow.Destination.Addr())
	if f := from.Frontend; f != nil {
		if f.Unguarded {
			add("Warning: loadBalancerSourceRanges of %s/%s has no %s range, so all %s sources are allowed. Add a range, or set strictSourceRanges.",
				e.Frontend.Namespace, e.Frontend.Name, family, family)
		}
		if from.Outcome == proxier.Forward && from.Route.Source == proxier.AnySource {
			add("any-source: where packets are translated, they are masqueraded, as by upstream's kube-proxy. Connections that are balanced at the client's socket keep its address.")
		}
		if from.Outcome == proxier.Forward && from.Route.Direct {
			add("direct server return: an endpoint on another node sees the client and answers it directly, if its node takes part; otherwise it is as Source says.")
		}
		if slices.ContainsFunc(e.Endpoints, func(p Endpoint) bool { return p.Hairpin }) {
			add("The client is one of the endpoints. A connection to itself may have any source address.")
		}
	}
	if from.Outcome == proxier.Dropped && from.Flow.Device == "" {
		add("Sockets on this node get an immediate error (EPERM) for dropped connections.")
	}
	if d := &from.Facts.Pods; d.Interface != "" && from.Flow.Device == "" && from.Origin == proxier.FromOutside {
		add("Pods are recognised by their ingress device (%s). Give a device to explain a flow of a pod.", deviceText(d))
	}
}

func deviceText(d *proxier.Detector) string {
	if d.InterfacePrefix {
		return d.Interface + "*"
	}
	return d.Interface
}

// service returns the name of the service port: namespace/name:port.
func (f *Frontend) service() string {
	return strings.TrimSuffix(f.Namespace+"/"+f.Name+":"+f.Port, ":")
}
