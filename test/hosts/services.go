// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"fmt"
	"net/netip"
	"strings"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/lab"
)

// service is one for a pair of endpoints and policy.
type service struct {
	backend, policy string
	number          int
}

// services are those of every profile.
var services = []service{{Here, Cluster, 10}, {There, Cluster, 20}, {Here, Local, 30}, {There, Local, 40}, {Both, Cluster, 50}}

func serviceOf(c Cell) service {
	for _, s := range services {
		if s.backend == c.Backend && s.policy == c.Policy {
			return s
		}
	}
	panic("no Service for " + c.String())
}

// servicePort is the port of Services for requests; the next one is for transfers.
const servicePort = 80

// target is the address that a cell dials.
func (w *World) target(c Cell) netip.AddrPort {
	s, port := serviceOf(c), uint16(servicePort)
	if c.Kind == Transfer {
		port++
	}
	if c.Frontend == NodePort {
		return netip.AddrPortFrom(w.nodeAddress(c.Client, c.family()), s.nodePort(port))
	}
	return netip.AddrPortFrom(s.address(c.Frontend, c.family()), port)
}

// nodeAddress is where a client finds NodePorts.
func (w *World) nodeAddress(client string, f Family) netip.Addr {
	if addr, ok := w.Clients[client].NodePorts[f]; ok {
		return netip.MustParseAddr(addr)
	}
	return address(w.Node.Sandbox, f)
}

func (s service) nodePort(port uint16) uint16 { return 30000 + uint16(s.number)*10 + port }

func (s service) address(frontend string, f Family) netip.Addr {
	four, six := "10.96.0.%d", "fd00:10:96::%x"
	number := s.number
	if frontend != ClusterIP {
		four, six = "203.0.113.%d", "2001:db8:203:113::%x"
	}
	if frontend == LoadBalancer {
		number += 100
	}
	if f == IPv4 {
		return netip.MustParseAddr(fmt.Sprintf(four, number))
	}
	return netip.MustParseAddr(fmt.Sprintf(six, number))
}

// objects are the Services of the world with their endpoints, and its Node.
func (w *World) objects() []fakeapi.Object {
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.Node.Name}}
	for _, f := range w.families() {
		node.Spec.PodCIDRs = append(node.Spec.PodCIDRs, podRange(w.Node, f).String())
		node.Status.Addresses = append(node.Status.Addresses, v1.NodeAddress{Type: v1.NodeInternalIP, Address: address(w.Node.Sandbox, f).String()})
	}
	node.Spec.PodCIDR = node.Spec.PodCIDRs[0]
	list := []fakeapi.Object{node}
	if w.OptedOut {
		list = append(list, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{proxier.KeySocketLB: proxier.SocketLBDisabled}}})
	}
	for _, pod := range w.pods() {
		list = append(list, &v1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: pod.Name, UID: types.UID(pod.UID)},
			Spec:       v1.PodSpec{NodeName: pod.Node.Name}, Status: v1.PodStatus{Phase: v1.PodRunning},
		})
	}
	for _, s := range services {
		list = append(list, w.object(s))
		list = append(list, w.slices(s, w.endpoints(s)...)...)
	}
	return list
}

// endpoints are the pods of a Service. With policy Local, there is always one elsewhere.
func (w *World) endpoints(s service) []*lab.Pod {
	switch {
	case s.backend == There:
		return []*lab.Pod{w.There}
	case s.backend == Both || s.policy == Local:
		return []*lab.Pod{w.Here, w.There}
	}
	return []*lab.Pod{w.Here}
}

func (s service) name() string { return strings.ToLower(s.backend + "-" + s.policy) }

func (w *World) object(s service) *v1.Service {
	o := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: s.name()},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicy(s.policy),
			InternalTrafficPolicy: ptr.To(v1.ServiceInternalTrafficPolicy(s.policy)), SessionAffinity: v1.ServiceAffinityNone,
		},
	}
	for _, port := range []uint16{servicePort, servicePort + 1} {
		for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
			o.Spec.Ports = append(o.Spec.Ports, v1.ServicePort{
				Name: portName(port, protocol), Port: int32(port), Protocol: protocol, NodePort: int32(s.nodePort(port)),
			})
		}
	}
	for _, f := range w.families() {
		o.Spec.IPFamilies = append(o.Spec.IPFamilies, "IPv"+v1.IPFamily(f))
		o.Spec.ClusterIPs = append(o.Spec.ClusterIPs, s.address(ClusterIP, f).String())
		o.Spec.ExternalIPs = append(o.Spec.ExternalIPs, s.address(ExternalIP, f).String())
		ingress := v1.LoadBalancerIngress{IP: s.address(LoadBalancer, f).String(), IPMode: ptr.To(v1.LoadBalancerIPModeVIP)}
		o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, ingress)
	}
	o.Spec.ClusterIP = o.Spec.ClusterIPs[0]
	if s.policy == Local {
		o.Spec.HealthCheckNodePort = int32(s.nodePort(servicePort + 2))
	}
	return o
}

func portName(port uint16, protocol v1.Protocol) string {
	return fmt.Sprintf("%s-%d", strings.ToLower(string(protocol)), port)
}

// slices are the EndpointSlices of a Service with these pods.
func (w *World) slices(s service, pods ...*lab.Pod) (list []fakeapi.Object) {
	for _, f := range w.families() {
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "shop", Name: s.name() + "-" + string(f), Labels: map[string]string{discoveryv1.LabelServiceName: s.name()},
			},
			AddressType: "IPv" + discoveryv1.AddressType(f),
		}
		for port, target := range map[uint16]int32{servicePort: requestPort, servicePort + 1: transferPort} {
			for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
				slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{
					Name: ptr.To(portName(port, protocol)), Port: ptr.To(target), Protocol: ptr.To(protocol),
				})
			}
		}
		for _, pod := range pods {
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
				Addresses: []string{address(pod.Sandbox, f).String()}, NodeName: ptr.To(pod.Node.Name),
				Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
			})
		}
		list = append(list, slice)
	}
	return list
}
