// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// FuzzJSON hands over whatever an API server without validation could. Another
// Service is served as ever.
func FuzzJSON(f *testing.F) {
	service := makeService("a", clusterIPs("10.96.0.2", "fd00:10:96::2"), localPolicy, func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.Ports[0].NodePort = 30080
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		s.Spec.HealthCheckNodePort = 30081
		s.Spec.ExternalIPs = []string{"203.0.113.1", "2001:db8::1", "203.0.113.1", "0.0.0.0", "10.96.0.2", ""}
		s.Spec.LoadBalancerSourceRanges = []string{" 198.51.100.0/24", "0.0.0.0/0", "x", "2001:db8::/32"}
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.2"}, {IP: "203.0.113.3", IPMode: ptr.To(v1.LoadBalancerIPModeProxy)}, {Hostname: "x"}}
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](1)}}
	})
	slice := makeSlice("1", "10.244.0.1 node=node1 zone=z1 hint=node1", "10.244.0.2 notready terminating", "10.244.0.1 terminating")
	add := func(s *v1.Service, e *discoveryv1.EndpointSlice) {
		a, errA := json.Marshal(s)
		b, errB := json.Marshal(e)
		if errA != nil || errB != nil {
			f.Fatal(errA, errB)
		}
		f.Add(a, b)
	}
	add(service, slice)
	add(makeService("a"), makeSlice("2", "fd00:10:244::1 node=node1"))
	f.Add([]byte(`{"spec":{"clusterIP":"10.96.0.9","ports":[{},{"port":70000},{"port":1,"nodePort":-1}]}}`), []byte(`{"endpoints":[{}],"ports":[{}]}`))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var s v1.Service
		var e discoveryv1.EndpointSlice
		if json.Unmarshal(a, &s) != nil || json.Unmarshal(b, &e) != nil || s.Name == "good" && s.Namespace == "ns" {
			return
		}
		w := newWorld()
		w.table.SetFacts(Facts{Zone: "z1", Pods: Detector{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/24")}}})
		good := makeService("good", clusterIPs("10.97.99.99"))
		w.tracker.UpdateService(good)
		before := w.apply()
		w.tracker.UpdateService(&s)
		w.tracker.UpdateEndpointSlice(&e)
		changes := w.apply()
		dump := w.table.Dump()
		if d := w.table.rows[before[0].Index()].decision; !strings.Contains(dump, "ns/good:p TCP\n  frontend 10.97.99.99:80 ClusterIP") ||
			d.Frontends[0].Conflict != nil && d.Frontends[0].Conflict.Name == "good" {
			t.Fatalf("another Service was lost:\n%s", dump)
		}
		for _, c := range changes {
			if c.New == nil {
				continue
			}
			for i := range c.New.Frontends {
				to := c.New.Frontends[i].Addr
				x := w.table.Explain(Flow{Source: netip.AddrPortFrom(to.Addr(), 1), Destination: to, Protocol: c.New.Name.Protocol})
				if c.New.Frontends[i].Kind != NodePort && x.Decision == nil {
					t.Fatalf("%s is not found:\n%s", to, dump)
				}
			}
		}
		w.tracker.DeleteService(w.nameOf(&s))
		w.tracker.DeleteEndpointSlice(&e)
		w.tracker.DeleteService(w.nameOf(good))
		w.apply()
		if w.table.Len() != 0 || len(w.table.owner) != 0 || len(w.table.contested) != 0 || len(w.table.health) != 0 || len(w.tracker.entries) != 0 {
			t.Fatalf("left behind: %d ports, %d addresses, %d disputes, %d checks, %d entries", w.table.Len(), len(w.table.owner),
				len(w.table.contested), len(w.table.health), len(w.tracker.entries))
		}
	})
}

// Addresses times ports are bounded, and named a few times, not thousands.
func TestManyExternalIPs(t *testing.T) {
	w := newWorld()
	s := makeService("a")
	s.Spec.Ports = nil
	for i := range 1000 {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(1 + i)})
	}
	s.Spec.ExternalIPs = manyIPs(20000)
	w.tracker.UpdateService(s)
	frontends := 0
	for _, c := range w.apply() {
		frontends += len(c.New.Frontends)
	}
	if frontends < 60000 || frontends > maxFrontends+1000 {
		t.Errorf("%d frontends", frontends)
	}
	if n := len(w.problems); n == 0 || n > maxReported+1 {
		t.Errorf("%d problems", n)
	}
}

func manyIPs(n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprintf("11.%d.%d.%d", i>>16, i>>8&255, i&255))
	}
	return list
}

// Services that fight for tens of thousands of addresses cost as much as they
// are large, not the square of it.
func TestManyConflicts(t *testing.T) {
	addresses := 60000
	if testing.Short() {
		addresses = 6000
	}
	w := newWorld()
	for i := range 3 {
		s := makeService(fmt.Sprint("s", i), clusterIPs(fmt.Sprintf("10.96.0.%d", 1+i)))
		s.CreationTimestamp = metav1.Unix(int64(10-i), 0)
		s.Spec.ExternalIPs = manyIPs(addresses)
		w.tracker.UpdateService(s)
		w.apply()
	}
	d := w.table.rows[w.table.owner[keyOf(netip.MustParseAddrPort("11.0.0.1:80"), TCP)]].decision
	if d.Name.Name != "s2" || len(w.table.contested) != addresses {
		t.Errorf("%s serves, %d disputes", d.Name, len(w.table.contested))
	}
	for i := range 3 {
		w.tracker.DeleteService(w.nameOf(makeService(fmt.Sprint("s", i))))
	}
	w.apply()
	if len(w.table.owner) != 0 || len(w.table.contested) != 0 {
		t.Errorf("%d addresses and %d disputes left behind", len(w.table.owner), len(w.table.contested))
	}
}

// Ten thousand Services that want the same address.
func TestManyRivals(t *testing.T) {
	w := newWorld()
	for i := range 10000 {
		w.tracker.UpdateService(makeService(fmt.Sprint("s", i)))
	}
	served := 0
	for _, c := range w.apply() {
		if c.New.Frontends[0].Conflict == nil {
			served++
		}
	}
	if served != 1 {
		t.Errorf("%d serve it", served)
	}
}

// A slice of one address, ten thousand times.
func TestManyDuplicates(t *testing.T) {
	w := newWorld()
	w.tracker.UpdateService(makeService("a"))
	for i := range 10 {
		s := makeSlice(fmt.Sprint(i))
		for range 10000 {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.244.0.1"}, Conditions: discoveryv1.EndpointConditions{Terminating: ptr.To(true)}})
		}
		w.tracker.UpdateEndpointSlice(s)
		w.apply()
	}
	d := w.table.All()[0].New
	if len(d.Backends) != 1 || !d.Backends[0].Terminating {
		t.Errorf("%d backends", len(d.Backends))
	}
}
