// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// addresses are sorted, as in Facts.
func addresses(list ...string) (sorted []netip.Addr) {
	for _, a := range list {
		sorted = append(sorted, netip.MustParseAddr(a))
	}
	slices.SortFunc(sorted, netip.Addr.Compare)
	return sorted
}

// Filters are about the frontends that they may drop packets to. ClusterIPs stay with sockets.
func TestFilters(t *testing.T) {
	ports := func(list ...uint16) (ranges []inet.PortRange) {
		for _, p := range list {
			ranges = append(ranges, inet.PortRange{First: p, Last: p})
		}
		return ranges
	}
	prefixes := func(texts ...string) (list []netip.Prefix) {
		for _, text := range texts {
			list = append(list, netip.MustParsePrefix(text))
		}
		return list
	}
	const (
		clusterIP, clusterIP6 = "10.96.0.10:80 ClusterIP", "[fd00:10:96::10]:80 ClusterIP"
		loadBalancer          = "203.0.113.10:80 LoadBalancer"
		nodePort, nodePort6   = "0.0.0.0:30080 NodePort", "[::]:30080 NodePort"
	)
	for _, test := range []struct {
		filter inet.Match
		want   []string
	}{
		{inet.Match{}, []string{clusterIP, loadBalancer, nodePort, clusterIP6, nodePort6}},
		{inet.Match{Not: [Families]bool{IPv6: true}}, []string{clusterIP, loadBalancer, nodePort}},
		{inet.Match{Protocol: TCP, Ports: ports(30080)}, []string{nodePort, nodePort6}},
		{inet.Match{Protocol: UDP}, nil},
		{inet.Match{Ports: ports(81)}, nil},
		{inet.Match{Destinations: prefixes("203.0.113.0/24")}, []string{loadBalancer}},
		{inet.Match{Destinations: prefixes("172.18.0.0/16")}, []string{nodePort}},
		{inet.Match{Destinations: prefixes("127.0.0.0/8", "172.17.0.2/32")}, nil},
	} {
		w := newWorld()
		w.tracker.UpdateService(makeService("a", clusterIPs("10.96.0.10", "fd00:10:96::10"), func(s *v1.Service) {
			s.Spec.Type = v1.ServiceTypeLoadBalancer
			s.Spec.Ports[0].NodePort = 30080
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.10"}}
		}))
		w.apply()
		if _, decides := w.table.SetFacts(Facts{Zone: "z1", LocalAddrs: addresses("127.0.0.1", "172.18.0.1"), Filters: []Filter{{test.filter, "a rule"}}}); !decides {
			t.Errorf("%s: services are not decided anew", test.filter)
		}
		w.table.Apply(w.tracker.TakeAll())
		var left []string
		for _, c := range w.table.All() {
			for i := range c.New.Frontends {
				if f := &c.New.Frontends[i]; f.Left != nil {
					left = append(left, fmt.Sprintf("%s %s", f.Addr, f.Kind))
					if f.IsLeft() != f.Kind.External() || f.LeftOf(FromOutside) == "" || (f.LeftOf(FromPod) == "") == f.Kind.External() {
						t.Errorf("%s: %s", test.filter, f)
					}
				}
			}
		}
		if !slices.Equal(left, test.want) {
			t.Errorf("%s is about %q, want %q", test.filter, left, test.want)
		}
	}
}

