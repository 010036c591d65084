// SPDX-License-Identifier: Apache-2.0

// Package oracle computes how a single connection must be handled, directly from the
// Kubernetes objects. It is an independent implementation of package proxier, written from
// the statements about Service semantics instead of from the code, and as simple
// as possible. It evaluates all objects for every question, shares no code, and caches
// only the parsed Services.
//
// Worlds compare it with the decision table, and with a tier: random clusters, changes
// and flows. Disagreements are reduced to a scenario.
package oracle

import (
	"cmp"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
)

// Cluster is the input of all answers. It must not change after the first question.
type Cluster struct {
	Services []*v1.Service
	Slices   []*discoveryv1.EndpointSlice
	NodeName string
	Facts    proxier.Facts
	Policy   proxier.Policy

	claims []claim // nil: not read yet
}

// Answer is how a flow must be handled. All fields after Outcome are empty if it passes.
// Backends is empty if it is not forwarded.
type Answer struct {
	Origin  proxier.Origin
	Outcome proxier.Outcome
	// Owner is the service port of the destination.
	Owner proxier.ServicePortName
	Kind  proxier.Kind
	// Rivals are other service ports that claim the same address and port, with lower
	// precedence.
	Rivals []proxier.ServicePortName
	// Backends are the eligible backends, sorted.
	Backends []netip.AddrPort
	Source   proxier.Source
	Affinity time.Duration
	// UsesCluster and UsesLocal say which sets any frontends of the service port and
	// family use.
	UsesCluster, UsesLocal bool
	// Endpoints are all endpoints of the service port and family, in any set.
	Endpoints map[netip.AddrPort]Endpoint
}

// Endpoint is one address and port, and why it is in the sets or not.
type Endpoint struct {
	Cluster, Local proxier.Why
	// Slice is the slice whose copy is used.
	Slice string
	// Copies is the number of copies in all slices.
	Copies int
	// OnNode, Serving and Terminating are those of the copy that is used.
	OnNode, Serving, Terminating bool
}

// Frontend is an address and port that a service port claims.
type Frontend struct {
	// Addr has the unspecified address if it is a NodePort.
	Addr  netip.AddrPort
	Kind  proxier.Kind
	Owner proxier.ServicePortName
	// Winner is the service port that has it instead; zero if Owner has it.
	Winner proxier.ServicePortName
	// Unguarded says that there are source ranges, but only of the other family.
	Unguarded bool
	// AdmitsItself says that the source ranges include the address itself.
	AdmitsItself bool
}

// Ask returns how a flow must be handled.
func (c *Cluster) Ask(flow proxier.Flow) Answer {
	dst := flow.Destination
	answer := Answer{Origin: c.origin(flow, false)}

	// A NodePort is served if no frontend has exactly that address.
	var found *claim
	if !dst.Addr().IsUnspecified() {
		found = c.winner(dst, flow.Protocol)
	}
	if found == nil && c.nodePortsAt(dst.Addr(), answer.Origin) {
		found = c.winner(netip.AddrPortFrom(unspecified(family(dst.Addr())), dst.Port()), flow.Protocol)
	}
	if found == nil {
		// Unallocated ClusterIPs are rejected (S12), unless a device has the
		// address.
		if !slices.Contains(c.Facts.LocalAddrs, dst.Addr()) && slices.ContainsFunc(c.Facts.ServiceCIDRs, func(p netip.Prefix) bool { return p.Contains(dst.Addr()) }) {
			answer.Outcome = proxier.Rejected
		}
		return answer
	}

	answer.Owner, answer.Kind = found.owner, found.kind
	answer.Origin = c.origin(flow, found.kind != proxier.ClusterIP)
	for _, cl := range c.read() {
		if cl.owner == found.owner && family(cl.addr.Addr()) == family(dst.Addr()) {
			for from := range proxier.Origins {
				onlyLocal, _ := c.route(&cl, from)
				answer.UsesCluster = answer.UsesCluster || !onlyLocal
				answer.UsesLocal = answer.UsesLocal || onlyLocal
			}
		}
		if cl.addr == found.addr && cl.owner.Protocol == flow.Protocol && cl.owner != found.owner {
			answer.Rivals = append(answer.Rivals, cl.owner)
		}
	}
	slices.SortFunc(answer.Rivals, comparePorts)
	answer.Affinity = affinity(found.service)
	answer.Endpoints = c.endpoints(found.owner, family(dst.Addr()))
	onlyLocal, source := c.route(found, answer.Origin)
	answer.Source = source

	// Source ranges are checked first, even before endpoints.
	if found.kind == proxier.LoadBalancer && !c.admits(found, flow.Source.Addr()) {
		answer.Outcome = proxier.Dropped
		if found.service.Annotations["service.tandem-proxy.dev/src-ranges-action"] == "reject" { // S100
			answer.Outcome = proxier.Rejected
		}
		return answer
	}

	inCluster := 0
	for addr, e := range answer.Endpoints {
		if e.Cluster.In() {
			inCluster++
		}
		if onlyLocal && e.Local.In() || !onlyLocal && e.Cluster.In() {
			answer.Backends = append(answer.Backends, addr)
		}
	}
	slices.SortFunc(answer.Backends, netip.AddrPort.Compare)
	switch {
	case len(answer.Backends) > 0:
		answer.Outcome = proxier.Forward
	case onlyLocal && inCluster > 0: // S42
		answer.Outcome = proxier.Dropped
	default: // S41
		answer.Outcome = proxier.Rejected
	}
	return answer
}

