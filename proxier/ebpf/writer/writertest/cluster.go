// SPDX-License-Identifier: Apache-2.0

package writertest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
)

// Cluster makes random events, and has the resulting objects.
type Cluster struct {
	Rand     *rand.Rand
	Services map[string]*v1.Service
	Slices   map[string]*discoveryv1.EndpointSlice
}

// NewCluster makes an empty cluster. The events are determined by the seed.
func NewCluster(seed uint64) *Cluster {
	return &Cluster{Rand: rand.New(rand.NewPCG(seed, seed)), Services: map[string]*v1.Service{}, Slices: map[string]*discoveryv1.EndpointSlice{}}
}

func (c *Cluster) service() *v1.Service {
	n := c.Rand.IntN(12)
	s := Service(fmt.Sprintf("s%d", n), fmt.Sprintf("10.96.0.%d", c.Rand.IntN(14)))
	s.CreationTimestamp = metav1.Unix(int64(c.Rand.IntN(3)), 0)
	if c.Rand.IntN(3) == 0 {
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, fmt.Sprintf("fd00:10:96::%d", n))
	}
	if c.Rand.IntN(4) == 0 {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "u", Port: 53, Protocol: v1.ProtocolUDP})
	}
	if c.Rand.IntN(4) == 0 {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
	}
	if c.Rand.IntN(4) == 0 {
		s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
	}
	if c.Rand.IntN(3) == 0 {
		c.external(s, n)
	}
	if c.Rand.IntN(8) == 0 {
		s.Annotations = map[string]string{proxier.AnnotationAlgorithm: "maglev", proxier.AnnotationTableSize: "251"}
	}
	switch c.Rand.IntN(12) {
	case 0:
		s.Spec.ClusterIP, s.Spec.ClusterIPs = v1.ClusterIPNone, []string{v1.ClusterIPNone}
	case 1:
		s.Labels = map[string]string{proxier.LabelServiceProxyName: "other"}
	}
	return s
}

// external gives a Service addresses for outside clients.
func (c *Cluster) external(s *v1.Service, n int) {
	s.Spec.Type = v1.ServiceTypeLoadBalancer
	if c.Rand.IntN(2) == 0 {
		s.Spec.Ports[0].NodePort = int32(30000 + c.Rand.IntN(10))
	}
	if c.Rand.IntN(2) == 0 {
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	}
	for range c.Rand.IntN(3) {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: fmt.Sprintf("203.0.113.%d", c.Rand.IntN(8))})
	}
	if c.Rand.IntN(3) == 0 {
		s.Spec.ExternalIPs = []string{fmt.Sprintf("203.0.113.%d", c.Rand.IntN(8))}
	}
	for range c.Rand.IntN(3) {
		s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges,
			[]string{"198.51.100.0/24", "10.244.0.0/16", fmt.Sprintf("203.0.113.%d/32", n), "2001:db8::/32"}[c.Rand.IntN(4)])
	}
}

func (c *Cluster) slice() *discoveryv1.EndpointSlice {
	n := c.Rand.IntN(12)
	s := Slice(fmt.Sprintf("s%d-%d", n, c.Rand.IntN(3)), fmt.Sprintf("s%d", n))
	if c.Rand.IntN(4) == 0 {
		s.AddressType = discoveryv1.AddressTypeIPv6
	}
	s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To("u"), Port: ptr.To[int32](5353), Protocol: ptr.To(v1.ProtocolUDP)})
	if c.Rand.IntN(3) == 0 {
		s.Annotations = map[string]string{proxier.AnnotationWeight: fmt.Sprint(c.Rand.IntN(4))}
	}
	for range c.Rand.IntN(5) {
		e := discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.244.0.%d", c.Rand.IntN(8))}}
		if s.AddressType == discoveryv1.AddressTypeIPv6 {
			e.Addresses[0] = fmt.Sprintf("fd00:10:244::%d", c.Rand.IntN(8))
		}
		e.Conditions.Ready = ptr.To(c.Rand.IntN(4) != 0)
		e.Conditions.Serving = ptr.To(*e.Conditions.Ready || c.Rand.IntN(2) == 0)
		e.Conditions.Terminating = ptr.To(!*e.Conditions.Ready && c.Rand.IntN(2) == 0)
		if c.Rand.IntN(2) == 0 {
			e.NodeName = ptr.To(fmt.Sprintf("node%d", c.Rand.IntN(2)))
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

// Event changes a random object, and calls the handler.
func (c *Cluster) Event(h proxier.Handler) {
	switch c.Rand.IntN(8) {
	case 0:
		name := fmt.Sprintf("s%d", c.Rand.IntN(12))
		if s := c.Services[name]; s != nil {
			delete(c.Services, name)
			h.OnServiceDelete(s)
		}
	case 1, 2, 3:
		s := c.service()
		if old := c.Services[s.Name]; old != nil {
			h.OnServiceUpdate(old, s)
		} else {
			h.OnServiceAdd(s)
		}
		c.Services[s.Name] = s
	case 4:
		for _, name := range slices.Sorted(maps.Keys(c.Slices)) {
			if c.Rand.IntN(len(c.Slices)) == 0 {
				h.OnEndpointSliceDelete(c.Slices[name])
				delete(c.Slices, name)
				break
			}
		}
	default:
		s := c.slice()
		if old := c.Slices[s.Name]; old != nil {
			h.OnEndpointSliceUpdate(old, s)
		} else {
			h.OnEndpointSliceAdd(s)
		}
		c.Slices[s.Name] = s
	}
}

// Decisions computes the decisions about all objects from scratch.
func (c *Cluster) Decisions() []proxier.PortChange {
	tracker := proxier.NewChangeTracker("node1", time.Time{}, nil)
	for _, name := range slices.Sorted(maps.Keys(c.Services)) {
		tracker.UpdateService(c.Services[name])
	}
	for _, name := range slices.Sorted(maps.Keys(c.Slices)) {
		tracker.UpdateEndpointSlice(c.Slices[name])
	}
	table := proxier.NewTable(proxier.Facts{}, proxier.Policy{})
	table.Apply(tracker.Take())
	return table.All()
}
