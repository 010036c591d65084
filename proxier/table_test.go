// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// Addresses in these tests: Services 10.96.0.0/16 and fd00:10:96::/112,
// endpoints 10.244.0.0/16 and fd00:10:244::/48. This node is node1 in zone z1.

type world struct {
	tracker  *ChangeTracker
	table    *Table
	problems []Problem
}

func newWorld() *world {
	w := &world{table: NewTable(Facts{Zone: "z1"}, Policy{})}
	w.tracker = NewChangeTracker("node1", time.Time{}, ReporterFunc(func(p Problem) { w.problems = append(w.problems, p) }))
	return w
}

func (w *world) apply() []PortChange { return w.table.Apply(w.tracker.Take()) }

func (w *world) text() string {
	var b strings.Builder
	for _, c := range w.table.All() {
		b.WriteString(c.New.String())
	}
	return b.String()
}

func makeService(name string, mutate ...func(*v1.Service)) *v1.Service {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Spec: v1.ServiceSpec{
			ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"},
			Ports: []v1.ServicePort{{Name: "p", Port: 80, Protocol: v1.ProtocolTCP}},
		},
	}
	for _, m := range mutate {
		m(s)
	}
	return s
}

func localPolicy(s *v1.Service) {
	s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
}

func clusterIPs(ips ...string) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = ips[0], ips }
}

func ports(list ...v1.ServicePort) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.Ports = list }
}

// makeSlice describes endpoints as words: an address, then any of notready,
// notserving, terminating, node=NAME, hint=NODE, zone=ZONE.
// annotations sets annotations of a Service: keys and values in turn.
func annotations(list ...string) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Annotations = map[string]string{}
		for i := 0; i < len(list); i += 2 {
			s.Annotations[list[i]] = list[i+1]
		}
	}
}

// weighted adds an annotation to a slice.
func weighted(s *discoveryv1.EndpointSlice, key, weight string) *discoveryv1.EndpointSlice {
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations[key] = weight
	return s
}

func makeSlice(name string, endpoints ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: "a"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("p"), Port: ptr.To[int32](8080), Protocol: ptr.To(v1.ProtocolTCP)}},
	}
	for _, text := range endpoints {
		words := strings.Fields(text)
		e := discoveryv1.Endpoint{Addresses: []string{words[0]}}
		if strings.Contains(words[0], ":") {
			s.AddressType = discoveryv1.AddressTypeIPv6
		}
		for _, word := range words[1:] {
			key, value, _ := strings.Cut(word, "=")
			if (key == "hint" || key == "zone") && e.Hints == nil {
				e.Hints = &discoveryv1.EndpointHints{}
			}
			switch key {
			case "notready":
				e.Conditions.Ready = ptr.To(false)
			case "notserving":
				e.Conditions.Serving = ptr.To(false)
			case "terminating":
				e.Conditions.Terminating = ptr.To(true)
			case "node":
				e.NodeName = ptr.To(value)
			case "hint":
				e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: value})
			case "zone":
				e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: value})
			default:
				panic(word)
			}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

