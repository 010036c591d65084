// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// ParseServiceName reads NAMESPACE/NAME.
func ParseServiceName(text string) (types.NamespacedName, error) {
	namespace, name, ok := strings.Cut(text, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		return types.NamespacedName{}, fmt.Errorf("service %.64q is not NAMESPACE/NAME", text)
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, nil
}

// Protocol is an IANA protocol number.
type Protocol = inet.Protocol

// The protocols of Services.
const (
	TCP  = inet.TCP
	UDP  = inet.UDP
	SCTP = inet.SCTP
)

// Family is an IP address family.
type Family = inet.Family

// The families, usable as indexes of an array of length Families.
const (
	IPv4     = inet.IPv4
	IPv6     = inet.IPv6
	Families = inet.Families
)

// FamilyOf returns the family of an address. An IPv4-mapped address is IPv6.
func FamilyOf(a netip.Addr) Family { return inet.FamilyOf(a) }

// ParseProtocol reads a protocol as the API spells it; empty means TCP.
func ParseProtocol(p v1.Protocol) (Protocol, error) {
	switch p {
	case "", v1.ProtocolTCP:
		return TCP, nil
	case v1.ProtocolUDP:
		return UDP, nil
	case v1.ProtocolSCTP:
		return SCTP, nil
	}
	return 0, fmt.Errorf("unknown protocol %q: want TCP, UDP or SCTP", p)
}

// ServicePortName identifies one port of one Service.
type ServicePortName struct {
	types.NamespacedName
	Port     string
	Protocol Protocol
}

// String is namespace/name:port, or namespace/name where the port is unnamed.
func (n ServicePortName) String() string {
	if n.Port == "" {
		return n.Namespace + "/" + n.Name
	}
	return n.Namespace + "/" + n.Name + ":" + n.Port
}

func (n ServicePortName) compare(o ServicePortName) int {
	if c := strings.Compare(n.Namespace, o.Namespace); c != 0 {
		return c
	}
	if c := strings.Compare(n.Name, o.Name); c != 0 {
		return c
	}
	if c := strings.Compare(n.Port, o.Port); c != 0 {
		return c
	}
	return int(n.Protocol) - int(o.Protocol)
}

// ServicePort is one port of a Service.
type ServicePort struct {
	Name     string
	Port     uint16
	NodePort uint16 // 0 for none
	Protocol Protocol
}

// Seconds is a time as objects of the API have it: since 1970.
type Seconds int64

// Service is what the decisions need of a v1.Service. It is immutable.
type Service struct {
	Name types.NamespacedName
	// UID is for Events: nothing is decided by it.
	UID types.UID
	// Created decides between two Services that claim the same address.
	Created Seconds
	// ClusterIPs by Family; the zero Addr where the Service has none. Without
	// one in a family, nothing of the Service is served in that family.
	ClusterIPs [Families]netip.Addr
	// InternalLocal is internalTrafficPolicy: Local, ExternalLocal the same for
	// externalTrafficPolicy.
	InternalLocal, ExternalLocal bool
	// OptedOut says that a fast tier must not serve it if another one can.
	OptedOut bool
	// AtNodes says that ServiceLB serves it: the addresses in its status are those of nodes. Unless an annotation selects
	// addresses, it is served at AllAddresses of a node that it has one of.
	AtNodes, AllAddresses bool
	// IsPod says that it stands for the hostPorts of a Pod. Its Ports are those.
	IsPod bool
	// Kinds are the kinds of frontends that it gets.
	Kinds kindSet
	// Forwarding and Balancing are what annotations say; the zero values for nothing.
	Forwarding Forwarding
	Balancing  Balancing
	// Affinity is how long a client stays with its backend; 0 for not at all.
	Affinity time.Duration
	Ports    []ServicePort
	// More has rarely used fields; nil if none is set.
	More *ServiceExtras

	// The usual Service has one port; this saves it an allocation.
	onePort [1]ServicePort
}

// ServiceExtras are further addresses of a Service and related fields. Lists are sorted and
// have no duplicates.
type ServiceExtras struct {
	ExternalIPs []netip.Addr
	// LoadBalancerIPs are those of status.loadBalancer with ipMode VIP, and those that ServiceLB probes before they get there.
	LoadBalancerIPs []netip.Addr
	// SourceRanges are masked, of both families.
	SourceRanges []netip.Prefix
	// InvalidRanges says that an entry of loadBalancerSourceRanges is not a CIDR. It
	// matches no client, and even alone does not admit all clients.
	InvalidRanges bool
	// RejectOthers says that clients which the ranges do not admit are rejected, and not dropped.
	RejectOthers bool
	// HealthCheckNodePort is 0 for none.
	HealthCheckNodePort uint16
	// NodeSelector selects the nodes that serve external frontends, by their labels; empty for all.
	NodeSelector string

	// HostIPs are where the hostPorts of a Pod are served, in the order of Ports; the zero Addr for all addresses of the
	// node. PodIPs says of which families the Pod has an address.
	HostIPs []netip.Addr
	PodIPs  [Families]bool

	selector labels.Selector // NodeSelector, parsed; nil if that is empty
}

// external reports whether external frontends are served on a node with these labels.
func (x *ServiceExtras) external(of map[string]string) bool {
	return x == nil || x.selector == nil || x.selector.Matches(labels.Set(of))
}

func (x *ServiceExtras) equal(o *ServiceExtras) bool {
	if x == nil || o == nil {
		return x == o
	}
	return x.InvalidRanges == o.InvalidRanges && x.RejectOthers == o.RejectOthers && x.HealthCheckNodePort == o.HealthCheckNodePort && x.NodeSelector == o.NodeSelector &&
		x.PodIPs == o.PodIPs && slices.Equal(x.HostIPs, o.HostIPs) && slices.Equal(x.ExternalIPs, o.ExternalIPs) && slices.Equal(x.LoadBalancerIPs, o.LoadBalancerIPs) &&
		slices.Equal(x.SourceRanges, o.SourceRanges)
}

func (s *Service) equal(o *Service) bool {
	if s == o {
		return true
	}
	if s == nil || o == nil {
		return false
	}
	// A Service may be deleted and made anew within a second, all else alike.
	return s.UID == o.UID && s.Created == o.Created && s.ClusterIPs == o.ClusterIPs && s.InternalLocal == o.InternalLocal &&
		s.ExternalLocal == o.ExternalLocal && s.OptedOut == o.OptedOut && s.AtNodes == o.AtNodes && s.AllAddresses == o.AllAddresses && s.IsPod == o.IsPod && s.Kinds == o.Kinds && s.Balancing == o.Balancing && s.Forwarding == o.Forwarding && s.Affinity == o.Affinity && slices.Equal(s.Ports, o.Ports) && s.More.equal(o.More)
}

// endpointFlags is what the decisions need of an endpoint besides its address.
type endpointFlags uint16

const (
	ready endpointFlags = 1 << iota
	serving
	terminating
	onNode         // on this node
	elsewhere      // on another node; with neither, the slice does not say
	hasNodeHints   // hinted to some node
	hintedThisNode // hinted to this node
	maintenance    // of weight 0, or an operator says so: not ready for new connections
	isQuarantined  // an operator says so: would be ready, but for others
)

// Endpoint is one address of an EndpointSlice.
type Endpoint struct {
	Addr  netip.Addr
	flags endpointFlags
	// zones the endpoint is hinted to; slices of one cluster share few of them.
	zones *[]string
}

// endpointPort is one port of an EndpointSlice.
type endpointPort struct {
	name     string
	port     uint16
	protocol Protocol
}

// EndpointSlice is what the decisions need of a discovery/v1 EndpointSlice. It
// is immutable.
type EndpointSlice struct {
	Name      string
	family    Family
	weight    uint16 // of each endpoint
	ports     []endpointPort
	endpoints []Endpoint

	onePort [1]endpointPort
}

func (s *EndpointSlice) equal(o *EndpointSlice) bool {
	if s == o {
		return true
	}
	if s.Name != o.Name || s.family != o.family || s.weight != o.weight || len(s.ports) != len(o.ports) || len(s.endpoints) != len(o.endpoints) {
		return false
	}
	for i := range s.ports {
		if s.ports[i] != o.ports[i] {
			return false
		}
	}
	for i := range s.endpoints {
		if s.endpoints[i] != o.endpoints[i] {
			return false
		}
	}
	return true
}
