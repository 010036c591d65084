// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"cmp"
	"fmt"
	"net/netip"
	"reflect"
	"slices"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
)

// Admitted is Small with objects as an API server stores them: valid, with defaults, and with
// ClusterIPs, NodePorts and health check ports that no other Service has. External and load
// balancer IPs may still be claimed by several Services.
var Admitted Events = (*generator).admittedEvents

func (g *generator) admittedEvents(there *objects, first bool) []event {
	g.odd = 0
	events := g.events(there, first)
	for i := range events {
		switch e := &events[i]; {
		case e.gone:
		case e.service != nil:
			e.service = allocate(defaulted(e.service), g.families)
			e.service.Annotations = nil // upstream knows none
		default:
			e.slice = admitSlice(e.slice)
		}
	}
	return events
}

// Stored returns the objects of a cluster of Admitted with the defaults of an API server;
// false if it would not store them. Shrinking leads to such clusters.
func (c *Cluster) Stored() (list []*v1.Service, ok bool) {
	for _, s := range c.Services {
		s = defaulted(s)
		if len(s.Spec.Ports) == 0 && s.Spec.Type != v1.ServiceTypeExternalName && s.Spec.ClusterIP != v1.ClusterIPNone ||
			!reflect.DeepEqual(s, allocate(s.DeepCopy(), []proxier.Family{proxier.IPv4})) {
			return nil, false
		}
		list = append(list, Defaulted(s))
	}
	for _, s := range c.Slices {
		if !reflect.DeepEqual(s, admitSlice(s)) {
			return nil, false
		}
	}
	return list, true
}

// Defaulted returns a copy of a Service with the defaults of an API server.
func Defaulted(s *v1.Service) *v1.Service {
	s = defaulted(s)
	s.Spec.IPFamilies = nil
	for _, text := range s.Spec.ClusterIPs {
		switch a, err := netip.ParseAddr(text); {
		case err != nil:
		case a.Is4():
			s.Spec.IPFamilies = append(s.Spec.IPFamilies, v1.IPv4Protocol)
		default:
			s.Spec.IPFamilies = append(s.Spec.IPFamilies, v1.IPv6Protocol)
		}
	}
	return s
}

// defaulted returns a copy of a Service with defaults, but for those that nothing here reads.
func defaulted(s *v1.Service) *v1.Service {
	s = s.DeepCopy()
	spec := &s.Spec
	spec.Type = cmp.Or(spec.Type, v1.ServiceTypeClusterIP)
	if len(spec.ClusterIPs) == 0 && spec.ClusterIP != "" {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
	for i := range spec.Ports {
		spec.Ports[i].Protocol = cmp.Or(spec.Ports[i].Protocol, v1.ProtocolTCP)
	}
	if external(s) || len(spec.ExternalIPs) > 0 {
		spec.ExternalTrafficPolicy = cmp.Or(spec.ExternalTrafficPolicy, v1.ServiceExternalTrafficPolicyCluster)
	}
	for i := range s.Status.LoadBalancer.Ingress {
		if in := &s.Status.LoadBalancer.Ingress[i]; in.IP != "" && in.IPMode == nil {
			in.IPMode = ptr.To(v1.LoadBalancerIPModeVIP)
		}
	}
	if spec.InternalTrafficPolicy == nil {
		spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyCluster)
	}
	d := affinity(s)
	if spec.SessionAffinityConfig = nil; d > 0 {
		spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(d.Seconds()))}}
	}
	spec.SessionAffinity = cmp.Or(spec.SessionAffinity, v1.ServiceAffinityNone)
	return s
}

func external(s *v1.Service) bool {
	return s.Spec.Type == v1.ServiceTypeLoadBalancer || s.Spec.Type == v1.ServiceTypeNodePort
}

// allocate makes a Service with defaults valid. What is allocated depends on its name alone:
// namespaces are a and b, names s0 to s3.
func allocate(s *v1.Service, families []proxier.Family) *v1.Service {
	spec := &s.Spec
	n := 4*int(s.Namespace[0]-'a') + int(s.Name[1]-'0')

	var own []proxier.Family
	for _, text := range spec.ClusterIPs {
		if a, err := netip.ParseAddr(text); err == nil && !slices.Contains(own, family(a)) {
			own = append(own, family(a))
		}
	}
	if len(own) > 0 {
		families = own
	}
	var ips []string
	for _, f := range families {
		ips = append(ips, fmt.Sprintf([]string{"10.96.0.%d", "fd00:10:96::%x"}[f], 1+n))
	}
	switch {
	case spec.Type == v1.ServiceTypeExternalName:
		ips = nil
	case spec.ClusterIP == v1.ClusterIPNone:
		ips, spec.Type = []string{v1.ClusterIPNone}, v1.ServiceTypeClusterIP
	}
	if spec.ClusterIPs, spec.ClusterIP = ips, ""; len(ips) > 0 {
		spec.ClusterIP = ips[0]
	}

	balanced := spec.Type == v1.ServiceTypeLoadBalancer
	ports := spec.Ports
	spec.Ports = nil
	for _, p := range ports {
		if len(ports) > 1 {
			p.Name = cmp.Or(p.Name, "p")
		}
		if slices.ContainsFunc(spec.Ports, func(o v1.ServicePort) bool {
			return o.Name == p.Name || o.Protocol == p.Protocol && o.Port == p.Port
		}) {
			continue
		}
		switch {
		case !external(s):
			p.NodePort = 0
		case p.NodePort != 0 || !balanced: // load balancers may do without
			// TCP and UDP of one number have one.
			p.NodePort = int32(30000 + 128*n + int(p.Port)%128)
		}
		spec.Ports = append(spec.Ports, p)
	}
	if !external(s) && len(spec.ExternalIPs) == 0 {
		spec.ExternalTrafficPolicy = ""
	}
	spec.HealthCheckNodePort = 0
	if balanced && externalLocal(s) {
		spec.HealthCheckNodePort = int32(32000 + n)
	}
	if !balanced {
		spec.LoadBalancerSourceRanges, s.Status.LoadBalancer.Ingress = nil, nil
	}
	return s
}

// admitSlice returns a copy of a slice that an API server stores.
func admitSlice(s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	s = s.DeepCopy()
	switch s.AddressType {
	case discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6:
	default: // its endpoints have IPv4 addresses
		s.AddressType = discoveryv1.AddressTypeIPv4
	}
	ports := s.Ports
	s.Ports = nil
	for _, p := range ports {
		p.Protocol = ptr.To(cmp.Or(ptr.Deref(p.Protocol, ""), v1.ProtocolTCP))
		if !slices.ContainsFunc(s.Ports, func(o discoveryv1.EndpointPort) bool { return *o.Name == *p.Name }) {
			s.Ports = append(s.Ports, p)
		}
	}
	f := proxier.IPv4
	if s.AddressType == discoveryv1.AddressTypeIPv6 {
		f = proxier.IPv6
	}
	seen := map[netip.Addr]bool{} // no controller writes an address twice into a slice
	s.Endpoints = slices.DeleteFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool {
		a, ok := endpointAddr(e, f)
		again := seen[a]
		seen[a] = true
		return !ok || again
	})
	for i := range s.Endpoints {
		s.Endpoints[i].Addresses = s.Endpoints[i].Addresses[:1]
	}
	return s
}