func TestDecisions(t *testing.T) {
	udp := ports(v1.ServicePort{Name: "p", Port: 53, Protocol: v1.ProtocolUDP})
	udpSlice := func(s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
		s.Ports[0].Protocol = ptr.To(v1.ProtocolUDP)
		return s
	}
	for _, test := range []struct {
		name    string // with the statement it shows
		service *v1.Service
		slices  []*discoveryv1.EndpointSlice
		want    string
	}{
		{
			name: "no endpoints: reject (S41)", service: makeService("a"),
			want: "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  set ipv4/cluster empty=reject\n",
		},
		{
			name: "ready endpoints (S24)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.2", "10.244.0.1", "10.244.0.3 notready")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.1:8080 cluster\n  backend 10.244.0.2:8080 cluster\n",
		},
		{
			name: "headless (S01)", service: makeService("a", clusterIPs("None")),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1")},
		},
		{
			name: "ExternalName (S01)", service: makeService("a", func(s *v1.Service) { s.Spec.Type = v1.ServiceTypeExternalName }),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1")},
		},
		{
			name: "another proxy's (S01)", service: makeService("a", func(s *v1.Service) { s.Labels = map[string]string{LabelServiceProxyName: "x"} }),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1")},
		},
		{
			name: "opted out", service: makeService("a", func(s *v1.Service) { s.Annotations = map[string]string{AnnotationFastPath: FastPathDisabled} }),
			want: "ns/a:p TCP opted-out\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  set ipv4/cluster empty=reject\n",
		},
		{
			name: "maglev by annotation", service: makeService("a", annotations(AnnotationAlgorithm, "maglev", AnnotationTableSize, "509")),
			want: "ns/a:p TCP maglev=509\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  set ipv4/cluster empty=reject\n",
		},
		{
			name: "maglev by Cilium's annotation", service: makeService("a", annotations("service.cilium.io/lb-algorithm", "maglev")),
			want: "ns/a:p TCP maglev\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  set ipv4/cluster empty=reject\n",
		},
		{
			name: "weights", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{weighted(makeSlice("1", "10.244.0.1"), AnnotationWeight, "300"), makeSlice("2", "10.244.0.2"), weighted(makeSlice("3", "10.244.0.3"), aliasWeight, "1")},
			want: "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n" +
				"  backend 10.244.0.1:8080 cluster weight=300\n  backend 10.244.0.2:8080 cluster\n  backend 10.244.0.3:8080 cluster weight=1\n",
		},
		{
			name: "maintenance", service: makeService("a", ports(v1.ServicePort{Name: "p", Port: 80}, v1.ServicePort{Name: "u", Port: 53, Protocol: v1.ProtocolUDP})),
			slices: []*discoveryv1.EndpointSlice{weighted(makeSlice("1", "10.244.0.1"), AnnotationWeight, "0"), makeSlice("2", "10.244.0.2")},
			want: "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.2:8080 cluster\n" +
				"ns/a:u UDP\n  frontend 10.96.0.1:53 ClusterIP all=ipv4/cluster\n  set ipv4/cluster empty=reject\n",
		},
		{
			name: "a UDP client keeps a backend in maintenance", service: makeService("a", ports(v1.ServicePort{Name: "p", Port: 80, Protocol: v1.ProtocolUDP})),
			slices: []*discoveryv1.EndpointSlice{weighted(udpSlice(makeSlice("1", "10.244.0.1")), AnnotationWeight, "0"), udpSlice(makeSlice("2", "10.244.0.2"))},
			want:   "ns/a:p UDP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.1:8080 retained weight=0\n  backend 10.244.0.2:8080 cluster\n",
		},
		{
			name: "all in maintenance", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{weighted(makeSlice("1", "10.244.0.1 terminating", "10.244.0.2"), AnnotationWeight, "0")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  set ipv4/cluster empty=reject\n",
		},
		{
			name: "slices labelled headless (S02)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{func() *discoveryv1.EndpointSlice {
				s := makeSlice("1", "10.244.0.1")
				s.Labels[LabelHeadless] = ""
				return s
			}()},
			want: "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  set ipv4/cluster empty=reject\n",
		},
		{
			name: "dual stack (S03, S20)", service: makeService("a", clusterIPs("fd00:10:96::1", "10.96.0.1")),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1"), makeSlice("2", "fd00:10:244::1")},
			want: "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  frontend [fd00:10:96::1]:80 ClusterIP all=ipv6/cluster\n" +
				"  backend 10.244.0.1:8080 cluster\n  backend [fd00:10:244::1]:8080 cluster\n",
		},
		{
			name: "single stack leaves the other family untouched (S03)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{makeSlice("2", "fd00:10:244::1")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  set ipv4/cluster empty=reject\n",
		},
		{
			name:    "one number for TCP and UDP (S08)",
			service: makeService("a", ports(v1.ServicePort{Name: "t", Port: 53}, v1.ServicePort{Name: "u", Port: 53, Protocol: v1.ProtocolUDP})),
			want: "ns/a:t TCP\n  frontend 10.96.0.1:53 ClusterIP all=ipv4/cluster\n  set ipv4/cluster empty=reject\n" +
				"ns/a:u UDP\n  frontend 10.96.0.1:53 ClusterIP all=ipv4/cluster\n  set ipv4/cluster empty=reject\n",
		},
		{
			name: "each slice has its own target port, nil ports are nothing (S10)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{
				makeSlice("1", "10.244.0.1"),
				func() *discoveryv1.EndpointSlice {
					s := makeSlice("2", "10.244.0.2")
					s.Ports[0].Port = ptr.To[int32](9090)
					return s
				}(),
				func() *discoveryv1.EndpointSlice {
					s := makeSlice("3", "10.244.0.3")
					s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To("p")}, discoveryv1.EndpointPort{Port: ptr.To[int32](1)})
					s.Ports = s.Ports[1:]
					return s
				}(),
			},
			want: "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.1:8080 cluster\n  backend 10.244.0.2:9090 cluster\n",
		},
		{
			name: "only the first address counts (S20)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{func() *discoveryv1.EndpointSlice {
				s := makeSlice("1", "10.244.0.1")
				s.Endpoints[0].Addresses = append(s.Endpoints[0].Addresses, "10.244.0.9")
				return s
			}()},
			want: "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.1:8080 cluster\n",
		},
		{
			name: "duplicates collapse, not terminating wins (S22)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1 notready terminating"), makeSlice("2", "10.244.0.1")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.1:8080 cluster\n",
		},
		{
			name: "serving and terminating where none is ready (S24, S26)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1 notready terminating", "10.244.0.2 notready terminating notserving", "10.244.0.3 notready")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.1:8080 cluster terminating\n",
		},
		{
			name: "local set (S23, S25, S40)", service: makeService("a", localPolicy),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1 node=node1", "10.244.0.2 node=node2", "10.244.0.3")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/local\n  backend 10.244.0.1:8080 local on-node\n",
		},
		{
			name: "local terminating while others are ready (S25)", service: makeService("a", localPolicy),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1 node=node1 notready terminating", "10.244.0.2 node=node2")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/local\n  backend 10.244.0.1:8080 local on-node terminating\n",
		},
		{
			name: "none local: drop (S42)", service: makeService("a", localPolicy),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.2 node=node2")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/local\n  set ipv4/local empty=drop\n",
		},
		{
			name: "none at all: reject in spite of the policy (S41)", service: makeService("a", localPolicy),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.2 node=node2 notready")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/local\n  set ipv4/local empty=reject\n",
		},
		{
			name: "zone hints (S27)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1 zone=z1", "10.244.0.2 zone=z2", "10.244.0.3 zone=z2 zone=z1")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.1:8080 cluster\n  backend 10.244.0.3:8080 cluster\n",
		},
		{
			name: "one endpoint without a hint: none are followed (S27)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1 zone=z1", "10.244.0.2")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.1:8080 cluster\n  backend 10.244.0.2:8080 cluster\n",
		},
		{
			name: "no hint for this zone: none are followed (S27)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1 zone=z3", "10.244.0.2 zone=z2")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.1:8080 cluster\n  backend 10.244.0.2:8080 cluster\n",
		},
		{
			name: "node hints before zone hints (S27, S28)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1 zone=z1 hint=node1", "10.244.0.2 zone=z1 hint=node2")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.1:8080 cluster\n",
		},
		{
			name: "node hints for others fall back to the zone (S28)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1 zone=z2 hint=node3", "10.244.0.2 zone=z1 hint=node2")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.2:8080 cluster\n",
		},
		{
			name: "hints never apply to the terminating fallback (S24)", service: makeService("a"),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1 zone=z1 notready terminating", "10.244.0.2 zone=z2 notready terminating")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  backend 10.244.0.1:8080 cluster terminating\n  backend 10.244.0.2:8080 cluster terminating\n",
		},
		{
			name: "hints never apply to Local (S29)", service: makeService("a", localPolicy),
			slices: []*discoveryv1.EndpointSlice{makeSlice("1", "10.244.0.1 zone=z2 node=node1", "10.244.0.2 zone=z1")},
			want:   "ns/a:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/local\n  backend 10.244.0.1:8080 local on-node\n",
		},
		{
			name: "a UDP client keeps what still serves (S71)", service: makeService("a", udp),
			slices: []*discoveryv1.EndpointSlice{udpSlice(makeSlice("1", "10.244.0.1", "10.244.0.2 notready terminating", "10.244.0.3 notready notserving"))},
			want:   "ns/a:p UDP\n  frontend 10.96.0.1:53 ClusterIP all=ipv4/cluster\n  backend 10.244.0.1:8080 cluster\n  backend 10.244.0.2:8080 retained terminating\n",
		},
		{
			name: "affinity (S60)", service: makeService("a", func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP }),
			want: "ns/a:p TCP affinity=3h0m0s\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster\n  set ipv4/cluster empty=reject\n",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld()
			// Slices may come before their Service.
			for _, s := range test.slices {
				w.tracker.UpdateEndpointSlice(s)
			}
			w.tracker.UpdateService(test.service)
			w.apply()
			if diff := cmp.Diff(test.want, w.text()); diff != "" {
				t.Error(diff)
			}
			if len(w.problems) > 0 {
				t.Errorf("problems: %+v", w.problems)
			}
			w.tracker.DeleteService(w.nameOf(test.service))
			for _, s := range test.slices {
				w.tracker.DeleteEndpointSlice(s)
			}
			w.apply()
			if got := w.text(); got != "" || w.table.Len() != 0 || len(w.table.owner) != 0 || len(w.tracker.entries) != 0 {
				t.Errorf("left behind: %s, %d ports, %d addresses, %d entries", got, w.table.Len(), len(w.table.owner), len(w.tracker.entries))
			}
		})
	}
}

