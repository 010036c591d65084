// SPDX-License-Identifier: Apache-2.0

// Package nodereport is what the controller of ServiceLB and the kube-proxies of nodes tell each other. The controller writes conditions
// into the status of Services, where only controllers may write. Each kube-proxy answers at its health server with a Report.
package nodereport

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Class is the loadBalancerClass of Services that ServiceLB serves.
const Class = "tandem-proxy.dev/servicelb"

// Conditions of Services.
const (
	// ConditionAdvertised says whether a Service has all addresses that it could have. With it, whatever it says, the addresses in the
	// status are those of nodes.
	ConditionAdvertised = "servicelb.tandem-proxy.dev/Advertised"
	// ConditionProbing is true while some addresses are not in the status yet, since no kube-proxy has reported that it serves them. The
	// message is a list of them. kube-proxies serve them as if they were in the status.
	ConditionProbing = "servicelb.tandem-proxy.dev/Probing"
)

// AnnotationAddresses of a Service is a list of addresses, CIDRs and names of network interfaces, separated by commas: the Service is
// served at those addresses of the nodes alone.
const AnnotationAddresses = "servicelb.tandem-proxy.dev/addresses"

// Probed returns the addresses that a Service is to be served at although its status does not have them.
func Probed(conditions []metav1.Condition) (list []netip.Addr) {
	for i := range conditions {
		if c := &conditions[i]; c.Type == ConditionProbing && c.Status == metav1.ConditionTrue {
			for text := range strings.FieldsFuncSeq(c.Message, func(r rune) bool { return r == ',' || r == ' ' }) {
				if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
					list = append(list, a.Unmap())
				}
			}
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}

// Path is where a kube-proxy answers with its Report. With parameter after=<Report.Version> it waits up to MaxWait for a newer one.
const Path = "/servicelb"

// Report is what a kube-proxy knows of its node as far as ServiceLB needs it. It speaks only of Services that ServiceLB serves.
type Report struct {
	// Version changes with the report, and with the process.
	Version string `json:"version"`
	// Addresses are those of the network interfaces by which traffic of other machines comes in.
	Addresses []Address `json:"addresses"`
	// Ports are those of Services, by protocol, that Listeners speaks of.
	Ports map[string][]uint16 `json:"ports"`
	// Listeners are processes of the host that listen at these ports.
	Listeners []Listener `json:"listeners"`
	// Served has the ports that the node serves for each of its addresses.
	Served map[netip.Addr][]Port `json:"served"`

	index map[portKey]*Port // nil before Index
}

type portKey struct {
	service, protocol string
	addr              netip.Addr
	port              uint16
}

// Index makes Find fast. The report must not change any more.
func (r *Report) Index() {
	r.index = map[portKey]*Port{}
	for a, list := range r.Served {
		for i := range list {
			p := &list[i]
			r.index[portKey{p.Service, p.Protocol, a, p.Port}] = p
		}
	}
}

// Address is one of a network interface.
type Address struct {
	Interface string     `json:"interface"`
	Address   netip.Addr `json:"address"`
}

// Listener is a socket of the host: TCP that listens, or UDP without a peer.
type Listener struct {
	Protocol string `json:"protocol"`
	// Address is the unspecified one of a family for all addresses.
	Address netip.Addr `json:"address"`
	Port    uint16     `json:"port"`
}

// Compare is an order of listeners.
func (l Listener) Compare(o Listener) int {
	return cmp.Or(strings.Compare(l.Protocol, o.Protocol), l.Address.Compare(o.Address), cmp.Compare(l.Port, o.Port))
}

// At reports whether what is sent to an address reaches the listener.
func (l *Listener) At(protocol string, a netip.Addr, port uint16) bool {
	return l.Protocol == protocol && l.Port == port && (l.Address == a || l.Address.IsUnspecified() && l.Address.Is4() == a.Is4())
}

// Port is one of a Service.
type Port struct {
	Service  string `json:"service"` // namespace/name
	Protocol string `json:"protocol"`
	Port     uint16 `json:"port"`
	// Direct says that endpoints on other nodes see the client's address too.
	Direct bool `json:"direct,omitempty"`
	// Fault is why it is not served; empty if it is.
	Fault string `json:"fault,omitempty"`
}

// Knows reports whether it was looked up who listens at a port.
func (r *Report) Knows(protocol string, port uint16) bool {
	_, found := slices.BinarySearch(r.Ports[protocol], port)
	return found
}

// Find returns what the report says of a port of a Service at an address; nil if nothing, or before Index.
func (r *Report) Find(service, protocol string, a netip.Addr, port uint16) *Port {
	return r.index[portKey{service, protocol, a, port}]
}
