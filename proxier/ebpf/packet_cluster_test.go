// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
)

// Ports of the Services of random clusters and of their endpoints, and NodePorts.
var (
	randomPorts     = []int32{80, 53}
	randomTargets   = []int32{8080, 80}
	randomNodePorts = []int32{30001, 30002, 30003}
)

// randomEndpoints are endpoints by node, each in both families: pods, pods that do not exist, the
// host network, and two that no route of another node leads to, whose slices name no node.
var randomEndpoints = []struct{ node, four, six string }{
	{"node1", "10.244.1.1", "fd00:10:244:1::1"},
	{"node1", "10.244.1.9", "fd00:10:244:1::9"},
	{"node1", "172.18.0.1", "fd00:18::1"},
	{"node2", "10.244.2.1", "fd00:10:244:2::1"},
	{"node2", "10.244.2.2", "fd00:10:244:2::2"},
	{"node2", "172.18.0.2", "fd00:18::2"},
	{"", "10.244.1.8", "fd00:10:244:1::8"},
	{"", "192.0.2.9", "2001:db8:2::9"},
}

const randomServices = 6

// randomCluster has Services and slices, by name.
type randomCluster struct {
	services map[string]*v1.Service
	slices   map[string]*discoveryv1.EndpointSlice
	// forwarding: Services choose how packets are forwarded.
	forwarding bool
}

// fill replaces all objects with random ones.
func (c *randomCluster) fill(r *rand.Rand, h proxier.Handler) {
	for _, name := range slices.Sorted(maps.Keys(c.slices)) {
		h.OnEndpointSliceDelete(c.slices[name])
	}
	for _, name := range slices.Sorted(maps.Keys(c.services)) {
		h.OnServiceDelete(c.services[name])
	}
	c.services, c.slices = map[string]*v1.Service{}, map[string]*discoveryv1.EndpointSlice{}
	for i := range randomServices {
		c.setService(r, h, i)
		c.setSlices(r, h, i)
	}
}

// change makes a random change of one Service.
func (c *randomCluster) change(r *rand.Rand, h proxier.Handler) string {
	i := r.IntN(randomServices)
	if r.IntN(4) > 0 {
		c.setSlices(r, h, i)
		return fmt.Sprintf("slices of s%d", i)
	}
	name := fmt.Sprintf("s%d", i)
	if s := c.services[name]; s != nil && r.IntN(3) == 0 {
		h.OnServiceDelete(s)
		delete(c.services, name)
		return "no service " + name
	}
	c.setService(r, h, i)
	return "service " + name
}

func (c *randomCluster) setService(r *rand.Rand, h proxier.Handler, i int) {
	one := func(n int) bool { return r.IntN(n) == 0 }
	s := writertest.Service(fmt.Sprintf("s%d", i), fmt.Sprintf("10.96.0.%d", i))
	s.Spec.ClusterIPs = []string{s.Spec.ClusterIP, fmt.Sprintf("fd00:10:96::%d", i)}
	port := randomPorts[r.IntN(len(randomPorts))]
	s.Spec.Ports = []v1.ServicePort{{Name: "p", Port: port, Protocol: v1.ProtocolTCP}, {Name: "u", Port: port, Protocol: v1.ProtocolUDP}}
	if one(4) {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
	}
	if one(6) {
		s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
	}
	if !one(3) {
		c.open(r, s)
	}
	if c.forwarding {
		s.Annotations = map[string]string{proxier.AnnotationForwarding: pick(r, []string{"dsr", "dsr", "dsr", "hybrid", "snat"})}
	}
	if old := c.services[s.Name]; old != nil {
		h.OnServiceUpdate(old, s)
	} else {
		h.OnServiceAdd(s)
	}
	c.services[s.Name] = s
}