// Frontends returns all claimed frontends with their winners, sorted.
func (c *Cluster) Frontends() []Frontend {
	var list []Frontend
	for _, cl := range c.read() {
		f := Frontend{Addr: cl.addr, Kind: cl.kind, Owner: cl.owner, AdmitsItself: true}
		if w := c.winner(cl.addr, cl.owner.Protocol); w.owner != cl.owner {
			f.Winner = w.owner
		}
		if cl.kind == proxier.LoadBalancer {
			mine, others, invalid := ranges(cl.service, family(cl.addr.Addr()))
			f.AdmitsItself = c.admits(&cl, cl.addr.Addr())
			f.Unguarded = !denies(cl.service) && len(mine) == 0 && others > 0 && invalid == 0 && !c.Policy.StrictSourceRanges
		}
		list = append(list, f)
	}
	slices.SortFunc(list, Frontend.compare)
	return list
}

func (f Frontend) compare(o Frontend) int {
	return cmp.Or(f.Addr.Compare(o.Addr), cmp.Compare(f.Kind, o.Kind), comparePorts(f.Owner, o.Owner))
}

// HealthChecks returns the health checks that this node answers (C53).
func (c *Cluster) HealthChecks() map[types.NamespacedName]proxier.HealthCheck {
	checks := map[types.NamespacedName]proxier.HealthCheck{}
	for _, s := range c.Services {
		number, valid := portNumber(s.Spec.HealthCheckNodePort)
		selected := c.isSelected(s)
		addressed := clusterIP(s, proxier.IPv4).IsValid() || clusterIP(s, proxier.IPv6).IsValid()
		if !proxied(s) || !addressed || s.Spec.Type != v1.ServiceTypeLoadBalancer || !externalLocal(s) || !valid {
			continue
		}
		check := proxier.HealthCheck{UID: s.UID, Port: number}
		for f := range proxier.Families {
			counted := f // a load balancer asks nodes of both families about any Service
			if !clusterIP(s, f).IsValid() {
				counted = 1 - f
			}
			ready := map[netip.Addr]bool{}
			for _, slice := range c.slicesOf(nameOf(s), counted) {
				for _, p := range slice.Ports {
					if !usable(p) {
						continue
					}
					owner := proxier.ServicePortName{NamespacedName: nameOf(s), Port: *p.Name, Protocol: protocolOf(p)}
					for at, e := range c.endpoints(owner, counted) {
						if e.Local == proxier.Ready && selected {
							ready[at.Addr()] = true
						}
					}
				}
			}
			check.Ready[f] = len(ready)
		}
		checks[nameOf(s)] = check
	}
	return checks
}

// origin of a flow to a ClusterIP, or to an external frontend: what comes in by an uplink is no
// pod of this node there (S43).
func (c *Cluster) origin(flow proxier.Flow, external bool) proxier.Origin {
	src, pods := flow.Source.Addr(), c.Facts.Pods
	var pod bool
	switch {
	case pods.Interface == "":
		pod = slices.ContainsFunc(pods.CIDRs, func(p netip.Prefix) bool { return p.Contains(src) }) &&
			!(external && slices.Contains(c.Facts.Uplinks, flow.Device))
	case pods.InterfacePrefix:
		pod = strings.HasPrefix(flow.Device, pods.Interface)
	default:
		pod = flow.Device == pods.Interface
	}
	switch {
	case pod:
		return proxier.FromPod
	case src.IsLoopback() || slices.Contains(c.Facts.LocalAddrs, src):
		return proxier.FromHost
	}
	return proxier.FromOutside
}

// knowsPods reports whether a family has a detector of local pods.
func (c *Cluster) knowsPods(f proxier.Family) bool {
	return c.Facts.Pods.Interface != "" ||
		slices.ContainsFunc(c.Facts.Pods.CIDRs, func(p netip.Prefix) bool { return family(p.Addr()) == f })
}

// nodePortsAt reports whether NodePorts are served at an address, for clients of that
// origin.
func (c *Cluster) nodePortsAt(addr netip.Addr, from proxier.Origin) bool {
	s := c.Policy.NodePorts
	keyword := s.Primary || s.Localhost || s.All
	listed := slices.ContainsFunc(s.CIDRs, func(p netip.Prefix) bool { return family(p.Addr()) == family(addr) })
	selected := s.All || !keyword && !listed ||
		slices.ContainsFunc(s.CIDRs, func(p netip.Prefix) bool { return p.Contains(addr) })
	if addr.IsLoopback() {
		return from == proxier.FromHost && (s.Localhost || s.Loopback && selected)
	}
	return slices.Contains(c.Facts.LocalAddrs, addr) &&
		(selected || s.Primary && addr == c.Facts.NodeIPs[family(addr)])
}

func nameOf(s *v1.Service) types.NamespacedName {
	return types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
}

func family(a netip.Addr) proxier.Family {
	if a.Is4() {
		return proxier.IPv4
	}
	return proxier.IPv6
}

func unspecified(f proxier.Family) netip.Addr {
	if f == proxier.IPv4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// leadingZeros are digits without a meaning, at the start of a number.
var leadingZeros = regexp.MustCompile(`(^|[.:/])0+([0-9a-fA-F])`)

// parseAddr parses an address of an object.
func parseAddr(text string) (netip.Addr, error) {
	return netip.ParseAddr(leadingZeros.ReplaceAllString(text, "$1$2"))
}

// parsePrefix parses a range of an object.
func parsePrefix(text string) (netip.Prefix, error) {
	return netip.ParsePrefix(leadingZeros.ReplaceAllString(text, "$1$2"))
}

// plain reports whether an address has neither a zone nor is IPv4-mapped.
func plain(a netip.Addr) bool { return !a.Is4In6() && a.Zone() == "" }

func portNumber(n int32) (uint16, bool) { return uint16(n), n >= 1 && n <= 65535 }