// What the API would have rejected is named with its field and costs nothing
// else.
func TestBadInput(t *testing.T) {
	for _, test := range []struct {
		name, field string
		message     string // a part of it
		service     *v1.Service
		slice       *discoveryv1.EndpointSlice
		want        string // part of what is served all the same
	}{
		{name: "address", field: "spec.clusterIPs[1]", service: makeService("a", clusterIPs("10.96.0.1", "10.96.0.300")), want: "frontend 10.96.0.1:80"},
		{name: "mapped address", field: "spec.clusterIPs[1]", service: makeService("a", clusterIPs("10.96.0.1", "::ffff:1.2.3.4")), want: "frontend 10.96.0.1:80"},
		{name: "leading zeros", field: "spec.clusterIPs[0]", service: makeService("a", clusterIPs("10.96.0.041", "fd00:10:00096::0"), func(s *v1.Service) {
			s.Spec.ExternalIPs = []string{"192.168.099.022"}
			s.Spec.LoadBalancerSourceRanges = []string{"203.0.113.000/025"}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "1.2.3.004"}}
		}), want: "frontend 10.96.0.41:80 ClusterIP all=ipv4/cluster\n" +
			"  frontend 1.2.3.4:80 LoadBalancer pod=ipv4/cluster,any-source host=ipv4/cluster,masquerade outside=ipv4/cluster,masquerade ranges=203.0.113.0/25\n" +
			"  frontend 192.168.99.22:80 ExternalIP"},
		{name: "two of a family", field: "spec.clusterIPs[1]", service: makeService("a", clusterIPs("10.96.0.1", "10.96.0.2")), want: "frontend 10.96.0.1:80"},
		{name: "port 0", field: "spec.ports[0].port", service: makeService("a", ports(v1.ServicePort{Name: "z"}, v1.ServicePort{Name: "p", Port: 80})), want: "frontend 10.96.0.1:80"},
		{name: "port 65536", field: "spec.ports[0].port", service: makeService("a", ports(v1.ServicePort{Name: "z", Port: 65536}, v1.ServicePort{Name: "p", Port: 80})), want: "frontend 10.96.0.1:80"},
		{
			name: "two ports of a name", field: "spec.ports[1].name", want: "frontend 10.96.0.1:80",
			service: makeService("a", ports(v1.ServicePort{Name: "p", Port: 80}, v1.ServicePort{Name: "p", Port: 81, NodePort: 30081})),
		},
		{name: "protocol", field: "spec.ports[0].protocol", service: makeService("a", ports(v1.ServicePort{Name: "z", Port: 1, Protocol: "QUIC"}, v1.ServicePort{Name: "p", Port: 80})), want: "frontend 10.96.0.1:80"},
		{
			name: "affinity timeout", field: "spec.sessionAffinityConfig.clientIP.timeoutSeconds", want: "affinity=3h0m0s",
			service: makeService("a", func(s *v1.Service) {
				s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
				s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](-1)}}
			}),
		},
		{name: "opt-out", field: "metadata.annotations[tandem-proxy.dev/fast-path]", want: "frontend 10.96.0.1:80", service: makeService("a", func(s *v1.Service) {
			s.Annotations = map[string]string{AnnotationFastPath: "no"}
		})},
		{name: "algorithm", field: "metadata.annotations[service.tandem-proxy.dev/lb-algorithm]", want: "frontend 10.96.0.1:80", service: makeService("a", annotations(AnnotationAlgorithm, "Maglev"))},
		{name: "algorithm unlike its alias", field: "metadata.annotations[service.cilium.io/lb-algorithm]", want: "maglev", service: makeService("a", annotations(AnnotationAlgorithm, "maglev", aliasAlgorithm, "random"))},
		{name: "table size", field: "metadata.annotations[service.tandem-proxy.dev/maglev-table-size]", want: "TCP maglev\n", service: makeService("a", annotations(AnnotationAlgorithm, "maglev", AnnotationTableSize, "1000"))},
		{name: "type", field: "metadata.annotations[service.tandem-proxy.dev/type]", want: "frontend 10.96.0.1:80", service: makeService("a", annotations(AnnotationType, "HostPort"))},
		{name: "type unlike its alias", field: "metadata.annotations[service.cilium.io/type]", want: "frontend 10.96.0.1:80", service: makeService("a", annotations(AnnotationType, "ClusterIP", aliasType, "NodePort"))},
		{name: "policy of ranges", field: "metadata.annotations[service.tandem-proxy.dev/src-ranges-policy]", want: "frontend 10.96.0.1:80", service: makeService("a", annotations(AnnotationRangesPolicy, "drop"), func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24"} })},
		{name: "action of ranges", field: "metadata.annotations[service.tandem-proxy.dev/src-ranges-action]", want: "frontend 10.96.0.1:80", service: makeService("a", annotations(AnnotationRangesAction, "deny"), func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24"} })},
		{
			name: "unknown annotation", field: "metadata.annotations[service.tandem-proxy.dev/lb-algorithms]", message: "did you mean service.tandem-proxy.dev/lb-algorithm?",
			want: "frontend 10.96.0.1:80", service: makeService("a", annotations(annotationPrefix+"lb-algorithms", "maglev")),
		},
		{name: "unknown annotation of a slice", field: "metadata.annotations[service.tandem-proxy.dev/wieght]", message: "did you mean service.tandem-proxy.dev/weight?", want: "backend 10.244.0.1:8080 cluster\n", slice: weighted(makeSlice("1", "10.244.0.1"), annotationPrefix+"wieght", "7")},
		{name: "weight that is no number", field: "metadata.annotations[service.tandem-proxy.dev/weight]", want: "backend 10.244.0.1:8080 cluster\n", slice: weighted(makeSlice("1", "10.244.0.1"), AnnotationWeight, "much")},
		{name: "negative weight", field: "metadata.annotations[service.tandem-proxy.dev/weight]", want: "backend 10.244.0.1:8080 cluster\n", slice: weighted(makeSlice("1", "10.244.0.1"), AnnotationWeight, "-1")},
		{name: "huge weight", field: "metadata.annotations[service.cilium.io/weight]", want: "backend 10.244.0.1:8080 cluster\n", slice: weighted(makeSlice("1", "10.244.0.1"), aliasWeight, "65536")},
		{name: "weight unlike its alias", field: "metadata.annotations[service.cilium.io/weight]", want: "weight=7\n", slice: func() *discoveryv1.EndpointSlice {
			return weighted(weighted(makeSlice("1", "10.244.0.1"), AnnotationWeight, "7"), aliasWeight, "8")
		}()},
		{name: "endpoint address", field: "endpoints[0].addresses[0]", slice: makeSlice("1", "10.244.0.x", "10.244.0.1"), want: "backend 10.244.0.1:8080"},
		{name: "endpoint with leading zeros", field: "endpoints[1].addresses[0]", slice: makeSlice("1", "10.244.0.2", "10.244.00.001", "10.244.0.03"), want: "backend 10.244.0.1:8080"},
		{name: "endpoint of another family", field: "endpoints[1].addresses[0]", want: "backend 10.244.0.1:8080", slice: func() *discoveryv1.EndpointSlice {
			s := makeSlice("1", "10.244.0.1", "fd00:10:244::1")
			s.AddressType = discoveryv1.AddressTypeIPv4
			return s
		}()},
		{name: "endpoint without address", field: "endpoints[0].addresses", want: "backend 10.244.0.1:8080", slice: func() *discoveryv1.EndpointSlice {
			s := makeSlice("1", "10.244.0.2", "10.244.0.1")
			s.Endpoints[0].Addresses = nil
			return s
		}()},
		{name: "target port 0", field: "ports[0].port", want: "backend 10.244.0.1:8080", slice: func() *discoveryv1.EndpointSlice {
			s := makeSlice("1", "10.244.0.1")
			s.Ports = append([]discoveryv1.EndpointPort{{Name: ptr.To("p"), Port: ptr.To[int32](0)}}, s.Ports...)
			return s
		}()},
		{name: "address type", field: "addressType", want: "empty=reject", slice: func() *discoveryv1.EndpointSlice {
			s := makeSlice("1", "10.244.0.1")
			s.AddressType = "MAC"
			return s
		}()},
		{name: "no service label", field: "metadata.labels[kubernetes.io/service-name]", want: "empty=reject", slice: func() *discoveryv1.EndpointSlice {
			s := makeSlice("1", "10.244.0.1")
			s.Labels = nil
			return s
		}()},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld()
			if test.service == nil {
				test.service = makeService("a")
			}
			w.tracker.UpdateService(test.service)
			if test.slice != nil {
				w.tracker.UpdateEndpointSlice(test.slice)
			}
			w.apply()
			if len(w.problems) != 1 || w.problems[0].Field != test.field || w.problems[0].Reason != ReasonInvalidObject || w.problems[0].Message == "" || !strings.Contains(w.problems[0].Message, test.message) {
				t.Errorf("problems: %+v", w.problems)
			}
			if !strings.Contains(w.text(), test.want) {
				t.Errorf("%q is not served:\n%s", test.want, w.text())
			}
		})
	}
}

