// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/proxier"
)

// partlyMode leaves one Service to rules, and another to nothing.
type partlyMode struct{ servingMode }

func (partlyMode) serves(d *proxier.Decision, _ *proxier.Frontend, o proxier.Origin) serving {
	if d.Name.Name == "on-rules" || o != proxier.FromOutside {
		return serving{by: capabilities.ModeIPTables}
	}
	return serving{by: capabilities.ModeEBPF}
}

func (partlyMode) isUnplaced(d *proxier.Decision) bool { return d.Name.Name == "overflow" }

// TestOutsideCandidates: an uplink is probed in the families of its addresses, at frontends that programs serve there and that have an endpoint for
// clients outside.
func TestOutsideCandidates(t *testing.T) {
	at := netip.MustParseAddr
	facts := proxier.Facts{UplinkAddrs: []proxier.DeviceAddr{
		{Addr: at("10.0.0.1"), Device: "eth0"}, {Addr: at("10.0.0.2"), Device: "eth0"}, {Addr: at("192.168.0.1"), Device: "eth1"}, {Addr: at("fd00::1"), Device: "eth0"},
		{Addr: at("fe80::1"), Device: "eth1"},
	}}
	for _, a := range facts.UplinkAddrs {
		facts.LocalAddrs = append(facts.LocalAddrs, a.Addr)
	}
	policy := proxier.Policy{NodePorts: proxier.NodePortSelector{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.2/31"), netip.MustParsePrefix("fd00::/8")}}}
	table, tracker := proxier.NewTable(facts, policy), proxier.NewChangeTracker("node1", time.Time{}, nil)
	for i, name := range []string{"ports", "ingress", "sticky", "on-rules", "overflow", "local", "empty", "internal"} {
		s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
		s.Spec.ClusterIP = fmt.Sprintf("10.96.0.%d", i+1)
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP, fmt.Sprintf("fd00:96::%d", i+1)}
		s.Spec.Ports = []v1.ServicePort{{Name: "p", Port: 80, Protocol: v1.ProtocolTCP}}
		if name != "ingress" && name != "internal" {
			s.Spec.Type, s.Spec.Ports[0].NodePort = v1.ServiceTypeNodePort, int32(30000+i)
		}
		switch name {
		case "ingress":
			s.Spec.ExternalIPs = []string{"203.0.113.1"}
		case "sticky":
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		case "local":
			s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		}
		tracker.UpdateService(s)
		for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
			slice := &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name + string(family), Labels: map[string]string{discoveryv1.LabelServiceName: name}}, AddressType: family,
				Ports:     []discoveryv1.EndpointPort{{Name: ptr.To("p"), Port: ptr.To[int32](8080), Protocol: ptr.To(v1.ProtocolTCP)}},
				Endpoints: []discoveryv1.Endpoint{{Addresses: []string{map[bool]string{true: "10.244.0.1", false: "fd00:244::1"}[family == discoveryv1.AddressTypeIPv4]}, NodeName: ptr.To("node2")}},
			}
			if name != "empty" {
				tracker.UpdateEndpointSlice(slice)
			}
		}
	}
	table.Apply(tracker.Take())

	families := uplinkFamiliesOf(table) // family 0 is IPv4, 1 is IPv6
	if text := fmt.Sprint(families); text != "map[{eth0 0}:10.0.0.2 {eth0 1}:fd00::1 {eth1 0}:invalid IP]" {
		t.Errorf("families %s", text)
	}
	seen := map[uplinkFamily]map[string]bool{}
	for number := range uint64(50) {
		for e, list := range outsideCandidates(partlyMode{}, newRound(table, "node1", number), families) {
			var names []string
			for _, c := range list {
				names = append(names, c.decision.Name.Name)
			}
			if i := strings.Index(strings.Join(names, " "), "sticky"); i >= 0 && names[len(names)-1] != "sticky" {
				t.Errorf("affinity is not last: %v", names)
			}
			if seen[e] == nil {
				seen[e] = map[string]bool{}
			}
			seen[e][names[0]] = true
		}
	}
	if text := fmt.Sprint(seen); text != "map[{eth0 0}:map[ingress:true ports:true] {eth0 1}:map[ports:true] {eth1 0}:map[ingress:true]]" {
		t.Errorf("probed first: %s", text)
	}
}

// fakeProber answers by Service.
type fakeProber map[string]error

func (p fakeProber) Probe(_ string, d *proxier.Decision, _ *proxier.Frontend, _ netip.Addr) (netip.AddrPort, error) {
	if err, tried := p[d.Name.Name]; tried {
		return netip.MustParseAddrPort("10.244.0.1:8080"), err
	}
	return netip.AddrPort{}, nil
}

// TestProbeUplink: the first frontend that can be tried decides about the check, which names it. One family does not hide what another one says.
func TestProbeUplink(t *testing.T) {
	frontend := func(name string) candidate {
		d := &proxier.Decision{Name: proxier.ServicePortName{Port: "p", Protocol: proxier.TCP}}
		d.Name.Namespace, d.Name.Name = "ns", name
		return candidate{decision: d, frontend: &proxier.Frontend{Kind: proxier.NodePort, Addr: netip.MustParseAddrPort("0.0.0.0:30080")}}
	}
	node, list := netip.MustParseAddr("10.0.0.1"), []candidate{frontend("a"), frontend("b")}
	const led = "TCP 10.0.0.1:30080 of ns/%s:p leads to 10.244.0.1:8080"
	for _, test := range []struct {
		name string
		by   fakeProber
		ok   bool
		want string
	}{
		{"none can be tried", nil, true, "before"},
		{"the first", fakeProber{"a": nil, "b": errors.New("broken")}, true, "before; " + fmt.Sprintf(led, "a")},
		{"the second", fakeProber{"b": nil}, true, "before; " + fmt.Sprintf(led, "b")},
		{"one that fails", fakeProber{"a": errors.New("broken"), "b": nil}, false, "before; TCP 10.0.0.1:30080 of ns/a:p: broken"},
	} {
		c := health.Check{OK: true, Detail: "before"}
		if (uplinkFamily{}).probe(test.by, list, node, &c); c.OK != test.ok || c.Detail != test.want {
			t.Errorf("%s: %+v", test.name, c)
		}
	}
}
