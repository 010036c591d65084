// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// overrides reads lines like "10.244.0.1:8080 quarantined ns/a", sorted as facts have them.
func overrides(t *testing.T, lines ...string) (list []BackendOverride) {
	t.Helper()
	for _, line := range lines {
		words := strings.Fields(line)
		var o BackendOverride
		if at, err := netip.ParseAddrPort(words[0]); err == nil {
			o.Addr, o.Port = at.Addr(), at.Port()
		} else {
			o.Addr = netip.MustParseAddr(words[0])
		}
		if err := o.State.UnmarshalText([]byte(words[1])); err != nil {
			t.Fatal(err)
		}
		if len(words) > 2 {
			namespace, name, _ := strings.Cut(words[2], "/")
			o.Service = types.NamespacedName{Namespace: namespace, Name: name}
		}
		list = append(list, o)
	}
	slices.SortFunc(list, func(a, b BackendOverride) int { return a.Compare(&b) })
	return list
}

// TestOverrides: what operators say of backends decides, and Explain and the health check agree.
func TestOverrides(t *testing.T) {
	for _, tt := range []struct {
		name      string
		endpoints []string
		say       []string
		want      string // backends with their sets, then reasons out
		reasons   []string
		health    int // endpoints of this node
	}{
		{"nothing", []string{"10.244.0.1", "10.244.0.2"}, nil, "1 2", []string{"ready", "ready"}, 0},
		{"drained", []string{"10.244.0.1", "10.244.0.2"}, []string{"10.244.0.1 maintenance"}, "2", []string{"maintenance", "ready"}, 0},
		{"all are drained", []string{"10.244.0.1"}, []string{"10.244.0.1:8080 maintenance"}, "", []string{"maintenance"}, 0},
		{"drained, though only terminating ones are left", []string{"10.244.0.1", "10.244.0.2 notready terminating"}, []string{"10.244.0.1 maintenance"}, "2", []string{"maintenance", "still-serving"}, 0},
		{"quarantined", []string{"10.244.0.1", "10.244.0.2"}, []string{"10.244.0.1 quarantined"}, "2", []string{"quarantined", "ready"}, 0},
		{"all are quarantined", []string{"10.244.0.1", "10.244.0.2"}, []string{"10.244.0.1 quarantined", "10.244.0.2 quarantined"}, "1 2", []string{"last-resort", "last-resort"}, 0},
		{"quarantined, and the other one is not ready", []string{"10.244.0.1", "10.244.0.2 notready notserving"}, []string{"10.244.0.1 quarantined"}, "1", []string{"last-resort", "not-ready"}, 0},
		{"quarantined, and the other one terminates", []string{"10.244.0.1", "10.244.0.2 notready terminating"}, []string{"10.244.0.1 quarantined"}, "2", []string{"quarantined", "still-serving"}, 0},
		{"quarantined, and the other one is drained", []string{"10.244.0.1", "10.244.0.2"}, []string{"10.244.0.1 quarantined", "10.244.0.2 maintenance"}, "1", []string{"last-resort", "maintenance"}, 0},
		{"quarantined and not ready", []string{"10.244.0.1 notready"}, []string{"10.244.0.1 quarantined"}, "", []string{"not-ready"}, 0},
		{"terminating and quarantined", []string{"10.244.0.1 notready terminating"}, []string{"10.244.0.1 quarantined"}, "1", []string{"last-resort"}, 0},
		{"another port", []string{"10.244.0.1"}, []string{"10.244.0.1:8081 maintenance"}, "1", []string{"ready"}, 0},
		{"another address", []string{"10.244.0.2", "10.244.0.3"}, []string{"10.244.0.1 maintenance", "fd00::1 maintenance"}, "2 3", []string{"ready", "ready"}, 0},
		{"another Service", []string{"10.244.0.1"}, []string{"10.244.0.1 maintenance ns/b"}, "1", []string{"ready"}, 0},
		{"the Service counts", []string{"10.244.0.1", "10.244.0.2"}, []string{"10.244.0.1 quarantined ns/a", "10.244.0.1:8080 maintenance", "10.244.0.2 maintenance"}, "1", []string{"last-resort", "maintenance"}, 0},
		{"then the port", []string{"10.244.0.1"}, []string{"10.244.0.1:8080 quarantined", "10.244.0.1 maintenance"}, "1", []string{"last-resort"}, 0},
		{"health check", []string{"10.244.0.1 node=node1", "10.244.0.2 node=node1", "10.244.0.3 node=node1"}, []string{"10.244.0.1 quarantined", "10.244.0.2 maintenance"}, "3", []string{"quarantined", "maintenance", "ready"}, 1},
	} {
		for _, many := range []bool{false, true} {
			t.Run(fmt.Sprint(tt.name, ", many=", many), func(t *testing.T) {
				w := newWorld()
				w.tracker.UpdateService(makeService("a", func(s *v1.Service) {
					s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = v1.ServiceTypeLoadBalancer, v1.ServiceExternalTrafficPolicyLocal, 32000
				}))
				w.tracker.UpdateEndpointSlice(makeSlice("a-1", tt.endpoints...))
				if many { // so that the table keeps a sorted list
					rest := make([]string, mergeFrom)
					for i := range rest {
						rest[i] = fmt.Sprintf("10.245.%d.%d notready notserving", i/250, 1+i%250)
					}
					w.tracker.UpdateEndpointSlice(makeSlice("a-2", rest...))
				}
				w.apply()
				before, facts := w.text(), w.table.Facts()
				facts.Overrides = overrides(t, tt.say...)
				if _, decides := w.table.SetFacts(facts); decides != (len(tt.say) > 0) {
					t.Fatalf("Services are decided anew: %v", decides)
				}
				w.table.Apply(w.tracker.TakeAll())

				cluster := SetOf(IPv4, false)
				var got []string
				for _, b := range w.table.All()[0].New.Backends {
					if b.In(cluster) {
						got = append(got, strings.TrimPrefix(b.Addr.Addr().String(), "10.244.0."))
					}
				}
				if text := strings.Join(got, " "); text != tt.want {
					t.Errorf("backends %q, want %q", text, tt.want)
				}
				e := w.table.Explain(Flow{Source: netip.MustParseAddrPort("10.244.0.9:1"), Destination: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: TCP})
				for i, why := range tt.reasons {
					if j := e.Endpoints[i]; j.Cluster.String() != why {
						t.Errorf("%s: %s, want %s", j.Addr, j.Cluster, why)
					}
				}
				if h := w.table.HealthChecks()[types.NamespacedName{Namespace: "ns", Name: "a"}]; h.Ready[IPv4] != tt.health {
					t.Errorf("the health check counts %d, want %d", h.Ready[IPv4], tt.health)
				}

				facts.Overrides = nil
				w.table.SetFacts(facts)
				w.table.Apply(w.tracker.TakeAll())
				if after := w.text(); after != before {
					t.Errorf("without overrides\n%swas\n%s", after, before)
				}
			})
		}
	}
}
