// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestTranslatedNodeAddress: a Service at the nodes' own addresses is also served where packets arrive for a public address that a router
// translates, but not where a device has the public address, and no Service of another load balancer is.
func TestTranslatedNodeAddress(t *testing.T) {
	own, public := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("198.51.100.1")
	service := func(conditions ...string) *v1.Service {
		s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web"}}
		s.Spec.Type, s.Spec.ClusterIP, s.Spec.ClusterIPs = v1.ServiceTypeLoadBalancer, "10.96.0.1", []string{"10.96.0.1"}
		s.Spec.Ports = []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "198.51.100.1"}, {IP: "198.51.100.2"}}
		for _, c := range conditions {
			s.Status.Conditions = append(s.Status.Conditions, metav1.Condition{Type: c, Status: metav1.ConditionTrue})
		}
		return s
	}
	for _, test := range []struct {
		name    string
		service *v1.Service
		local   []netip.Addr
		want    string
	}{
		{"translated", service(ConditionAdvertised), []netip.Addr{own}, "10.0.0.1 198.51.100.1 198.51.100.2"},
		{"on a device", service(ConditionAdvertised), []netip.Addr{own, public}, "198.51.100.1 198.51.100.2"},
		{"another load balancer", service("example.com/Other"), []netip.Addr{own}, "198.51.100.1 198.51.100.2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			facts := Facts{NodeIPs: [Families]netip.Addr{own}, ExternalIPs: []netip.Addr{public}, LocalAddrs: test.local}
			table, tracker := NewTable(facts, Policy{}), NewChangeTracker("node1", time.Time{}, nil)
			tracker.UpdateService(test.service)
			at := func() string {
				var list []string
				for _, c := range table.All() {
					for _, f := range c.New.Frontends {
						if f.Kind == LoadBalancer {
							list = append(list, f.Addr.Addr().String())
						}
					}
				}
				if !slices.IsSorted(list) {
					t.Errorf("not sorted: %v", list)
				}
				return strings.Join(list, " ")
			}
			changes := tracker.Take()
			table.Apply(changes)
			if got := at(); got != test.want {
				t.Errorf("served at %s, want %s", got, test.want)
			}
			// The device gets the address later.
			facts.LocalAddrs = []netip.Addr{own, public}
			if _, again := table.SetFacts(facts); again != (len(test.local) == 1) {
				t.Errorf("Services are to be decided anew: %v", again)
			}
		})
	}
}