// A tier that ends the connections of backends that are gone has to know all that are
// there; no new client gets one of those for it.
func TestKeepTCP(t *testing.T) {
	for keep, want := range map[bool]string{
		false: "  backend 10.244.0.1:8080 cluster\n",
		true:  "  backend 10.244.0.1:8080 cluster\n  backend 10.244.0.2:8080 retained terminating\n  backend 10.244.0.3:8080 retained\n",
	} {
		w := newWorld()
		w.table = NewTable(Facts{}, Policy{KeepTCP: keep})
		w.tracker.UpdateService(makeService("a"))
		w.tracker.UpdateEndpointSlice(makeSlice("1", "10.244.0.1", "10.244.0.2 notready terminating", "10.244.0.3 notready notserving"))
		w.apply()
		if _, got, _ := strings.Cut(w.text(), "ipv4/cluster\n"); got != want {
			t.Errorf("kept %v: got\n%swant\n%s", keep, got, want)
		}
	}
}

func TestFQDNSliceIsNoProblem(t *testing.T) {
	w := newWorld()
	s := makeSlice("1", "10.244.0.1")
	s.AddressType = discoveryv1.AddressTypeFQDN
	w.tracker.UpdateService(makeService("a"))
	w.tracker.UpdateEndpointSlice(s)
	w.apply()
	if !strings.Contains(w.text(), "empty=reject") || len(w.problems) > 0 {
		t.Errorf("%s %+v", w.text(), w.problems)
	}
}