// A firewall is about frontends whose backends on this node it does not accept packets to, and so is
// Policy.MasqueradeLocalBackends about those that masquerade clients outside.
func TestLocalBackends(t *testing.T) {
	for _, test := range []struct {
		name     string
		firewall Firewall
		policy   Policy
		backend  string
		want     []string // kinds
	}{
		{"none", Firewall{Not: [Families]bool{true, true}}, Policy{}, "10.244.0.1 node=node1", nil},
		{"a pod of this node", Firewall{}, Policy{}, "10.244.0.1 node=node1", []string{"ClusterIP", "NodePort"}},
		{"a pod of another node", Firewall{}, Policy{}, "10.244.0.1 node=node2", nil},
		{"this node", Firewall{}, Policy{}, "172.18.0.1 node=node1", nil},
		{"accepted", Firewall{Accepts: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}, Policy{}, "10.244.0.1 node=node1", nil},
		{"another one accepted", Firewall{Accepts: []netip.Prefix{netip.MustParsePrefix("10.244.0.2/32")}}, Policy{}, "10.244.0.1 node=node1", []string{"ClusterIP", "NodePort"}},
		{"the other family", Firewall{Not: [Families]bool{IPv4: true}}, Policy{}, "10.244.0.1 node=node1", nil},
		{"masqueraded", Firewall{Not: [Families]bool{true, true}}, Policy{MasqueradeLocalBackends: true}, "10.244.0.1 node=node1", []string{"NodePort"}},
		{"masqueraded elsewhere", Firewall{Not: [Families]bool{true, true}}, Policy{MasqueradeLocalBackends: true}, "10.244.0.1 node=node2", nil},
	} {
		w := newWorld()
		w.table.SetPolicy(test.policy)
		w.table.SetFacts(Facts{LocalAddrs: addresses("172.18.0.1"), Firewalls: []Firewall{test.firewall}})
		w.tracker.UpdateService(makeService("a", func(s *v1.Service) {
			s.Spec.Type = v1.ServiceTypeNodePort
			s.Spec.Ports[0].NodePort = 30080
		}))
		w.tracker.UpdateEndpointSlice(makeSlice("1", test.backend))
		w.apply()
		var left []string
		for _, c := range w.table.All() {
			for i := range c.New.Frontends {
				if f := &c.New.Frontends[i]; f.LeftOf(FromOutside) != "" {
					left = append(left, f.Kind.String())
					if f.IsLeft() || f.LeftOf(FromPod) != "" || f.LeftOf(FromHost) != "" {
						t.Errorf("%s: %s is left for sockets too", test.name, f)
					}
				}
			}
		}
		if !slices.Equal(left, test.want) {
			t.Errorf("%s: %q are left, want %q", test.name, left, test.want)
		}
	}
}

// A ClusterIP that a device of this node has is left to netfilter. Load balancer and external IPs are
// not: nodes have those on devices because they announce them, or because they are their own. Other
// addresses that come and go do not decide anything anew.
func TestClusterIPOnDevice(t *testing.T) {
	w := newWorld()
	w.tracker.UpdateService(makeService("a", clusterIPs("10.96.0.10", "fd00:10:96::10"), func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.ExternalIPs = []string{"172.18.0.1"}
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.10"}}
	}))
	w.apply()
	for _, step := range []struct {
		has     []netip.Addr
		decides bool
		left    int
	}{
		{addresses("172.18.0.1", "203.0.113.10"), false, 0},
		{addresses("172.18.0.1", "203.0.113.10", "10.96.0.10"), true, 1},
		{addresses("172.18.0.1", "10.96.0.10", "10.96.0.11"), false, 1},
		{addresses("172.18.0.1", "10.96.0.10", "fd00:10:96::10"), true, 2},
		{addresses("172.18.0.1", "fd00:10:96::10"), true, 1},
		{nil, true, 0},
	} {
		if _, decides := w.table.SetFacts(Facts{Zone: "z1", LocalAddrs: step.has}); decides != step.decides {
			t.Errorf("addresses %s: services are decided anew: %v", step.has, decides)
		}
		w.table.Apply(w.tracker.TakeAll())
		for line := range strings.Lines(w.text()) {
			held := slices.ContainsFunc(step.has, func(a netip.Addr) bool {
				return strings.Contains(line, netip.AddrPortFrom(a, 80).String()+" ClusterIP")
			})
			if held != strings.Contains(line, " left=outside,sockets") {
				t.Errorf("addresses %s: %s", step.has, line)
			}
		}
		if n := strings.Count(w.text(), " left="); n != step.left {
			t.Errorf("addresses %s: %d frontends are left to netfilter, want %d", step.has, n, step.left)
		}
	}
}

// TestLabelsOfNode: labels of the node have Services be decided anew only if a Service selects nodes by one that changed.
func TestLabelsOfNode(t *testing.T) {
	w := newWorld()
	w.tracker.UpdateService(makeService("a", clusterIPs("10.96.0.10"), func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.10"}}
		s.Annotations = map[string]string{AnnotationNodeSelector: "edge=yes"}
	}))
	w.tracker.UpdateService(makeService("b", clusterIPs("10.96.0.11")))
	w.apply()
	for i, step := range []struct {
		labels  map[string]string
		decides bool
		served  bool
	}{
		{map[string]string{"feature": "1"}, false, false},
		{map[string]string{"feature": "2", "edge": "yes"}, true, true},
		{map[string]string{"feature": "3", "edge": "yes"}, false, true},
		{nil, true, false},
	} {
		if _, decides := w.table.SetFacts(Facts{Zone: "z1", Labels: step.labels}); decides != step.decides {
			t.Errorf("step %d: services are decided anew: %v", i, decides)
		}
		w.table.Apply(w.tracker.TakeAll())
		if served := strings.Contains(w.text(), "203.0.113.10:80"); served != step.served {
			t.Errorf("step %d: the load balancer IP is served: %v", i, served)
		}
	}
}
