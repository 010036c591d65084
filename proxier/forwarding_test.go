// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// TestDirect: which frontends have direct server return, where all are to have it. Other nodes have to know the frontend.
func TestDirect(t *testing.T) {
	own := netip.MustParseAddr("192.0.2.1")
	facts := Facts{NodeIPs: [Families]netip.Addr{own}, ExternalIPs: []netip.Addr{netip.MustParseAddr("203.0.113.7")}, LocalAddrs: []netip.Addr{own}}
	for _, test := range []struct {
		name     string
		change   func(*v1.Service)
		want     []string // addresses
		problems int
	}{
		{name: "all", change: func(*v1.Service) {}, want: []string{"10.96.0.10:80", "203.0.113.7:80", "0.0.0.0:30080"}},
		{name: "by Services alone", change: func(s *v1.Service) { s.Annotations = map[string]string{AnnotationForwarding: "snat"} }},
		{name: "policy Local", change: func(s *v1.Service) { s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal }, want: []string{"10.96.0.10:80"}},
		{
			name: "an address that this node alone has", change: func(s *v1.Service) { s.Status.Conditions = []metav1.Condition{{Type: nodereport.ConditionAdvertised}} },
			want: []string{"10.96.0.10:80", "203.0.113.7:80", "0.0.0.0:30080"},
		},
		{name: "selected nodes", change: func(s *v1.Service) { s.Annotations = map[string]string{AnnotationNode: ""} }},
		{
			name: "selected nodes, and asked for", problems: 1,
			change: func(s *v1.Service) {
				s.Annotations = map[string]string{AnnotationNodeSelector: "!edge", AnnotationForwarding: "dsr"}
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := &v1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web"},
				Spec:       v1.ServiceSpec{Type: v1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.10", Ports: []v1.ServicePort{{Port: 80, NodePort: 30080}}},
				Status:     v1.ServiceStatus{LoadBalancer: v1.LoadBalancerStatus{Ingress: []v1.LoadBalancerIngress{{IP: "203.0.113.7"}}}},
			}
			test.change(s)
			problems := 0
			tracker := NewChangeTracker("node1", time.Time{}, ReporterFunc(func(Problem) { problems++ }))
			table := NewTable(facts, Policy{Forwarding: DSR})
			tracker.UpdateService(s)
			var got []string
			for _, c := range table.Apply(tracker.Take()) {
				for i := range c.New.Frontends {
					if f := &c.New.Frontends[i]; f.Routes[FromOutside].Direct {
						got = append(got, f.Addr.String())
					}
				}
				if c.New.Direct() != (len(got) > 0) {
					t.Errorf("Direct is %v", c.New.Direct())
				}
			}
			if !slices.Equal(got, test.want) || problems != test.problems {
				t.Errorf("direct: %v, want %v; %d problems, want %d", got, test.want, problems, test.problems)
			}
		})
	}
	tracker, table := NewChangeTracker("node1", time.Time{}, nil), NewTable(facts, Policy{Forwarding: DSR})
	tracker.UpdatePod(makePod("web", "10.244.0.5", "8080=80"))
	for _, c := range table.Apply(tracker.Take()) {
		if c.New.Direct() || c.New.Balancing.Algorithm == Maglev {
			t.Errorf("a hostPort has direct server return: %s", c.New)
		}
	}
}
