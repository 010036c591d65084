// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
)

// cluster makes random events and remembers what is there.
type cluster struct {
	rand     *rand.Rand
	services map[string]*v1.Service
	slices   map[string]*discoveryv1.EndpointSlice
}

func newCluster(seed uint64) *cluster {
	return &cluster{rand: rand.New(rand.NewPCG(seed, seed)), services: map[string]*v1.Service{}, slices: map[string]*discoveryv1.EndpointSlice{}}
}

func (c *cluster) service() *v1.Service {
	n := c.rand.IntN(12)
	s := makeService(fmt.Sprintf("s%d", n), fmt.Sprintf("10.96.0.%d", c.rand.IntN(14)))
	s.CreationTimestamp = metav1.Unix(int64(c.rand.IntN(3)), 0)
	if c.rand.IntN(3) == 0 {
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, fmt.Sprintf("fd00:10:96::%d", n))
	}
	if c.rand.IntN(4) == 0 {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "u", Port: 53, Protocol: v1.ProtocolUDP})
	}
	if c.rand.IntN(4) == 0 {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
	}
	if c.rand.IntN(4) == 0 {
		s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
	}
	if c.rand.IntN(3) == 0 {
		c.external(s, n)
	}
	switch c.rand.IntN(12) {
	case 0:
		s.Spec.ClusterIP, s.Spec.ClusterIPs = v1.ClusterIPNone, []string{v1.ClusterIPNone}
	case 1:
		s.Labels = map[string]string{proxier.LabelServiceProxyName: "other"}
	}
	return s
}

// external gives a Service addresses for clients from elsewhere.
func (c *cluster) external(s *v1.Service, n int) {
	s.Spec.Type = v1.ServiceTypeLoadBalancer
	if c.rand.IntN(2) == 0 {
		s.Spec.Ports[0].NodePort = int32(30000 + c.rand.IntN(10))
	}
	if c.rand.IntN(2) == 0 {
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	}
	for range c.rand.IntN(3) {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: fmt.Sprintf("203.0.113.%d", c.rand.IntN(8))})
	}
	if c.rand.IntN(3) == 0 {
		s.Spec.ExternalIPs = []string{fmt.Sprintf("203.0.113.%d", c.rand.IntN(8))}
	}
	for range c.rand.IntN(3) {
		s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges,
			[]string{"198.51.100.0/24", "10.244.0.0/16", fmt.Sprintf("203.0.113.%d/32", n), "2001:db8::/32"}[c.rand.IntN(4)])
	}
}

func (c *cluster) slice() *discoveryv1.EndpointSlice {
	n := c.rand.IntN(12)
	s := makeSlice(fmt.Sprintf("s%d-%d", n, c.rand.IntN(3)), fmt.Sprintf("s%d", n))
	if c.rand.IntN(4) == 0 {
		s.AddressType = discoveryv1.AddressTypeIPv6
	}
	s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To("u"), Port: ptr.To[int32](5353), Protocol: ptr.To(v1.ProtocolUDP)})
	for range c.rand.IntN(5) {
		e := discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.244.0.%d", c.rand.IntN(8))}}
		if s.AddressType == discoveryv1.AddressTypeIPv6 {
			e.Addresses[0] = fmt.Sprintf("fd00:10:244::%d", c.rand.IntN(8))
		}
		e.Conditions.Ready = ptr.To(c.rand.IntN(4) != 0)
		e.Conditions.Serving = ptr.To(*e.Conditions.Ready || c.rand.IntN(2) == 0)
		e.Conditions.Terminating = ptr.To(!*e.Conditions.Ready && c.rand.IntN(2) == 0)
		if c.rand.IntN(2) == 0 {
			e.NodeName = ptr.To(fmt.Sprintf("node%d", c.rand.IntN(2)))
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

func (c *cluster) event(h proxier.Handler) {
	switch c.rand.IntN(8) {
	case 0:
		name := fmt.Sprintf("s%d", c.rand.IntN(12))
		if s := c.services[name]; s != nil {
			delete(c.services, name)
			h.OnServiceDelete(s)
		}
	case 1, 2, 3:
		s := c.service()
		if old := c.services[s.Name]; old != nil {
			h.OnServiceUpdate(old, s)
		} else {
			h.OnServiceAdd(s)
		}
		c.services[s.Name] = s
	case 4:
		for _, name := range slices.Sorted(maps.Keys(c.slices)) {
			if c.rand.IntN(len(c.slices)) == 0 {
				h.OnEndpointSliceDelete(c.slices[name])
				delete(c.slices, name)
				break
			}
		}
	default:
		s := c.slice()
		if old := c.slices[s.Name]; old != nil {
			h.OnEndpointSliceUpdate(old, s)
		} else {
			h.OnEndpointSliceAdd(s)
		}
		c.slices[s.Name] = s
	}
}

// decisions computes what is right from scratch.
func (c *cluster) decisions() []proxier.PortChange {
	tracker := proxier.NewChangeTracker("node1", time.Time{}, nil)
	for _, name := range slices.Sorted(maps.Keys(c.services)) {
		tracker.UpdateService(c.services[name])
	}
	for _, name := range slices.Sorted(maps.Keys(c.slices)) {
		tracker.UpdateEndpointSlice(c.slices[name])
	}
	table := proxier.NewTable(proxier.Facts{}, proxier.Policy{})
	table.Apply(tracker.Take())
	return table.All()
}
