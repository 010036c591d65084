// SPDX-License-Identifier: Apache-2.0

// Package nodereport is what the controller of ServiceLB and the kube-proxies of nodes tell each other. The controller writes conditions
// into the status of Services, where only controllers may write. Each kube-proxy answers at its health server with a Report.
package nodereport

import (
	"cmp"
	"maps"
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

// Path is where a kube-proxy answers with its Report. With parameter after=<Report.Version> it waits up to MaxWait for a newer one, and
// may answer with what has changed since.
const Path = "/servicelb"

// Report is what a kube-proxy knows of its node as far as ServiceLB needs it. It speaks only of Services that ServiceLB serves.
type Report struct {
	// Version changes with the report, and with the process.
	Version string `json:"version"`
	// After is the version of the report that this one changes; empty for a whole one.
	After string `json:"after,omitempty"`
	// Addresses are those of the network interfaces by which traffic of other machines comes in.
	Addresses []Address `json:"addresses"`
	// Listeners are processes of the host that listen at ports of Services.
	Listeners []Listener `json:"listeners"`
	// NoListeners is why the listeners are not known; empty if they are.
	NoListeners string `json:"noListeners,omitempty"`
	// Services has those that the kube-proxy knows of, by namespace/name. In a change, it has those that differ, and nil for those that
	// are gone.
	Services map[string]*Service `json:"services"`
}

// Service is one that a kube-proxy knows of.
type Service struct {
	// Ports are those for which listeners were looked up.
	Ports []Port `json:"ports"`
}

// Port is one of a Service.
type Port struct {
	Protocol string `json:"protocol"`
	Port     uint16 `json:"port"`
	// Served has the addresses of the node at which the Service is to be served.
	Served []Served `json:"served,omitempty"`
}

// Served says whether a port is served at an address.
type Served struct {
	Address netip.Addr `json:"address"`
	// Direct says that endpoints on other nodes see the client's address too.
	Direct bool `json:"direct,omitempty"`
	// Fault is why it is not served; empty if it is.
	Fault string `json:"fault,omitempty"`
	// LeftOut says that the fault is the will of the Service's owner, so that the port is free for others.
	LeftOut bool `json:"leftOut,omitempty"`
}

// Address is one of a network interface.
type Address struct {
	Interface string     `json:"interface"`
	Address   netip.Addr `json:"address"`
}

// Listener is a socket of the host: TCP or SCTP that listens, or UDP without a peer.
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

// Find returns a port; nil if the kube-proxy does not know it. The Service may be nil.
func (s *Service) Find(protocol string, port uint16) *Port {
	if s == nil {
		return nil
	}
	for i := range s.Ports {
		if p := &s.Ports[i]; p.Port == port && p.Protocol == protocol {
			return p
		}
	}
	return nil
}

// At returns what is said of an address; nil if nothing is. The port may be nil.
func (p *Port) At(a netip.Addr) *Served {
	if p == nil {
		return nil
	}
	for i := range p.Served {
		if p.Served[i].Address == a {
			return &p.Served[i]
		}
	}
	return nil
}

func (s *Service) equal(o *Service) bool {
	return slices.EqualFunc(s.Ports, o.Ports, func(a, b Port) bool {
		return a.Protocol == b.Protocol && a.Port == b.Port && slices.Equal(a.Served, b.Served)
	})
}

// Apply returns the report that a change leads to, or the change itself if it is a whole report. It returns nil if the change is one of
// another report. Neither is modified.
func (r *Report) Apply(change *Report) *Report {
	if change.After == "" {
		return change
	}
	if r == nil || r.Version != change.After {
		return nil
	}
	now := *change
	now.After, now.Services = "", make(map[string]*Service, len(r.Services)+len(change.Services))
	maps.Copy(now.Services, r.Services)
	for name, s := range change.Services {
		if s == nil {
			delete(now.Services, name)
		} else {
			now.Services[name] = s
		}
	}
	return &now
}

// changed returns the Services that differ between two reports.
func changed(before, now map[string]*Service) (names []string) {
	for name, s := range now {
		if was := before[name]; was == nil || !was.equal(s) {
			names = append(names, name)
		}
	}
	for name := range before {
		if now[name] == nil {
			names = append(names, name)
		}
	}
	return names
}