// TestUnknownAnnotationsAreReportedBesides: they neither hide an invalid field, nor count as one.
func TestUnknownAnnotationsAreReportedBesides(t *testing.T) {
	annotations := map[string]string{}
	for i := range 100 {
		annotations[fmt.Sprintf("%sunknown-%02d", annotationPrefix, i)] = ""
	}
	service, slice := makeService("a"), makeSlice("1", "10.244.0.1", "bad")
	service.Annotations, slice.Annotations = annotations, annotations
	service.Spec.ExternalIPs = []string{"bad"}
	w := newWorld()
	w.tracker.UpdateService(service)
	w.tracker.UpdateEndpointSlice(slice)
	var got []string
	for _, p := range w.problems {
		got = append(got, p.Kind+" "+p.Field)
	}
	var want []string
	for _, object := range [][2]string{{"Service", "spec.externalIPs[0]"}, {"EndpointSlice", "endpoints[1].addresses[0]"}} {
		for i := range maxReported {
			want = append(want, fmt.Sprintf("%s metadata.annotations[%sunknown-%02d]", object[0], annotationPrefix, i))
		}
		want = append(want, object[0]+" metadata.annotations", object[0]+" "+object[1])
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// A hostile slice is named once or twice, not a million times.
func TestProblemsAreBounded(t *testing.T) {
	w := newWorld()
	s := makeSlice("1")
	for range 100000 {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{"bad"}})
	}
	w.tracker.UpdateEndpointSlice(s)
	if n := len(w.problems); n == 0 || n > maxReported+1 {
		t.Errorf("%d problems", n)
	}
	if last := w.problems[len(w.problems)-1]; !strings.Contains(last.Message, fmt.Sprintf("%d more", 100000-maxReported)) {
		t.Errorf("the rest goes unmentioned: %+v", last)
	}
}

