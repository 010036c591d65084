// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
)

// Services.

func (g *generator) service(name types.NamespacedName) *v1.Service {
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: types.UID(fmt.Sprint(g.Uint32()))}}
	for _, field := range serviceFields {
		field(g, s)
	}
	return s
}

// changeService returns a copy with some fields drawn anew.
func (g *generator) changeService(s *v1.Service) *v1.Service {
	s = s.DeepCopy()
	for range 1 + g.IntN(2) {
		pick(g, serviceFields...)(g, s)
	}
	return s
}

var serviceFields = []func(*generator, *v1.Service){
	func(g *generator, s *v1.Service) {
		s.Spec.Type = pick(g, v1.ServiceTypeClusterIP, v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer, v1.ServiceTypeLoadBalancer)
		if g.chance(0.04) {
			s.Spec.Type = v1.ServiceTypeExternalName
		}
		s.Labels = nil
		switch {
		case g.chance(0.03):
			s.Labels = map[string]string{proxier.LabelServiceProxyName: pick(g, "", "other")}
		case g.chance(0.05):
			s.Labels = map[string]string{"app": "x", proxier.LabelHeadless: ""}
		}
	},
	func(g *generator, s *v1.Service) {
		families := g.families
		if g.chance(0.2) {
			families = []proxier.Family{g.family()}
		}
		s.Spec.ClusterIPs = nil
		for _, f := range families {
			s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, pick(g, g.clusterIPs[f]...))
		}
		if g.chance(g.odd) {
			s.Spec.ClusterIPs[g.IntN(len(s.Spec.ClusterIPs))] = pick(g, oddAddrs...)
		}
		if g.chance(g.odd) {
			s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, pick(g, g.clusterIPs[g.family()]...))
		}
		if g.chance(0.04) {
			s.Spec.ClusterIPs = []string{v1.ClusterIPNone}
		}
		s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
		if g.chance(0.1) {
			s.Spec.ClusterIPs = nil
		}
		if g.chance(0.04) {
			s.Spec.ClusterIP = ""
		}
	},
	func(g *generator, s *v1.Service) {
		s.Spec.Ports = nil
		n := 1 + g.IntN(3)
		if g.chance(0.03) {
			n = 20
		}
		for range n {
			p := g.port()
			p.Port, p.AppProtocol = pick(g, g.numbers...), pick(g, nil, nil, ptr.To("kubernetes.io/h2c"))
			if g.chance(g.nodePorts) {
				p.NodePort = pick(g, int32(30080), 30081, 80, 53)
			}
			if g.chance(g.odd) {
				p.Port = pick(g, oddNumbers...)
			}
			if g.chance(g.odd) {
				p.NodePort = pick(g, oddNumbers...)
			}
			if g.chance(g.odd) {
				p.Protocol = pick(g, v1.Protocol("udp"), "ICMP", "tcp ")
			}
			if n > 3 {
				p.Name = fmt.Sprintf("p%d", g.IntN(20))
			}
			// Two ports of one name and protocol are not two service ports.
			if g.chance(g.odd) || !slices.ContainsFunc(s.Spec.Ports, func(o v1.ServicePort) bool {
				return o.Name == p.Name && cmp.Or(o.Protocol, v1.ProtocolTCP) == cmp.Or(p.Protocol, v1.ProtocolTCP)
			}) {
				s.Spec.Ports = append(s.Spec.Ports, p)
			}
		}
	},
	func(g *generator, s *v1.Service) {
		s.Annotations = nil
		if g.chance(0.15) {
			kinds := pick(g, "ClusterIP", "LoadBalancer", "NodePort", "ExternalIP,LoadBalancer", "nodeport, clusterip", "HostPort,ClusterIP", "")
			s.Annotations = map[string]string{pick(g, "service.tandem-proxy.dev/type", "service.cilium.io/type"): kinds}
		}
		if g.chance(0.15) {
			metav1.SetMetaDataAnnotation(&s.ObjectMeta, pick(g, "service.tandem-proxy.dev/node-selector", "service.cilium.io/node-selector"), pick(g, "role=edge", "role=core", "role=", "in (", "disk=ssd"))
		}
		if g.chance(0.2) {
			metav1.SetMetaDataAnnotation(&s.ObjectMeta, pick(g, "service.tandem-proxy.dev/src-ranges-policy", "service.cilium.io/src-ranges-policy"), pick(g, "deny", "deny", "allow", "Deny"))
		}
		if g.chance(0.2) {
			metav1.SetMetaDataAnnotation(&s.ObjectMeta, "service.tandem-proxy.dev/src-ranges-action", pick(g, "reject", "reject", "drop", "Reject"))
		}
	},
	func(g *generator, s *v1.Service) {
		s.Spec.ExternalIPs = nil
		if g.chance(g.external) {
			s.Spec.ExternalIPs = some(g, 3, g.vips[g.family()]...)
		}
		if g.chance(g.odd) {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, pick(g, oddAddrs...))
		}
	},
	func(g *generator, s *v1.Service) {
		s.Status.LoadBalancer.Ingress = nil
		if s.Spec.Type != v1.ServiceTypeLoadBalancer && g.chance(0.8) {
			return
		}
		for range g.IntN(4) {
			in := v1.LoadBalancerIngress{IP: pick(g, g.vips[g.family()]...)}
			switch g.IntN(12) {
			case 0, 1:
				in.IPMode = ptr.To(v1.LoadBalancerIPModeProxy)
			case 2, 3, 4:
				in.IPMode = ptr.To(v1.LoadBalancerIPModeVIP)
			case 5:
				in = v1.LoadBalancerIngress{Hostname: "lb.example.com"}
			case 6:
				in.Ports = []v1.PortStatus{{Port: 1, Protocol: v1.ProtocolTCP}}
			}
			if g.chance(g.odd) {
				in.IP = pick(g, oddAddrs...)
			}
			if g.chance(g.odd) {
				in.IPMode = ptr.To(v1.LoadBalancerIPMode("vip"))
			}
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, in)
		}
	},
	func(g *generator, s *v1.Service) {
		s.Spec.LoadBalancerSourceRanges = nil
		if g.chance(g.ranges) {
			s.Spec.LoadBalancerSourceRanges = some(g, 3, g.sourceRanges...)
			if g.chance(2 * g.odd) {
				s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, pick(g, oddRanges...))
			}
		}
	},
	func(g *generator, s *v1.Service) {
		s.Spec.InternalTrafficPolicy = pick(g, nil, ptr.To(v1.ServiceInternalTrafficPolicyCluster))
		if g.chance(g.local) {
			s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
		}
		if g.chance(g.odd) {
			s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicy("local"))
		}
	},
	func(g *generator, s *v1.Service) {
		s.Spec.ExternalTrafficPolicy = pick(g, "", v1.ServiceExternalTrafficPolicyCluster)
		if g.chance(g.local) {
			s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		}
		s.Spec.HealthCheckNodePort = pick(g, int32(0), 32000, 32000, 32001)
		if g.chance(g.odd) {
			s.Spec.HealthCheckNodePort = pick(g, oddNumbers...)
		}
	},
	func(g *generator, s *v1.Service) {
		s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = pick(g, "", v1.ServiceAffinityNone, v1.ServiceAffinityClientIP), nil
		if g.chance(0.6) {
			timeout := pick(g, nil, ptr.To[int32](1), ptr.To[int32](10), ptr.To[int32](10800), ptr.To[int32](86400))
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: timeout}}
			if g.chance(0.1) {
				s.Spec.SessionAffinityConfig.ClientIP = nil
			} else if g.chance(g.odd) {
				s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds = pick(g, ptr.To[int32](0), ptr.To[int32](-7), ptr.To[int32](86401), ptr.To[int32](1<<31-1))
			}
		}
	},
	func(g *generator, s *v1.Service) {
		s.CreationTimestamp = metav1.Time{}
		if h := g.IntN(4); h > 0 {
			s.CreationTimestamp.Time = time.Date(2026, 1, 1, h, 0, 0, 0, time.UTC)
		}
	},
}

