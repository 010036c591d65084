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

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
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
	at2 := func(a string) DeviceAddr { return DeviceAddr{Addr: netip.MustParseAddr(a), Device: "eth1"} }
	uplinks := []DeviceAddr{at2("10.0.0.1"), at2("192.168.1.5"), at2("fd00::5"), at2("fe80::1")}
	selecting := func(s *v1.Service) *v1.Service {
		s.Annotations = map[string]string{nodereport.AnnotationAddresses: "10.0.0.1"}
		return s
	}
	classed := service()
	classed.Spec.LoadBalancerClass = new(nodereport.Class)
	probed := service(nodereport.ConditionAdvertised, nodereport.ConditionProbing)
	probed.Status.LoadBalancer.Ingress = nil
	probed.Status.Conditions[1].Message = "198.51.100.2, 10.0.0.1"
	for _, test := range []struct {
		name    string
		service *v1.Service
		local   []netip.Addr
		uplinks []DeviceAddr
		want    string
	}{
		{"translated", service(nodereport.ConditionAdvertised), []netip.Addr{own}, nil, "10.0.0.1* 198.51.100.1 198.51.100.2"},
		{"on a device", service(nodereport.ConditionAdvertised), []netip.Addr{own, public}, nil, "198.51.100.1 198.51.100.2"},
		{"another load balancer", service("example.com/Other"), []netip.Addr{own}, uplinks, "198.51.100.1 198.51.100.2"},
		{"another address", service(nodereport.ConditionAdvertised), []netip.Addr{own}, uplinks, "10.0.0.1* 192.168.1.5* 198.51.100.1 198.51.100.2"},
		{"by its class", classed, []netip.Addr{own}, uplinks, "10.0.0.1* 192.168.1.5* 198.51.100.1 198.51.100.2"},
		{"addresses selected", selecting(service(nodereport.ConditionAdvertised)), []netip.Addr{own, public}, uplinks, "198.51.100.1 198.51.100.2"},
		{"addresses selected, translated", selecting(service(nodereport.ConditionAdvertised)), []netip.Addr{own}, uplinks, "10.0.0.1* 198.51.100.1 198.51.100.2"},
		{"not in the status yet", probed, []netip.Addr{own, public}, uplinks, "10.0.0.1 192.168.1.5* 198.51.100.2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			facts := Facts{NodeIPs: [Families]netip.Addr{own}, ExternalIPs: []netip.Addr{public}, LocalAddrs: test.local, UplinkAddrs: test.uplinks}
			table, tracker := NewTable(facts, Policy{}), NewChangeTracker("node1", time.Time{}, nil)
			tracker.UpdateService(test.service)
			at := func() string {
				var list []netip.Addr
				var texts []string
				for _, c := range table.All() {
					for _, f := range c.New.Frontends {
						if f.Kind == LoadBalancer {
							list = append(list, f.Addr.Addr())
							text := f.Addr.Addr().String()
							if f.Derived {
								text += "*"
							}
							texts = append(texts, text)
						}
					}
				}
				if !slices.IsSortedFunc(list, netip.Addr.Compare) {
					t.Errorf("not sorted: %v", list)
				}
				return strings.Join(texts, " ")
			}
			changes := tracker.Take()
			table.Apply(changes)
			if got := at(); got != test.want {
				t.Errorf("served at %s, want %s", got, test.want)
			}
			served := test.name != "another load balancer"
			if (len(table.AtNodes()) == 1) != served {
				t.Errorf("Services of ServiceLB: %v", table.AtNodes())
			}
			// The device gets the address later.
			facts.LocalAddrs = []netip.Addr{own, public}
			if _, again := table.SetFacts(facts); again != (served && len(test.local) == 1) {
				t.Errorf("Services are to be decided anew: %v", again)
			}
			facts.UplinkAddrs = append([]DeviceAddr{at2("10.0.0.0")}, test.uplinks...)
			if _, again := table.SetFacts(facts); again != served {
				t.Errorf("a device has another address, and Services are to be decided anew: %v", again)
			}
		})
	}
}

// TestDerivedAddresses: of two Services with one port, the one with an address in its status is served there, though the other one is
// older and derives the address.
func TestDerivedAddresses(t *testing.T) {
	first, second := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("192.168.1.5")
	facts := Facts{NodeIPs: [Families]netip.Addr{first}, LocalAddrs: []netip.Addr{first, second}, UplinkAddrs: []DeviceAddr{{first, "eth0"}, {second, "eth1"}}}
	service := func(name, ip string, at netip.Addr, created int64) *v1.Service {
		s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, CreationTimestamp: metav1.Unix(created, 0)}}
		s.Spec.Type, s.Spec.ClusterIP, s.Spec.ClusterIPs = v1.ServiceTypeLoadBalancer, ip, []string{ip}
		s.Spec.Ports = []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: at.String()}}
		s.Status.Conditions = []metav1.Condition{{Type: nodereport.ConditionAdvertised}}
		return s
	}
	for _, order := range [][]string{{"old", "young"}, {"young", "old"}} {
		table, tracker := NewTable(facts, Policy{}), NewChangeTracker("node1", time.Time{}, nil)
		holders := func() string {
			held := map[netip.Addr]string{}
			for _, d := range table.AtNodes() {
				for _, f := range d.Frontends {
					if f.Kind == LoadBalancer && f.Conflict == nil {
						held[f.Addr.Addr()] += d.Name.Name
					}
				}
			}
			return held[first] + " " + held[second]
		}
		for _, name := range order {
			if name == "old" {
				tracker.UpdateService(service("old", "10.96.0.1", first, 1))
			} else {
				tracker.UpdateService(service("young", "10.96.0.2", second, 2))
			}
			table.Apply(tracker.Take())
		}
		if got := holders(); got != "old young" {
			t.Errorf("%v: served by %q", order, got)
		}
		// The address leaves the status of the younger one.
		tracker.UpdateService(service("young", "10.96.0.2", first, 2))
		table.Apply(tracker.Take())
		if got := holders(); got != "old old" {
			t.Errorf("%v: then served by %q", order, got)
		}
	}
}
