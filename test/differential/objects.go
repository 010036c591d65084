// SPDX-License-Identifier: Apache-2.0

package differential

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
)

// number of a Service, which its addresses have.
func (s *Story) number(name string) int {
	i := slices.Index(s.services, name)
	if i < 0 {
		i = len(s.services)
		s.services = append(s.services, name)
	}
	return 1 + i
}

// vip returns an address of a Service: ip, lb, lb2, external.
func (s *Story) vip(name, kind string) (netip.Addr, bool) {
	n := s.number(name)
	switch kind {
	case "ip":
		return s.addr("10.96.0.%d", "fd00:10:96::%x", n), true
	case "lb":
		return s.addr("203.0.113.%d", "2001:db8:203:113::%x", n), true
	case "lb2":
		return s.addr("203.0.113.%d", "2001:db8:203:113::%x", 100+n), true
	case "external":
		return s.addr("203.0.113.%d", "2001:db8:203:113::%x", 200+n), true
	}
	return netip.Addr{}, false
}

// service has ports=name:80/udp,…; type=…, where headless is one; etp=Local, itp=Local; external; lb
// and lb2, or lb=Proxy; ranges=clients,pods,node,all,other; affinity=10; health; no-node-ports;
// label=proxy, label=headless; dual.
func (s *Story) service(name string, words []string) error {
	n := s.number(name)
	ip, _ := s.vip(name, "ip")
	o := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: caseNamespace, Name: name},
		Spec:       v1.ServiceSpec{Type: v1.ServiceTypeClusterIP, ClusterIP: ip.String(), ClusterIPs: []string{ip.String()}},
	}
	ports, nodePorts := "http:80", true
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "ports":
			ports = value
		case "type":
			if o.Spec.Type = v1.ServiceType(value); value == "headless" {
				o.Spec.Type, o.Spec.ClusterIP, o.Spec.ClusterIPs = v1.ServiceTypeClusterIP, v1.ClusterIPNone, []string{v1.ClusterIPNone}
			}
			if o.Spec.Type == v1.ServiceTypeExternalName {
				o.Spec.ClusterIP, o.Spec.ClusterIPs = "", nil
			}
		case "dual":
			other := newStory("", 1-s.family)
			other.services = s.services
			ip, _ := other.vip(name, "ip")
			o.Spec.ClusterIPs = append(o.Spec.ClusterIPs, ip.String())
		case "etp":
			o.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicy(value)
		case "itp":
			o.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicy(value))
		case "external":
			a, _ := s.vip(name, key)
			o.Spec.ExternalIPs = append(o.Spec.ExternalIPs, a.String())
		case "lb", "lb2":
			a, _ := s.vip(name, key)
			in := v1.LoadBalancerIngress{IP: a.String()}
			if value != "" {
				in.IPMode = ptr.To(v1.LoadBalancerIPMode(value))
			}
			o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, in)
		case "hostname":
			o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{Hostname: "lb.example.com"})
		case "ranges":
			for _, r := range strings.Split(value, ",") {
				text, ok := map[string]string{
					"clients": s.prefix("198.51.100.0/25", "2001:db8:51:100::/121").String(),
					"pods":    s.prefix("10.244.0.0/16", "fd00:10:244::/48").String(),
					"node":    s.prefix("172.18.0.1/32", "fd00:18::1/128").String(),
					"all":     s.prefix("0.0.0.0/0", "::/0").String(),
					"other":   newStory("", 1-s.family).prefix("198.51.100.0/25", "2001:db8:51:100::/121").String(),
					"padded":  " " + s.prefix("198.51.100.0/25", "2001:db8:51:100::/121").String() + " ",
					"hostbit": s.prefix("198.51.100.9/25", "2001:db8:51:100::9/121").String(),
				}[r]
				if !ok {
					return fmt.Errorf("unknown range %q", r)
				}
				o.Spec.LoadBalancerSourceRanges = append(o.Spec.LoadBalancerSourceRanges, text)
			}
		case "affinity":
			seconds, err := strconv.Atoi(value)
			if err != nil {
				return err
			}
			o.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			o.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(seconds))}}
		case "health":
			o.Spec.HealthCheckNodePort = int32(32000 + n)
		case "no-node-ports":
			nodePorts = false
		case "label":
			o.Labels = map[string]string{map[string]string{"proxy": proxier.LabelServiceProxyName, "headless": proxier.LabelHeadless}[value]: ""}
		default:
			return fmt.Errorf("unknown property %q of a Service", w)
		}
	}
	nodePorts = nodePorts && (o.Spec.Type == v1.ServiceTypeNodePort || o.Spec.Type == v1.ServiceTypeLoadBalancer)
	for i, text := range strings.Split(ports, ",") {
		port, number, protocol, err := parsePort(text)
		if err != nil {
			return err
		}
		p := v1.ServicePort{Name: port, Port: number, Protocol: protocol}
		if nodePorts {
			p.NodePort = int32(30000 + 100*n + i)
		}
		o.Spec.Ports = append(o.Spec.Ports, p)
	}
	s.ports[name] = o.Spec.Ports
	s.step().Services = append(s.step().Services, o)
	return nil
}