// EndpointSlices.

func (g *generator) slice(name types.NamespacedName) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	for _, field := range sliceFields {
		field(g, s)
	}
	return s
}

func (g *generator) changeSlice(s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	s = s.DeepCopy()
	for range 1 + g.IntN(2) {
		switch n := len(s.Endpoints); {
		case g.chance(0.3):
			pick(g, sliceFields...)(g, s)
		case n == 0 || g.chance(0.3):
			s.Endpoints = append(s.Endpoints, g.endpoint(s))
		case g.chance(0.3):
			i := g.IntN(n)
			s.Endpoints = slices.Delete(s.Endpoints, i, i+1)
		default:
			e := &s.Endpoints[g.IntN(n)]
			changed := g.endpoint(s)
			switch g.IntN(4) {
			case 0:
				e.Conditions = changed.Conditions
			case 1:
				e.Hints = changed.Hints
			case 2:
				e.NodeName = changed.NodeName
			case 3:
				e.Addresses = changed.Addresses
			}
		}
	}
	return s
}

var sliceFields = []func(*generator, *discoveryv1.EndpointSlice){
	func(g *generator, s *discoveryv1.EndpointSlice) {
		s.AddressType = discoveryv1.AddressTypeIPv4
		switch f := pick(g, g.families...); {
		case f == proxier.IPv6 || g.chance(0.1):
			s.AddressType = discoveryv1.AddressTypeIPv6
		case g.chance(0.02):
			s.AddressType = pick(g, discoveryv1.AddressTypeFQDN, "", "ipv4")
		}
	},
	func(g *generator, s *discoveryv1.EndpointSlice) {
		var mine []string
		for _, n := range g.services {
			if n.Namespace == s.Namespace {
				mine = append(mine, n.Name)
			}
		}
		s.Labels = map[string]string{discoveryv1.LabelServiceName: pick(g, mine...)}
		switch {
		case g.chance(0.03):
			s.Labels[proxier.LabelHeadless] = ""
		case g.chance(0.02):
			s.Labels = nil
		case g.chance(g.odd):
			s.Labels[discoveryv1.LabelServiceName] = ""
		}
	},
	func(g *generator, s *discoveryv1.EndpointSlice) {
		s.Ports = nil
		for range 1 + g.IntN(3) {
			like := g.port()
			p := discoveryv1.EndpointPort{Name: &like.Name, Protocol: &like.Protocol, Port: ptr.To(pick(g, int32(8080), 8080, 8081, 80))}
			if g.chance(g.odd) {
				p.Name = nil
			}
			if g.chance(g.odd) {
				p.Port = pick(g, nil, ptr.To(pick(g, oddNumbers...)))
			}
			if g.chance(g.odd) {
				p.Protocol = pick(g, nil, ptr.To(v1.Protocol("tcp")))
			}
			s.Ports = append(s.Ports, p)
		}
		if g.chance(g.odd) {
			s.Ports = nil
		}
	},
	func(g *generator, s *discoveryv1.EndpointSlice) {
		s.Endpoints = nil
		for range g.IntN(6) {
			s.Endpoints = append(s.Endpoints, g.endpoint(s))
		}
	},
}