// open gives a Service addresses for outside clients.
func (c *randomCluster) open(r *rand.Rand, s *v1.Service) {
	one := func(n int) bool { return r.IntN(n) == 0 }
	s.Spec.Type = v1.ServiceTypeLoadBalancer
	if one(3) {
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	}
	if one(2) {
		for i := range s.Spec.Ports {
			s.Spec.Ports[i].NodePort = randomNodePorts[r.IntN(len(randomNodePorts))]
		}
	}
	n := 1 + r.IntN(3)
	for _, address := range []string{"203.0.113.%d", "2001:db8:203:113::%d"} {
		if one(2) {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: fmt.Sprintf(address, n)})
		}
		if one(3) {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf(address, 4))
		}
	}
	if one(3) {
		for _, cidr := range []string{"198.51.100.0/24", "198.51.100.1/32", "2001:db8:51:100::/64", "10.244.0.0/16"} {
			if one(2) {
				s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, cidr)
			}
		}
	}
}

// setSlices gives a Service random endpoints, sometimes none.
func (c *randomCluster) setSlices(r *rand.Rand, h proxier.Handler, i int) {
	service := fmt.Sprintf("s%d", i)
	four, six := writertest.Slice(service+"-4", service), writertest.Slice(service+"-6", service)
	six.AddressType = discoveryv1.AddressTypeIPv6
	target := randomTargets[r.IntN(len(randomTargets))]
	for _, s := range []*discoveryv1.EndpointSlice{four, six} {
		s.Ports = []discoveryv1.EndpointPort{
			{Name: ptr.To("p"), Port: ptr.To(target), Protocol: ptr.To(v1.ProtocolTCP)},
			{Name: ptr.To("u"), Port: ptr.To(target), Protocol: ptr.To(v1.ProtocolUDP)},
		}
	}
	share := r.IntN(4) // how many of the endpoints exist
	for _, x := range randomEndpoints {
		if r.IntN(6) >= share && !(c.forwarding && x.node == "node2" && r.IntN(2) == 0) {
			continue
		}
		e := discoveryv1.Endpoint{}
		if x.node != "" {
			e.NodeName = ptr.To(x.node)
		}
		if r.IntN(4) == 0 {
			e.Conditions = discoveryv1.EndpointConditions{Ready: ptr.To(false), Serving: ptr.To(r.IntN(2) == 0), Terminating: ptr.To(true)}
		}
		e.Addresses = []string{x.four}
		four.Endpoints = append(four.Endpoints, e)
		e.Addresses = []string{x.six}
		six.Endpoints = append(six.Endpoints, e)
	}
	for _, s := range []*discoveryv1.EndpointSlice{four, six} {
		if old := c.slices[s.Name]; old != nil {
			h.OnEndpointSliceUpdate(old, s)
		} else {
			h.OnEndpointSliceAdd(s)
		}
		c.slices[s.Name] = s
	}
}

// Addresses and ports of random packets.
var (
	randomSources = []string{
		"198.51.100.1", "198.51.100.2", "10.244.2.1", "172.18.0.2", "172.18.0.1", "192.168.7.1", "10.244.1.1",
		"2001:db8:51:100::1", "2001:db8:51:100::2", "fd00:10:244:2::1", "fd00:18::2", "fd00:18::1", "fd00:7::1", "fd00:10:244:1::1",
	}
	// Packets from these addresses must not be answered.
	martians           = []string{"127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "ff02::1"}
	randomSourcePorts  = []uint16{1000, 1001, 8080}
	randomDestinations = []string{
		"10.96.0.0", "10.96.0.1", "10.96.0.2", "10.96.0.3", "10.96.0.4", "10.96.0.5", "10.96.0.9", "10.96.0.250",
		"203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.4", "172.18.0.1", "192.168.7.1", "10.244.1.1",
		"fd00:10:96::0", "fd00:10:96::1", "fd00:10:96::2", "fd00:10:96::3", "fd00:10:96::4", "fd00:10:96::5", "fd00:10:96::9", "fd00:10:96::250",
		"2001:db8:203:113::1", "2001:db8:203:113::2", "2001:db8:203:113::3", "2001:db8:203:113::4", "fd00:18::1", "fd00:7::1",
	}
	randomDestinationPorts = []uint16{80, 53, 80, 53, 81, 30001, 30002, 30003}
)

func pick[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

// pickAddr picks an address of a family.
func pickAddr(r *rand.Rand, list []string, four bool) netip.Addr {
	for {
		if a := netip.MustParseAddr(pick(r, list)); a.Is4() == four {
			return a
		}
	}
}
