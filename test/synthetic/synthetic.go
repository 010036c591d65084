// SPDX-License-Identifier: Apache-2.0

// Package synthetic makes large clusters for benchmarks.
package synthetic

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// Service is the i-th Service of a cluster with policies of every kind.
func Service(i int) *v1.Service {
	ip := fmt.Sprintf("10.%d.%d.%d", 100+i>>16, i>>8&255, i&255)
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: fmt.Sprintf("service-%d", i), UID: "0"},
		Spec:       v1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip}, Ports: []v1.ServicePort{{Name: "http", Port: 80, Protocol: v1.ProtocolTCP}}},
	}
	lb := func() {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.Ports[0].NodePort = int32(1024 + i)
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: fmt.Sprintf("11.%d.%d.%d", i>>16, i>>8&255, i&255)}}
	}
	switch i % 20 { // eleven of twenty are plain
	case 0:
		s.Spec.Type = v1.ServiceTypeNodePort
		s.Spec.Ports[0].NodePort = int32(1024 + i)
	case 1:
		lb()
	case 2:
		lb()
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		s.Spec.HealthCheckNodePort = int32(1024 + i)
	case 3:
		lb()
		s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24", "203.0.113.0/24"}
	case 4:
		s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
	case 5:
		s.Spec.ExternalIPs = []string{fmt.Sprintf("12.%d.%d.%d", i>>16, i>>8&255, i&255)}
	case 6:
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
	case 7:
		s.Spec.Ports[0].Protocol = v1.ProtocolUDP
	case 8:
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "metrics", Port: 9090, Protocol: v1.ProtocolTCP})
	}
	return s
}

// Slice is the slice-th of the i-th Service, with endpoints of three nodes
// and zones, hinted to their zone in every third Service.
func Slice(i, slice, first, endpoints int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: fmt.Sprintf("service-%d-%05d", i, slice),
			Labels: map[string]string{discoveryv1.LabelServiceName: fmt.Sprintf("service-%d", i)}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080), Protocol: ptr.To(v1.ProtocolTCP)}},
		Endpoints:   make([]discoveryv1.Endpoint, endpoints),
	}
	switch i % 20 {
	case 7:
		s.Ports[0].Protocol = ptr.To(v1.ProtocolUDP)
	case 8:
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To("metrics"), Port: ptr.To[int32](9090), Protocol: ptr.To(v1.ProtocolTCP)})
	}
	for j := range endpoints {
		n := (first + j) & (1<<20 - 1)
		n = n*7919&(1<<20-1) + 1 // pods of one Service have addresses all over the range
		e := discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("172.%d.%d.%d", 16+n>>16, n>>8&255, n&255)},
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
			NodeName:   ptr.To(fmt.Sprintf("node%d", 1+j%3)),
		}
		if i%3 == 0 {
			e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: fmt.Sprintf("z%d", 1+j%3)}}}
		}
		s.Endpoints[j] = e
	}
	return s
}