// nodeOf returns the node of a pod's address by the plan; this node for other addresses.
func nodeOf(text string) string {
	n := byte(1)
	switch a, _ := parseAddr(text); {
	case netip.MustParsePrefix("10.244.0.0/16").Contains(a):
		n = a.As4()[2]
	case netip.MustParsePrefix("fd00:10:244::/48").Contains(a):
		n = a.As16()[7]
	}
	return fmt.Sprintf("node%d", n)
}

func (g *generator) sliceFamily(s *discoveryv1.EndpointSlice) proxier.Family {
	if s.AddressType == discoveryv1.AddressTypeIPv6 {
		return proxier.IPv6
	}
	return proxier.IPv4
}

func (g *generator) endpoint(s *discoveryv1.EndpointSlice) discoveryv1.Endpoint {
	f := g.sliceFamily(s)
	pool := podPool[f]
	if !g.chance(g.duplicate) {
		// Few duplicates: each slice has its own few addresses.
		pool = nil
		for i := range 4 {
			pool = append(pool, fmt.Sprintf([]string{"10.244.%d.%d", "fd00:10:244:%x::%x"}[f], 1+i/2, 3+2*int(s.Name[2]-'0')+i%2))
		}
	}
	e := discoveryv1.Endpoint{Addresses: []string{pick(g, pool...)}}
	switch {
	case g.chance(g.odd):
		e.Addresses[0] = pick(g, "", "bogus", "fe80::1%eth0", "::ffff:10.244.1.1", "10.244.1.01", podPool[1-f][0])
	case g.chance(g.odd):
		e.Addresses = nil
	case g.chance(0.05):
		e.Addresses = append(e.Addresses, pick(g, podPool[f]...))
	}
	yes, no := pick(g, nil, ptr.To(true)), ptr.To(false)
	e.Conditions = discoveryv1.EndpointConditions{Ready: yes, Serving: yes, Terminating: pick(g, nil, no)}
	if g.chance(g.unready) {
		switch g.IntN(5) {
		case 0, 1:
			e.Conditions = discoveryv1.EndpointConditions{Ready: no, Serving: pick(g, no, no, nil), Terminating: pick(g, nil, no)}
		case 2, 3:
			e.Conditions = discoveryv1.EndpointConditions{Ready: no, Serving: pick(g, yes, yes, no), Terminating: ptr.To(true)}
		case 4:
			any := func() *bool { return pick(g, nil, ptr.To(true), no) }
			e.Conditions = discoveryv1.EndpointConditions{Ready: any(), Serving: any(), Terminating: any()}
		}
	}
	switch {
	case g.chance(0.1):
	case g.chance(0.2):
		e.NodeName = ptr.To(pick(g, nodeNames...))
	case len(e.Addresses) > 0:
		e.NodeName = ptr.To(nodeOf(e.Addresses[0]))
	}
	if g.chance(g.odd) {
		e.NodeName = ptr.To("")
	}
	hints := g.hints
	if hints == "mixed" {
		hints = pick(g, "", "zone", "zone", "node", "both")
	}
	if hints == "" && !g.chance(0.05) {
		return e
	}
	e.Hints = &discoveryv1.EndpointHints{}
	if hints == "zone" || hints == "both" {
		for range 1 + g.IntN(2) {
			e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: pick(g, zoneNames...)})
		}
	}
	if hints == "node" || hints == "both" {
		for range 1 + g.IntN(2) {
			e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: pick(g, nodeNames...)})
		}
	}
	if g.chance(g.odd) {
		e.Hints.ForZones = []discoveryv1.ForZone{{}}
	}
	return e
}