// The older Service keeps an address that two claim; it passes on when that
// one is gone, whatever the order of events.
func TestConflicts(t *testing.T) {
	at := func(seconds int64) func(*v1.Service) {
		return func(s *v1.Service) { s.CreationTimestamp = metav1.Unix(seconds, 0) }
	}
	old, young, other := makeService("old", at(1)), makeService("young", at(2)), makeService("other", at(3), clusterIPs("10.96.0.2"))
	for _, order := range [][]*v1.Service{{old, young, other}, {young, old, other}, {young, other, old}} {
		w := newWorld()
		for _, s := range order {
			w.tracker.UpdateService(s)
			w.apply()
		}
		text := w.text()
		if !strings.Contains(text, "ns/young:p TCP\n  frontend 10.96.0.1:80 ClusterIP all=ipv4/cluster held-by=ns/old:p\n") ||
			strings.Count(text, "held-by") != 1 {
			t.Errorf("both there:\n%s", text)
		}
		w.tracker.DeleteService(w.nameOf(old))
		changes := w.apply()
		if strings.Contains(w.text(), "held-by") || len(changes) != 2 {
			t.Errorf("after the older one went: %d changes\n%s", len(changes), w.text())
		}
	}
}

func (w *world) nameOf(s *v1.Service) types.NamespacedName {
	return types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
}

