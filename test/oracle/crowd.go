// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
)

// The crowd is a set of plain Services with separate addresses, 10.97.0.0/24 and
// fd00:10:97::/112. It makes structures that all Services share large.
const (
	crowdNamespace = "crowd"
	crowdSize      = 140
)

// crowdedEvents adds the crowd, or most of it, at first, and later removes and adds it.
func (g *generator) crowdedEvents(there *objects, first bool) []event {
	events := g.events(there, first)
	switch {
	case first && g.chance(0.7):
		return append(events, g.crowd()...)
	case !g.chance(0.2):
		return events
	}
	var leaving []event
	for _, name := range sorted(there.services) {
		if name.Namespace == crowdNamespace {
			leaving = append(leaving, event{service: there.services[name], gone: true})
		}
	}
	for _, name := range sorted(there.slices) {
		if name.Namespace == crowdNamespace {
			leaving = append(leaving, event{slice: there.slices[name], gone: true})
		}
	}
	if len(leaving) == 0 {
		return append(events, g.crowd()...)
	}
	if g.chance(0.3) { // some stay
		leaving = some(g, len(leaving), leaving...)
	}
	return append(events, leaving...)
}

// crowd is one of Services that are all of a kind.
func (g *generator) crowd() (events []event) {
	served, balanced, guarded := g.chance(0.6), g.chance(0.5), g.chance(0.4)
	family := g.families[0]
	for i := range crowdSize {
		name := types.NamespacedName{Namespace: crowdNamespace, Name: fmt.Sprintf("c%d", i)}
		ip := func(formats ...string) string { return fmt.Sprintf(formats[family], 1+i) }
		s := &v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
			Spec: v1.ServiceSpec{
				Type: v1.ServiceTypeClusterIP, ClusterIPs: []string{ip("10.97.0.%d", "fd00:10:97::%x")},
				Ports: []v1.ServicePort{{Name: "p", Port: 80, Protocol: v1.ProtocolTCP}},
			},
		}
		if balanced {
			s.Spec.Type, s.Spec.Ports[0].NodePort = v1.ServiceTypeLoadBalancer, int32(31000+17*i)
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: ip("203.0.114.%d", "2001:db8:203:114::%x")}}
			if guarded {
				s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24", "2001:db8:51:100::/64"}
			}
		}
		events = append(events, event{service: s})
		if !served {
			continue
		}
		events = append(events, event{slice: &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, Labels: map[string]string{discoveryv1.LabelServiceName: name.Name}},
			AddressType: [proxier.Families]discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6}[family],
			Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("p"), Port: ptr.To[int32](8080), Protocol: ptr.To(v1.ProtocolTCP)}},
			Endpoints:   []discoveryv1.Endpoint{{Addresses: podPool[family][i%4 : i%4+1], NodeName: ptr.To(ownNode)}},
		}})
	}
	return events
}

// apart is a frontend that is not of the crowd, if there is one.
func (g *generator) apart(frontends []Frontend) (at Frontend) {
	for range 30 {
		if at = pick(g, frontends...); at.Owner.Namespace != crowdNamespace {
			break
		}
	}
	return at
}
