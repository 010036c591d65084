// SPDX-License-Identifier: Apache-2.0

package servicelb

import (
	"fmt"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// BenchmarkDecide decides about 1,000 Services on 50 nodes that report all of them as served.
func BenchmarkDecide(b *testing.B) {
	const services, nodes = 1000, 50
	o := Objects{Slices: endpoints()}
	reports := map[string]*nodereport.Report{}
	for n := range nodes {
		a := netip.AddrFrom4([4]byte{10, 0, 0, byte(n)})
		o.Nodes = append(o.Nodes, node(fmt.Sprintf("node-%d", n), a.String()))
		r := &nodereport.Report{Services: map[string]*nodereport.Service{}}
		for i := range services {
			r.Services[fmt.Sprintf("ns/service-%d", i)] = &nodereport.Service{Ports: []nodereport.Port{{Protocol: "TCP", Port: uint16(10000 + i), Served: []nodereport.Served{{Address: a}}}}}
		}
		reports[fmt.Sprintf("node-%d", n)] = r
	}
	for i := range services {
		s := service(fmt.Sprintf("service-%d", i), []int32{int32(10000 + i)})
		for n := range nodes {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: fmt.Sprintf("10.0.0.%d", n)})
		}
		o.Services = append(o.Services, s)
	}
	o.Report = func(node string) *nodereport.Report { return reports[node] }
	for name, p := range map[string]func() *Planner{"scratch": func() *Planner { return new(Planner) }, "unchanged": func() func() *Planner { p := new(Planner); return func() *Planner { return p } }()} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if list := p().Decide(o, Options{}); len(list) != services || len(list[0].Ingress) != nodes {
					b.Fatalf("%d Services, %+v", len(list), list[0])
				}
			}
		})
	}
}