// A table that gets events in random batches is equal to one that gets only the final
// state, and it reports exactly the changes.
func TestIncrementalEqualsFromScratch(t *testing.T) {
	seeds := uint64(300)
	if testing.Short() {
		seeds = 30
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(seed, 1))
		services, slices := map[string]*v1.Service{}, map[string]*discoveryv1.EndpointSlice{}
		w := newWorld()
		seen := map[uint32]string{}
		for range 40 {
			name := fmt.Sprintf("s%d", r.IntN(6))
			if r.IntN(2) == 0 {
				s := makeService(name, clusterIPs(fmt.Sprintf("10.96.0.%d", r.IntN(5))))
				s.CreationTimestamp = metav1.Unix(int64(r.IntN(2)), 0)
				for range r.IntN(10) {
					s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprintf("p%d", r.IntN(12)), Port: int32(1 + r.IntN(12))})
				}
				s.Spec.Ports = uniquePorts(s.Spec.Ports)
				if r.IntN(4) == 0 {
					delete(services, name)
					w.tracker.DeleteService(w.nameOf(s))
				} else {
					services[name] = s
					w.tracker.UpdateService(s)
				}
			} else {
				s := makeSlice(fmt.Sprintf("%s-%d", name, r.IntN(3)))
				s.Labels[discoveryv1.LabelServiceName] = name
				for range r.IntN(4) {
					s.Endpoints = append(s.Endpoints, makeSlice("x", fmt.Sprintf("10.244.0.%d zone=z%d", r.IntN(6), r.IntN(3))).Endpoints[0])
				}
				if r.IntN(4) == 0 {
					delete(slices, s.Name)
					w.tracker.DeleteEndpointSlice(s)
				} else {
					slices[s.Name] = s
					w.tracker.UpdateEndpointSlice(s)
				}
			}
			if r.IntN(3) != 0 {
				continue
			}
			told := map[uint32]bool{}
			for _, c := range w.apply() {
				if told[c.Index()] {
					t.Fatalf("seed %d: two changes of %d in one update", seed, c.Index())
				}
				told[c.Index()] = true
				if c.New == nil {
					delete(seen, c.Index())
					continue
				}
				if c.Old != nil && c.Old.String() == c.New.String() && c.Old.Created == c.New.Created {
					t.Fatalf("seed %d: reported as changed, but is not:\n%s", seed, c.New)
				}
				seen[c.Index()] = c.New.String()
			}
			for _, c := range w.table.All() {
				if seen[c.Index()] != c.New.String() {
					t.Fatalf("seed %d: changed unreported:\n%s\nwas\n%s", seed, c.New, seen[c.Index()])
				}
			}
			scratch := newWorld()
			for _, s := range services {
				scratch.tracker.UpdateService(s)
			}
			for _, s := range slices {
				scratch.tracker.UpdateEndpointSlice(s)
			}
			scratch.apply()
			if diff := cmp.Diff(byName(scratch), byName(w)); diff != "" {
				t.Fatalf("seed %d: %s", seed, diff)
			}
		}
	}
}

func uniquePorts(list []v1.ServicePort) (out []v1.ServicePort) {
	names, numbers := map[string]bool{}, map[int32]bool{}
	for _, p := range list {
		if !names[p.Name] && !numbers[p.Port] {
			names[p.Name], numbers[p.Port] = true, true
			out = append(out, p)
		}
	}
	return out
}

func byName(w *world) map[string]string {
	m := map[string]string{}
	for _, c := range w.table.All() {
		m[c.New.Name.String()] = c.New.String()
	}
	return m
}

// A change that is taken back before it was handed over never happened, and
// one is handed over once.
func TestTrackerHandsOverOnce(t *testing.T) {
	w := newWorld()
	a := makeService("a")
	if !w.tracker.UpdateService(a) {
		t.Error("a new Service is no work")
	}
	if n := len(w.apply()); n != 1 {
		t.Errorf("%d changes", n)
	}
	if w.tracker.UpdateService(a) || len(w.tracker.Take()) != 0 {
		t.Error("the same again is work")
	}
	w.tracker.UpdateService(makeService("a", localPolicy))
	w.tracker.UpdateEndpointSlice(makeSlice("1", "10.244.0.1"))
	w.tracker.UpdateService(a)
	w.tracker.DeleteEndpointSlice(makeSlice("1"))
	if n := len(w.tracker.Take()); n != 0 {
		t.Errorf("there and back is %d changes", n)
	}
	w.tracker.DeleteService(w.nameOf(a))
	w.tracker.UpdateService(a)
	if n := len(w.tracker.Take()); n != 0 {
		t.Errorf("gone and back is %d changes", n)
	}
}

