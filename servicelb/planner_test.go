// SPDX-License-Identifier: Apache-2.0

package servicelb

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// history is a cluster that changes at random. Objects are replaced, as in a cache.
type history struct {
	*rand.Rand
	services []*v1.Service
	nodes    []*v1.Node
	reports  map[string]*nodereport.Report
	pods     map[string][]HostPort
	late     bool // what is not served is overdue
	listens  bool
	local    []string // nodes with an endpoint
}

func newHistory(seed uint64) *history {
	h := &history{Rand: rand.New(rand.NewPCG(seed, 1)), reports: map[string]*nodereport.Report{}, pods: map[string][]HostPort{}, local: []string{"n0"}}
	for i := range 4 {
		h.nodes = append(h.nodes, node(fmt.Sprintf("n%d", i), fmt.Sprintf("10.0.0.%d fd00::%d", i, i)))
	}
	return h
}

func (h *history) objects() Objects {
	return Objects{
		Services: h.services, Nodes: h.nodes,
		Slices: func(of types.NamespacedName) []*discoveryv1.EndpointSlice {
			list := endpoints(h.local...)(of)
			for i := range list[0].Endpoints {
				list[0].Endpoints[i].Addresses = []string{"10.0.0.0"}
			}
			list[0].Ports = []discoveryv1.EndpointPort{{Port: new(int32(80))}}
			return list
		},
		Report:    func(n string) *nodereport.Report { return h.reports[n] },
		HostPorts: func(n string) []HostPort { return h.pods[n] },
		Listens:   func(Claim) bool { return h.listens },
		Overdue:   func(*v1.Service, netip.Addr) bool { return h.late },
	}
}

// step changes something.
func (h *history) step(last []Outcome) {
	n := fmt.Sprintf("n%d", h.IntN(len(h.nodes)))
	switch h.IntN(12) {
	case 0: // a Service comes
		name := fmt.Sprintf("s%d", h.IntN(8))
		if slices.ContainsFunc(h.services, func(s *v1.Service) bool { return s.Name == name }) {
			return
		}
		s := service(name, []int32{80 + int32(h.IntN(4))}, families(v1.IPv4Protocol, v1.IPv6Protocol))
		if h.IntN(4) == 0 {
			eTPLocal(s)
		}
		if h.IntN(4) == 0 {
			s.Annotations[AnnotationAddresses] = "10.0.0.0/31, eth0"
		}
		h.services = append(h.services, s)
	case 1: // one goes
		if len(h.services) > 0 {
			at := h.IntN(len(h.services))
			h.services = slices.Delete(slices.Clone(h.services), at, at+1)
		}
	case 2, 3, 4: // what was decided is written
		for _, o := range last {
			at := slices.IndexFunc(h.services, func(s *v1.Service) bool { return s.Name == o.Service.Name })
			if at >= 0 && h.IntN(2) == 0 {
				h.services[at] = h.services[at].DeepCopy()
				h.services[at].Status.LoadBalancer.Ingress = o.Ingress
			}
		}
	case 5:
		at := h.IntN(len(h.nodes))
		h.nodes[at] = h.nodes[at].DeepCopy()
		h.nodes[at].Status.Conditions[0].Status = []v1.ConditionStatus{v1.ConditionTrue, v1.ConditionTrue, v1.ConditionFalse}[h.IntN(3)]
	case 6: // a node has no report
		delete(h.reports, n)
	case 7, 8, 9: // its report changes: ports served, and listening processes
		r := &nodereport.Report{Services: map[string]*nodereport.Service{}}
		if was := h.reports[n]; was != nil {
			r.Addresses, r.Listeners, r.Services = was.Addresses, was.Listeners, maps.Clone(was.Services)
		}
		for _, s := range h.services {
			p := nodereport.Port{Protocol: "TCP", Port: uint16(s.Spec.Ports[0].Port)}
			for _, a := range []string{"10.0.0." + n[1:], "fd00::" + n[1:]} {
				if h.IntN(10) > 0 {
					p.Served = append(p.Served, nodereport.Served{Address: netip.MustParseAddr(a), Direct: h.IntN(2) == 0, Fault: []string{9: "broken"}[h.IntN(10)]})
				}
			}
			if h.IntN(4) > 0 {
				r.Services["ns/"+s.Name] = &nodereport.Service{Ports: []nodereport.Port{p}}
			}
		}
		switch h.IntN(6) {
		case 0:
			r.Listeners = []nodereport.Listener{{Protocol: "TCP", Address: netip.IPv4Unspecified(), Port: 80}}
		case 1:
			r.Listeners = nil
		case 2:
			r.Addresses = []nodereport.Address{{Interface: "eth0", Address: netip.MustParseAddr("192.168.0." + n[1:])}}
		}
		h.reports[n] = r
	case 10:
		if h.pods[n] = nil; h.IntN(2) == 0 {
			h.pods[n] = []HostPort{{81, v1.ProtocolTCP, netip.IPv4Unspecified(), "ns/pod"}}
		}
	case 11:
		h.late, h.listens, h.local = h.IntN(2) == 0, h.IntN(2) == 0, []string{n}
	}
}

// TestPlanner: whatever happened before, a Planner decides as one that remembers nothing, and it remembers something.
func TestPlanner(t *testing.T) {
	remembered := 0
	for seed := range uint64(300) {
		h, p := newHistory(seed), new(Planner)
		var last []Outcome
		for step := range 100 {
			h.step(last)
			last = p.Decide(h.objects(), Options{})
			remembered += len(p.settled)
			if got, want := text(last), text(Decide(h.objects(), Options{})); got != want {
				t.Fatalf("seed %d, step %d: decided\n%s\nand from scratch\n%s", seed, step, got, want)
			}
		}
	}
	if remembered < 1000 {
		t.Errorf("in all steps, %d Services were settled", remembered)
	}
}