// parsePort reads name:80/udp.
func parsePort(text string) (name string, number int32, protocol v1.Protocol, err error) {
	text, word, _ := strings.Cut(text, "/")
	name, digits, _ := strings.Cut(text, ":")
	n, err := strconv.Atoi(digits)
	return name, int32(n), cmp.Or(v1.Protocol(strings.ToUpper(word)), v1.ProtocolTCP), err
}

// slice has name=…, where the default is the Service's with -1; ports=…, where the default is those of the
// Service, beginning with 8080; headless; and endpoints: a@node1 is one, where a name
// always has the same address, and a@- has no node. Conditions follow a slash: unready; slow (not ready,
// serving); draining (terminating, serving), stopped (terminating, not serving); early (terminating,
// but ready). Hints follow plus signs: zones, or nodes.
func (s *Story) slice(service string, words []string) error {
	o := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: caseNamespace, Name: service + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressType(ipFamilies[s.family]),
	}
	for i, p := range s.ports[service] {
		o.Ports = append(o.Ports, discoveryv1.EndpointPort{Name: ptr.To(p.Name), Port: ptr.To(int32(8080 + i)), Protocol: ptr.To(p.Protocol)})
	}
	for _, w := range words {
		key, value, isSetting := strings.Cut(w, "=")
		switch {
		case key == "name":
			o.Name = value
		case key == "headless":
			o.Labels[proxier.LabelHeadless] = ""
		case key == "ports":
			o.Ports = nil
			for _, text := range strings.Split(value, ",") {
				name, number, protocol, err := parsePort(text)
				if err != nil {
					return err
				}
				o.Ports = append(o.Ports, discoveryv1.EndpointPort{Name: &name, Port: &number, Protocol: &protocol})
			}
		case isSetting:
			return fmt.Errorf("unknown property %q of a slice", w)
		default:
			e, err := s.endpoint(w)
			if err != nil {
				return err
			}
			o.Endpoints = append(o.Endpoints, e)
		}
	}
	s.step().Slices = append(s.step().Slices, o)
	return nil
}

func (s *Story) endpoint(word string) (e discoveryv1.Endpoint, err error) {
	parts := strings.Split(word, "+")
	for _, h := range parts[1:] {
		if e.Hints == nil {
			e.Hints = &discoveryv1.EndpointHints{}
		}
		if strings.HasPrefix(h, "node") {
			e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: h})
		} else {
			e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: h})
		}
	}
	at, condition, _ := strings.Cut(parts[0], "/")
	name, node, _ := strings.Cut(at, "@")
	digit := 9
	if node != "-" {
		if digit, err = strconv.Atoi(strings.TrimPrefix(node, "node")); err != nil {
			return e, fmt.Errorf("endpoint %q has no node", word)
		}
		e.NodeName = &node
	}
	if _, known := s.pods[name]; !known {
		s.pods[name] = s.addr("10.244.%d.%d", "fd00:10:244:%x::%x", digit, 1+len(s.pods))
		if node == "node1" && strings.HasPrefix(name, "host") { // in the host's network
			s.pods[name] = s.Facts.NodeIPs[s.family]
		}
	}
	e.Addresses = []string{s.pods[name].String()}
	yes, no := ptr.To(true), ptr.To(false)
	conditions, ok := map[string]discoveryv1.EndpointConditions{
		"":         {Ready: yes, Serving: yes, Terminating: no},
		"unknown":  {},
		"unready":  {Ready: no, Serving: no, Terminating: no},
		"slow":     {Ready: no, Serving: yes, Terminating: no},
		"draining": {Ready: no, Serving: yes, Terminating: yes},
		"stopped":  {Ready: no, Serving: no, Terminating: yes},
		"early":    {Ready: yes, Serving: yes, Terminating: yes},
	}[condition]
	if !ok {
		return e, fmt.Errorf("unknown condition of %q", word)
	}
	e.Conditions = conditions
	return e, nil
}