// A list kept merged is the list sorted anew, whatever moves between slices.
func TestMergedIsSorted(t *testing.T) {
	to := target{"p", TCP, IPv4}
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 2))
		fresh := func(name string) *EndpointSlice {
			s := &EndpointSlice{Name: name, ports: []endpointPort{{"p", 80, TCP}}}
			if r.IntN(5) == 0 {
				s.ports = append(s.ports, endpointPort{"p", 79, TCP}, endpointPort{"q", 80, TCP})
			}
			for range r.IntN(8) {
				s.endpoints = append(s.endpoints, Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(40))}), flags: endpointFlags(r.IntN(16))})
			}
			slices.SortStableFunc(s.endpoints, func(a, b Endpoint) int { return a.Addr.Compare(b.Addr) })
			return s
		}
		var m merged
		var scratch []candidate
		byName := map[string]*EndpointSlice{}
		for step := range 40 {
			for range 1 + r.IntN(4) {
				name := fmt.Sprintf("s%02d", r.IntN(30))
				if r.IntN(3) == 0 {
					delete(byName, name)
				} else {
					byName[name] = fresh(name)
				}
			}
			now := slices.SortedFunc(maps.Values(byName), func(a, b *EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
			scratch = m.update(now, to, scratch[:0])
			want := collect(nil, now, to)
			if !slices.Equal(m.list, want) || m.duplicates != hasDuplicates(want) {
				t.Fatalf("seed %d step %d:\n%v\nwant\n%v", seed, step, m.list, want)
			}
		}
	}
}

// Readers may ask while the table changes.
func TestConcurrentReaders(t *testing.T) {
	w := newWorld()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				w.table.Explain(Flow{Source: netip.MustParseAddrPort("10.244.0.1:1"), Destination: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: TCP})
				_ = w.table.Dump()
				w.table.HealthChecks()
				w.table.NodeRules()
				w.table.Facts()
			}
		})
	}
	for i := range 300 {
		w.tracker.UpdateService(makeService("a", func(s *v1.Service) { s.Spec.ExternalIPs = []string{fmt.Sprintf("203.0.113.%d", i%9)} }))
		w.tracker.UpdateService(makeService(fmt.Sprint("b", i%3)))
		w.tracker.UpdateEndpointSlice(makeSlice("1", fmt.Sprintf("10.244.0.%d", 1+i%200)))
		w.table.SetFacts(Facts{Zone: fmt.Sprint("z", i%2)})
		w.table.SetPolicy(Policy{MasqueradeAll: i%3 == 0})
		w.table.Apply(w.tracker.TakeAll())
	}
	close(stop)
	wg.Wait()
}

func FuzzObjects(f *testing.F) {
	f.Add("10.96.0.1", "fd00::1", int32(80), "TCP", "p", "10.244.0.1", int32(8080), "IPv4", uint8(3))
	f.Add("", "None", int32(-1), "", "", "fe80::1%eth0", int32(0), "FQDN", uint8(255))
	f.Fuzz(func(t *testing.T, ip1, ip2 string, port int32, protocol, name, address string, target int32, family string, flags uint8) {
		w := newWorld()
		s := makeService("a", clusterIPs(ip1, ip2), ports(v1.ServicePort{Name: name, Port: port, Protocol: v1.Protocol(protocol)}))
		if flags&1 != 0 {
			localPolicy(s)
		}
		if flags&2 != 0 {
			s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, ip1, ip2)
		}
		slice := makeSlice("1")
		slice.AddressType = discoveryv1.AddressType(family)
		slice.Ports = []discoveryv1.EndpointPort{{Name: &name, Port: &target, Protocol: (*v1.Protocol)(&protocol)}, {}}
		slice.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{address, ip1}}, {}, {Addresses: []string{address}, Hints: &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: ip2}}}}}
		good := makeService("good", clusterIPs("10.96.99.99"))
		for _, o := range []*v1.Service{good, s} {
			w.tracker.UpdateService(o)
		}
		w.tracker.UpdateEndpointSlice(slice)
		w.apply()
		if !strings.Contains(w.text(), "ns/good:p TCP\n  frontend 10.96.99.99:80 ClusterIP all=ipv4/cluster\n") {
			t.Fatalf("another Service was lost:\n%s", w.text())
		}
	})
}
