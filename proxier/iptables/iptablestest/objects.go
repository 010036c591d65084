// SPDX-License-Identifier: Apache-2.0

package iptablestest

import (
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
)

// Facts are those of node1. Addresses are those of package lab: node1 is 172.18.0.1, with pods
// 10.244.1.x.
var Facts = proxier.Facts{
	NodeIPs:    [proxier.Families]netip.Addr{netip.MustParseAddr("172.18.0.1"), netip.MustParseAddr("fd00:18::1")},
	LocalAddrs: []netip.Addr{netip.MustParseAddr("172.18.0.1"), netip.MustParseAddr("fd00:18::1")},
	Pods:       proxier.Detector{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}},
}

// ServiceCIDRs contain all ClusterIPs.
var ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}

// Service returns Service i, with ClusterIP 10.96.x.y and TCP port 80.
func Service(i int, change ...func(*v1.Service)) *v1.Service {
	ip := fmt.Sprintf("10.96.%d.%d", i/250, 1+i%250)
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprintf("s%d", i)},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip},
			Ports: []v1.ServicePort{{Name: "p", Port: 80, Protocol: v1.ProtocolTCP}},
		},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

// Endpoints returns a slice of Service i. Pods 10.244.1.x are on node1.
func Endpoints(i int, addrs ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprintf("s%d", i), Labels: map[string]string{discoveryv1.LabelServiceName: fmt.Sprintf("s%d", i)}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("p"), Port: ptr.To[int32](8080), Protocol: ptr.To(v1.ProtocolTCP)}},
	}
	local := netip.MustParsePrefix("10.244.1.0/24")
	for _, text := range addrs {
		a := netip.MustParseAddr(text)
		if a.Is6() {
			s.AddressType = discoveryv1.AddressTypeIPv6
			s.Name = fmt.Sprintf("s%d-v6", i)
			local = netip.MustParsePrefix("fd00:10:244:1::/64")
		}
		on := "node2"
		if local.Contains(a) {
			on = "node1"
		}
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{text}, NodeName: &on})
	}
	return s
}

// Pod returns the IPv4 address of pod i.
func Pod(i int) string { return fmt.Sprintf("10.244.%d.%d", 1+i/200, 1+i%200) }

// DualStack adds an IPv6 ClusterIP.
func DualStack(i int) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, fmt.Sprintf("fd00:10:96::%x", 1+i))
		s.Spec.IPFamilies = []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}
	}
}

// Balanced makes a Service one of type LoadBalancer, with these source ranges.
func Balanced(i int, ranges ...string) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.Ports[0].NodePort = int32(30000 + i)
		s.Spec.LoadBalancerSourceRanges = ranges
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: fmt.Sprintf("203.0.%d.%d", 113+i/250, 1+i%250)}}
	}
}

// HealthCheck sets the Service's health check node port.
func HealthCheck(port int32) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.HealthCheckNodePort = port }
}

// ExternalLocal sets externalTrafficPolicy: Local.
func ExternalLocal(s *v1.Service) {
	s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
}

// InternalLocal sets internalTrafficPolicy: Local.
func InternalLocal(s *v1.Service) {
	s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
}

// Sticky sets session affinity.
func Sticky(s *v1.Service) {
	s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
	s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](10800)}}
}

// NodePort makes a Service one of type NodePort.
func NodePort(port int32) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeNodePort
		s.Spec.Ports[0].NodePort = port
	}
}
