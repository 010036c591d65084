// SPDX-License-Identifier: Apache-2.0

package servicelb

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// node has addresses: internal ones, and after "/" external ones.
func node(name, addresses string, edits ...func(*v1.Node)) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	n.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}}
	internal, external, _ := strings.Cut(addresses, "/")
	for kind, list := range map[v1.NodeAddressType]string{v1.NodeInternalIP: internal, v1.NodeExternalIP: external} {
		for _, a := range strings.Fields(list) {
			n.Status.Addresses = append(n.Status.Addresses, v1.NodeAddress{Type: kind, Address: a})
		}
	}
	for _, edit := range edits {
		edit(n)
	}
	return n
}

func labelled(key, value string) func(*v1.Node) { return func(n *v1.Node) { n.Labels[key] = value } }

func notReady(n *v1.Node) { n.Status.Conditions[0].Status = v1.ConditionUnknown }

// service wants TCP ports.
func service(name string, ports []int32, edits ...func(*v1.Service)) *v1.Service {
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), Labels: map[string]string{}, Annotations: map[string]string{}}}
	s.Spec.Type, s.Spec.LoadBalancerClass, s.Spec.IPFamilies = v1.ServiceTypeLoadBalancer, new(Class), []v1.IPFamily{v1.IPv4Protocol}
	for _, p := range ports {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Port: p, Protocol: v1.ProtocolTCP})
	}
	for _, edit := range edits {
		edit(s)
	}
	return s
}

func annotated(key, value string) func(*v1.Service) {
	return func(s *v1.Service) { s.Annotations[key] = value }
}

func created(after time.Duration) func(*v1.Service) {
	return func(s *v1.Service) { s.CreationTimestamp = metav1.NewTime(time.Unix(1e9, 0).Add(after)) }
}

func pool(value string) func(*v1.Service) {
	return func(s *v1.Service) { s.Labels[LabelPool] = value }
}

func families(list ...v1.IPFamily) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.IPFamilies = list }
}

func eTPLocal(s *v1.Service) {
	s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
}

// endpoints are slices with an endpoint on each node; those whose names end in "-" are not ready, and in "~" terminate and serve.
func endpoints(nodes ...string) func(types.NamespacedName) []*discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4}
	for _, n := range nodes {
		e := discoveryv1.Endpoint{NodeName: new(strings.TrimRight(n, "-~"))}
		switch n[len(n)-1] {
		case '-':
			e.Conditions.Ready = new(false)
		case '~':
			e.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return func(types.NamespacedName) []*discoveryv1.EndpointSlice { return []*discoveryv1.EndpointSlice{s} }
}

// eachFamily has an endpoint of each family, IPv4 on the first node.
func eachFamily(v4, v6 string) func(types.NamespacedName) []*discoveryv1.EndpointSlice {
	return func(n types.NamespacedName) []*discoveryv1.EndpointSlice {
		list := append(endpoints(v4)(n), endpoints(v6)(n)...)
		list[1].AddressType = discoveryv1.AddressTypeIPv6
		return list
	}
}

// text is "name: addresses; codes".
func text(list []Outcome) string {
	var lines []string
	for _, o := range list {
		line := o.Service.Name + ":"
		for _, i := range o.Ingress {
			line += " " + i.IP
		}
		for _, a := range o.Probing {
			line += " ?" + a.String()
		}
		for _, a := range o.LeftOut {
			line += " -" + a.String()
		}
		if o.Direct {
			line += " direct"
		}
		for _, r := range o.Reasons {
			line += " " + string(r.Code)
		}
		for _, r := range o.Warnings {
			line += fmt.Sprintf(" (%s)", r.Code)
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

func TestDecide(t *testing.T) {
	two := []*v1.Node{node("a", "10.0.0.1 fd00::1"), node("b", "10.0.0.2 fd00::2")}
	for _, test := range []struct {
		name string
		Objects
		opts Options
		want string
	}{
		{"every node", Objects{Nodes: two, Services: []*v1.Service{service("web", []int32{80})}}, Options{}, "web: 10.0.0.1 10.0.0.2"},
		{"families and their order", Objects{Nodes: two, Services: []*v1.Service{service("web", []int32{80}, families(v1.IPv6Protocol, v1.IPv4Protocol))}}, Options{}, "web: fd00::1 fd00::2 10.0.0.1 10.0.0.2"},
		{"by value, not by text", Objects{Nodes: []*v1.Node{node("a", "10.0.0.10"), node("b", "10.0.0.9")}, Services: []*v1.Service{service("web", []int32{80})}}, Options{}, "web: 10.0.0.9 10.0.0.10"},
		{"not Ready", Objects{Nodes: []*v1.Node{two[0], node("b", "10.0.0.2", notReady)}, Services: []*v1.Service{service("web", []int32{80})}}, Options{}, "web: 10.0.0.1"},
		{"proxy gone", Objects{Nodes: two, Healthy: func(n string) bool { return n == "b" }, Services: []*v1.Service{service("web", []int32{80})}}, Options{}, "web: 10.0.0.2"},
		{"external addresses alone, once there are any", Objects{Nodes: []*v1.Node{two[0], node("b", "10.0.0.2/198.51.100.2")}, Services: []*v1.Service{service("web", []int32{80})}}, Options{}, "web: 198.51.100.2"},
		{"addresses of each node", Objects{Nodes: []*v1.Node{two[0], node("b", "10.0.0.2/198.51.100.2")}, Services: []*v1.Service{service("web", []int32{80})}}, Options{EachNode: true}, "web: 10.0.0.1 198.51.100.2"},
		{"an address of two nodes", Objects{Nodes: []*v1.Node{node("a", "10.0.0.1"), node("b", "10.0.0.1")}, Services: []*v1.Service{service("web", []int32{80})}}, Options{}, "web: 10.0.0.1"},
		{"allow-list", Objects{Nodes: []*v1.Node{two[0], node("b", "10.0.0.2", labelled(LabelEnable, "true"))}, Services: []*v1.Service{service("web", []int32{80})}}, Options{}, "web: 10.0.0.2"},
		{"an allow-list that admits none", Objects{Nodes: []*v1.Node{two[0], node("b", "10.0.0.2", labelled(LabelEnable, "false"))}, Services: []*v1.Service{service("web", []int32{80})}}, Options{}, "web: NoNodes"},
		{"pool", Objects{Nodes: []*v1.Node{two[0], node("b", "10.0.0.2", labelled(LabelPool, "x"))}, Services: []*v1.Service{service("web", []int32{80}, pool("x"))}}, Options{}, "web: 10.0.0.2"},
		{"pool without nodes", Objects{Nodes: two, Services: []*v1.Service{service("web", []int32{80}, pool("x"))}}, Options{}, "web: NoNodes"},
		{"local endpoints", Objects{Nodes: two, Slices: endpoints("b"), Services: []*v1.Service{service("web", []int32{80}, eTPLocal)}}, Options{}, "web: 10.0.0.2"},
		{"a local endpoint that terminates", Objects{Nodes: two, Slices: endpoints("a~", "b-"), Services: []*v1.Service{service("web", []int32{80}, eTPLocal)}}, Options{}, "web: 10.0.0.1"},
		{"no local endpoint", Objects{Nodes: two, Slices: endpoints("b-"), Services: []*v1.Service{service("web", []int32{80}, eTPLocal)}}, Options{}, "web: NoEndpoints"},
		{"local endpoints of one family", Objects{Nodes: two, Slices: endpoints("a"), Services: []*v1.Service{service("web", []int32{80}, eTPLocal, families(v1.IPv4Protocol, v1.IPv6Protocol))}}, Options{}, "web: 10.0.0.1 NoEndpoints"},
		{"local endpoints of families on different nodes", Objects{Nodes: two, Slices: eachFamily("a", "b"), Services: []*v1.Service{service("web", []int32{80}, eTPLocal, families(v1.IPv4Protocol, v1.IPv6Protocol))}}, Options{}, "web: 10.0.0.1 fd00::2"},
		{"the older gets a port", Objects{Nodes: two, Services: []*v1.Service{service("new", []int32{80}, created(time.Hour)), service("old", []int32{443, 80}, created(0))}}, Options{}, "old: 10.0.0.1 10.0.0.2\nnew: PortTaken PortTaken"},
		{"priority before age", Objects{Nodes: two, Services: []*v1.Service{service("new", []int32{80}, created(time.Hour), annotated(AnnotationPriority, "1")), service("old", []int32{80}, created(0))}}, Options{}, "new: 10.0.0.1 10.0.0.2\nold: PortTaken PortTaken"},
		{"UID in the end", Objects{Nodes: two[:1], Services: []*v1.Service{service("b", []int32{80}), service("a", []int32{80})}}, Options{}, "a: 10.0.0.1\nb: PortTaken"},
		{"disjoint addresses", Objects{Nodes: two, Services: []*v1.Service{service("a", []int32{80}, annotated(AnnotationAddresses, "10.0.0.1")), service("b", []int32{80})}}, Options{}, "a: 10.0.0.1\nb: 10.0.0.2 PortTaken"},
		{"a CIDR", Objects{Nodes: two, Services: []*v1.Service{service("a", []int32{80}, annotated(AnnotationAddresses, "10.0.0.2/31, 192.0.2.0/24"))}}, Options{}, "a: 10.0.0.2"},
		{"no valid address", Objects{Nodes: two, Services: []*v1.Service{service("a", []int32{80}, annotated(AnnotationAddresses, "10.0.0.300, a:b"))}}, Options{}, "a: InvalidAnnotation InvalidAnnotation NoNodes"},
		{"another protocol", Objects{Nodes: two[:1], Services: []*v1.Service{service("a", []int32{53}), service("b", []int32{53}, func(s *v1.Service) { s.Spec.Ports[0].Protocol = v1.ProtocolUDP })}}, Options{}, "a: 10.0.0.1\nb: 10.0.0.1"},
		{"a NodePort", Objects{Nodes: two[:1], Services: []*v1.Service{service("a", []int32{30080}), service("b", []int32{80}, func(s *v1.Service) { s.Spec.Ports[0].NodePort = 30080 })}}, Options{}, "a: PortTaken\nb: 10.0.0.1"},
		{"its own NodePort", Objects{Nodes: two[:1], Services: []*v1.Service{service("a", []int32{30080}, func(s *v1.Service) { s.Spec.Ports[0].NodePort = 30080 })}}, Options{}, "a: 10.0.0.1"},
		{"the port of a health check", Objects{Nodes: two[:1], Services: []*v1.Service{service("a", []int32{30081}), service("b", []int32{80}, func(s *v1.Service) { s.Spec.HealthCheckNodePort = 30081 })}}, Options{}, "a: PortTaken\nb: 10.0.0.1"},
		{"an annotation of any length", Objects{Nodes: two[:1], Services: []*v1.Service{service("a", []int32{80}, annotated(AnnotationAddresses, strings.Repeat("10.0.0.1,", 20000)))}}, Options{}, "a: InvalidAnnotation NoNodes"},
		{"an annotation with many faults", Objects{Nodes: two[:1], Services: []*v1.Service{service("a", []int32{80}, annotated(AnnotationReservedPorts, strings.Repeat("x,", 1000)))}}, Options{}, "a: 10.0.0.1" + strings.Repeat(" (InvalidAnnotation)", maxInvalid)},
		{"a reserved port", Objects{Nodes: two[:1], Services: []*v1.Service{service("a", []int32{22})}}, Options{}, "a: PortReserved"},
		{"a reserved port, named where that is forbidden", Objects{Nodes: two[:1], Services: []*v1.Service{service("a", []int32{22}, annotated(AnnotationReservedPorts, "22"))}}, Options{Forbidden: []string{AnnotationReservedPorts}}, "a: InvalidAnnotation PortReserved"},
		{"a reserved port, named", Objects{Nodes: two[:1], Services: []*v1.Service{service("a", []int32{22}, annotated(AnnotationReservedPorts, "22"))}}, Options{}, "a: 10.0.0.1"},
		{"a listener of the host", Objects{Nodes: two, Listens: func(c Claim) bool { return c.Addr == netip.MustParseAddr("10.0.0.1") && c.Port == 80 }, Services: []*v1.Service{service("a", []int32{80})}}, Options{}, "a: 10.0.0.2 HostListens"},
		{"a listener that the Service shadows", Objects{Nodes: two[:1], Listens: func(Claim) bool { return true }, Services: []*v1.Service{service("a", []int32{80}, annotated(AnnotationListeners, "shadow"))}}, Options{}, "a: 10.0.0.1"},
		{"a listener, with a warning", Objects{Nodes: two[:1], Listens: func(Claim) bool { return true }, Services: []*v1.Service{service("a", []int32{80}, annotated(AnnotationListeners, "warn"))}}, Options{}, "a: 10.0.0.1 (HostListens)"},
		{"listeners by default, and an annotation", Objects{Nodes: two[:1], Listens: func(Claim) bool { return true }, Services: []*v1.Service{service("a", []int32{80}), service("b", []int32{81}, annotated(AnnotationListeners, "refuse"))}}, Options{Listeners: ListenersWarn}, "a: 10.0.0.1 (HostListens)\nb: HostListens"},
		{"a policy that there is not", Objects{Nodes: two[:1], Listens: func(Claim) bool { return true }, Services: []*v1.Service{service("a", []int32{80}, annotated(AnnotationListeners, "replace"))}}, Options{}, "a: InvalidAnnotation HostListens"},
		{"no warning without a listener", Objects{Nodes: two[:1], Listens: func(Claim) bool { return false }, Services: []*v1.Service{service("a", []int32{80}, annotated(AnnotationListeners, "warn"))}}, Options{}, "a: 10.0.0.1"},
		{"what answers is the Service itself", Objects{Nodes: two[:1], Listens: func(Claim) bool { return true }, Services: []*v1.Service{service("a", []int32{80}, func(s *v1.Service) {
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "10.0.0.1"}}
		})}}, Options{}, "a: 10.0.0.1"},
		{"a hostPort", Objects{Nodes: two, HostPorts: hostPorts("a", "10.0.0.1", v1.ProtocolTCP), Services: []*v1.Service{service("a", []int32{80})}}, Options{Listeners: ListenersShadow}, "a: 10.0.0.2 PortTaken"},
		{"at all addresses", Objects{Nodes: two, HostPorts: hostPorts("a", "0.0.0.0", v1.ProtocolTCP), Services: []*v1.Service{service("a", []int32{80}, families(v1.IPv6Protocol))}}, Options{}, "a: fd00::2 PortTaken"},
		{"of another protocol or address", Objects{Nodes: two[:1], HostPorts: hostPorts("a", "10.0.0.9", v1.ProtocolTCP), Services: []*v1.Service{service("a", []int32{80})}}, Options{}, "a: 10.0.0.1"},
		{"later", Objects{Nodes: two[:1], HostPorts: hostPorts("a", "", v1.ProtocolTCP), Services: []*v1.Service{service("a", []int32{80}, inStatus("10.0.0.1"))}}, Options{}, "a: 10.0.0.1 (PortTaken)"},
		{"another class", Objects{Nodes: two, Services: []*v1.Service{service("a", []int32{80}, func(s *v1.Service) { s.Spec.LoadBalancerClass = new("example.com/lb") })}}, Options{DefaultClass: true}, ""},
		{"no class", Objects{Nodes: two[:1], Services: []*v1.Service{service("a", []int32{80}, func(s *v1.Service) { s.Spec.LoadBalancerClass = nil })}}, Options{}, ""},
		{"no class, asked for", Objects{Nodes: two[:1], Services: []*v1.Service{service("a", []int32{80}, func(s *v1.Service) { s.Spec.LoadBalancerClass = nil })}}, Options{DefaultClass: true}, "a: 10.0.0.1"},
		{"another type", Objects{Nodes: two, Services: []*v1.Service{service("a", []int32{80}, func(s *v1.Service) { s.Spec.Type = v1.ServiceTypeNodePort })}}, Options{}, ""},
		{"hostile numbers", Objects{Nodes: two[:1], Services: []*v1.Service{service("a", []int32{80}, annotated(AnnotationPriority, "1e9"), annotated(AnnotationReservedPorts, "99999, 23"))}}, Options{}, "a: 10.0.0.1 (InvalidAnnotation) (InvalidAnnotation) (InvalidAnnotation)"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.Slices == nil {
				test.Slices = endpoints()
			}
			if got := text(Decide(test.Objects, test.opts)); got != test.want {
				t.Errorf("got\n%s\nwant\n%s", got, test.want)
			}
		})
	}
}

// hostPorts has a pod on a node with port 80 of an address.
func hostPorts(node, ip string, protocol v1.Protocol) func(string) []HostPort {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "pod"}}
	p.Spec.NodeName = node
	p.Spec.Containers = []v1.Container{{Ports: []v1.ContainerPort{{ContainerPort: 8080}, {ContainerPort: 80, HostPort: 80, HostIP: ip, Protocol: protocol}}}}
	return func(name string) []HostPort {
		if name != node {
			return nil
		}
		return HostPortsOf(p)
	}
}

// TestHostPortsOf: pods in the host's network, that have ended, that are nowhere yet, and those of klipper-lb have none.
func TestHostPortsOf(t *testing.T) {
	for _, test := range []struct {
		name string
		edit func(*v1.Pod)
		want int
	}{
		{"a pod", func(*v1.Pod) {}, 1},
		{"in the host's network", func(p *v1.Pod) { p.Spec.HostNetwork = true }, 0},
		{"ended", func(p *v1.Pod) { p.Status.Phase = v1.PodFailed }, 0},
		{"on no node", func(p *v1.Pod) { p.Spec.NodeName = "" }, 0},
		{"a sidecar", func(p *v1.Pod) { p.Spec.InitContainers, p.Spec.Containers = p.Spec.Containers, nil }, 1},
		{"klipper-lb", func(p *v1.Pod) { p.Labels = map[string]string{LabelServiceName: "web"} }, 0},
	} {
		p := &v1.Pod{}
		p.Spec.NodeName = "a"
		p.Spec.Containers = []v1.Container{{Ports: []v1.ContainerPort{{HostPort: 80}}}}
		test.edit(p)
		if got := HostPortsOf(p); len(got) != test.want {
			t.Errorf("%s: %v", test.name, got)
		}
	}
}

// reports are what nodes say, by their names. A line is "addresses; listeners; served": "eth0=10.0.0.1; 0.0.0.0:80; a@10.0.0.1:80", with
// "!" in place of "@" for what fails, and "+" after what is forwarded directly.
func reports(t *testing.T, of map[string]string) func(string) *nodereport.Report {
	all := map[string]*nodereport.Report{}
	for node, text := range of {
		text, unaware := strings.CutPrefix(text, "-") // it has not heard of the Service yet
		parts := strings.Split(text, ";")
		r, s := &nodereport.Report{Services: map[string]*nodereport.Service{}}, &nodereport.Service{Ports: []nodereport.Port{{Protocol: "TCP", Port: 80}}}
		if !unaware {
			r.Services["ns/s"] = s
		}
		for _, f := range strings.Fields(parts[0]) {
			device, a, _ := strings.Cut(f, "=")
			r.Addresses = append(r.Addresses, nodereport.Address{Interface: device, Address: netip.MustParseAddr(a)})
		}
		for _, f := range strings.Fields(parts[1]) {
			at := netip.MustParseAddrPort(f)
			r.Listeners = append(r.Listeners, nodereport.Listener{Protocol: "TCP", Address: at.Addr(), Port: at.Port()})
		}
		for _, f := range strings.Fields(parts[2]) {
			served := nodereport.Served{Direct: strings.HasSuffix(f, "+")}
			name, where, serves := strings.Cut(strings.TrimSuffix(f, "+"), "@")
			if !serves {
				name, where, _ = strings.Cut(f, "!")
				served.Fault = "broken"
			}
			at := netip.MustParseAddrPort(where)
			switch served.Address = at.Addr(); {
			case name == "s" && at.Port() == 80:
				s.Ports[0].Served = append(s.Ports[0].Served, served)
			case name == "s":
				s.Ports = append(s.Ports, nodereport.Port{Protocol: "TCP", Port: at.Port(), Served: []nodereport.Served{served}})
			default:
				r.Services["ns/"+name] = &nodereport.Service{Ports: []nodereport.Port{{Protocol: "TCP", Port: at.Port(), Served: []nodereport.Served{served}}}}
			}
		}
		all[node] = r
	}
	return func(node string) *nodereport.Report { return all[node] }
}

// inStatus puts addresses into the status of a Service.
func inStatus(addresses ...string) func(*v1.Service) {
	return func(s *v1.Service) {
		for _, a := range addresses {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: a})
		}
	}
}

// TestDecideByReports: a Service gets an address once its node reports that it serves it.
func TestDecideByReports(t *testing.T) {
	two := []*v1.Node{node("a", "10.0.0.1 fd00::1"), node("b", "10.0.0.2 fd00::2")}
	probed := func(list string) func(*v1.Service) {
		return func(s *v1.Service) {
			s.Status.Conditions = []metav1.Condition{{Type: nodereport.ConditionProbing, Status: metav1.ConditionTrue, Message: list}}
		}
	}
	hostNetwork := func(types.NamespacedName) []*discoveryv1.EndpointSlice {
		return []*discoveryv1.EndpointSlice{{
			Ports:     []discoveryv1.EndpointPort{{Port: new(int32(80))}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}},
		}}
	}
	for _, test := range []struct {
		name    string
		reports map[string]string
		slices  func(types.NamespacedName) []*discoveryv1.EndpointSlice
		overdue bool
		opts    Options
		edits   []func(*v1.Service)
		want    string
	}{
		{name: "nothing is served yet", reports: map[string]string{"a": ";;", "b": ";;"}, want: "s: ?10.0.0.1 ?10.0.0.2 Probing Probing"},
		{name: "one does not know whether anybody listens", reports: map[string]string{"a": "-;;", "b": ";;s@10.0.0.2:80"}, want: "s: 10.0.0.2 Probing"},
		{name: "and had the address", reports: map[string]string{"a": "-;;", "b": ";;s@10.0.0.2:80"}, edits: []func(*v1.Service){inStatus("10.0.0.1")}, want: "s: 10.0.0.1 10.0.0.2"},
		{name: "which is shadowed", reports: map[string]string{"a": "-;;", "b": ";;s@10.0.0.2:80"}, opts: Options{Listeners: ListenersShadow}, want: "s: 10.0.0.2 ?10.0.0.1 Probing"},
		{name: "one serves", reports: map[string]string{"a": ";;s@10.0.0.1:80", "b": ";;"}, want: "s: 10.0.0.1 ?10.0.0.2 Probing"},
		{name: "one has no report", reports: map[string]string{"a": ";;"}, want: "s: 10.0.0.2 ?10.0.0.1 Probing"},
		{name: "another Service is served", reports: map[string]string{"a": ";;x@10.0.0.1:80", "b": ";;s@10.0.0.2:81"}, want: "s: ?10.0.0.1 ?10.0.0.2 Probing Probing"},
		{name: "one fails", reports: map[string]string{"a": ";;s!10.0.0.1:80", "b": ";;s@10.0.0.2:80"}, want: "s: 10.0.0.2 ?10.0.0.1 NotServed"},
		{name: "one fails that was advertised", reports: map[string]string{"a": ";;s!10.0.0.1:80", "b": ";;s@10.0.0.2:80"}, edits: []func(*v1.Service){inStatus("10.0.0.1", "10.0.0.2")}, want: "s: 10.0.0.1 10.0.0.2"},
		{name: "and for long", reports: map[string]string{"a": ";;s!10.0.0.1:80", "b": ";;s@10.0.0.2:80"}, overdue: true, edits: []func(*v1.Service){inStatus("10.0.0.1", "10.0.0.2")}, want: "s: 10.0.0.2 ?10.0.0.1 NotServed"},
		{
			name: "one family fails", reports: map[string]string{"a": ";;s@10.0.0.1:80 s!fd00::1", "b": ";;s@10.0.0.2:80 s@fd00::2"}, edits: []func(*v1.Service){families(v1.IPv4Protocol, v1.IPv6Protocol)},
			want: "s: 10.0.0.1 10.0.0.2 fd00::2 ?fd00::1 NotServed",
		},
		{name: "direct", reports: map[string]string{"a": ";;s@10.0.0.1:80+", "b": ";;s@10.0.0.2:80+"}, want: "s: 10.0.0.1 10.0.0.2 direct"},
		{name: "direct on one node", reports: map[string]string{"a": ";;s@10.0.0.1:80+", "b": ";;s@10.0.0.2:80"}, want: "s: 10.0.0.1 10.0.0.2"},
		{name: "a listener", reports: map[string]string{"a": ";0.0.0.0:80;", "b": ";10.0.0.2:81;s@10.0.0.2:80"}, want: "s: 10.0.0.2 HostListens"},
		{name: "a listener of another family", reports: map[string]string{"a": ";[::]:80;s@10.0.0.1:80", "b": ";;s@10.0.0.2:80"}, want: "s: 10.0.0.1 10.0.0.2"},
		{name: "at another address of the node", reports: map[string]string{"a": "eth1=192.168.1.1;192.168.1.1:80;", "b": ";;s@10.0.0.2:80"}, want: "s: 10.0.0.2 HostListens"},
		{
			name: "that was not asked for", reports: map[string]string{"a": "eth1=192.168.1.1;192.168.1.1:80;s@10.0.0.1:80", "b": ";;s@10.0.0.2:80"},
			edits: []func(*v1.Service){annotated(AnnotationAddresses, "10.0.0.0/24")}, want: "s: 10.0.0.1 10.0.0.2",
		},
		{name: "a later listener", reports: map[string]string{"a": ";0.0.0.0:80;s@10.0.0.1:80", "b": ";;s@10.0.0.2:80"}, edits: []func(*v1.Service){inStatus("10.0.0.1")}, want: "s: 10.0.0.1 10.0.0.2 (HostListens)"},
		{name: "while it is probed", reports: map[string]string{"a": ";0.0.0.0:80;", "b": ";;s@10.0.0.2:80"}, edits: []func(*v1.Service){probed("10.0.0.1")}, want: "s: 10.0.0.2 ?10.0.0.1 Probing (HostListens)"},
		{name: "the Service's own endpoint listens", reports: map[string]string{"a": ";0.0.0.0:80;s@10.0.0.1:80", "b": ";0.0.0.0:80;s@10.0.0.2:80"}, slices: hostNetwork, want: "s: 10.0.0.1 HostListens"},
		{
			name: "an interface", reports: map[string]string{"a": "eth0=10.0.0.1 eth1=192.168.1.1;;s@192.168.1.1:80", "b": "eth0=10.0.0.2;;"},
			edits: []func(*v1.Service){annotated(AnnotationAddresses, "eth1")}, want: "s: 192.168.1.1",
		},
		{
			name: "interfaces", reports: map[string]string{"a": "eth0=10.0.0.1 wan=192.168.1.1;;s@192.168.1.1:80 s@10.0.0.1:80", "b": "eth0=10.0.0.2;;"},
			edits: []func(*v1.Service){annotated(AnnotationAddresses, "et*, 192.168.0.0/16")}, want: "s: 10.0.0.1 192.168.1.1 ?10.0.0.2 Probing",
		},
		{name: "an address that left the node", reports: map[string]string{"a": "eth0=10.9.9.9;;", "b": ";;s@10.0.0.2:80"}, edits: []func(*v1.Service){inStatus("10.0.0.1", "10.0.0.2")}, overdue: true, want: "s: 10.0.0.2 ?10.0.0.1 NotServed"},
		{name: "rootless", reports: map[string]string{"a": ";;s@10.0.0.1:80", "b": ";;"}, opts: Options{Rootless: true}, want: "s: 127.0.0.1 ?10.0.0.1 ?10.0.0.2 Probing"},
	} {
		t.Run(test.name, func(t *testing.T) {
			o := Objects{Nodes: two, Services: []*v1.Service{service("s", []int32{80}, test.edits...)}, Slices: test.slices, Report: reports(t, fixed(test.reports))}
			if o.Slices == nil {
				o.Slices = endpoints()
			}
			o.Overdue = func(*v1.Service, netip.Addr) bool { return test.overdue }
			if got := text(Decide(o, test.opts)); got != test.want {
				t.Errorf("got\n%s\nwant\n%s", got, test.want)
			}
		})
	}
}

// TestReservedPorts: each of them is refused, and to be had by its name alone.
func TestReservedPorts(t *testing.T) {
	nodes := []*v1.Node{node("a", "10.0.0.1")}
	for _, port := range []int32{22, 2379, 2380, 6443, 10249, 10250, 10256} {
		refused, named := service("refused", []int32{port}), service("named", []int32{port}, annotated(AnnotationReservedPorts, fmt.Sprint(port)))
		got := text(Decide(Objects{Nodes: nodes, Services: []*v1.Service{refused, named}, Slices: endpoints()}, Options{}))
		if want := "named: 10.0.0.1\nrefused: PortReserved"; got != want {
			t.Errorf("port %d: got\n%s\nwant\n%s", port, got, want)
		}
	}
}

// TestManyOnOnePort: of 200 Services that want one port, the oldest has it, and the next once that one is gone.
func TestManyOnOnePort(t *testing.T) {
	o := Objects{Nodes: []*v1.Node{node("a", "10.0.0.1"), node("b", "10.0.0.2")}, Slices: endpoints()}
	for i := range 200 {
		o.Services = append(o.Services, service(fmt.Sprintf("s%03d", i), []int32{80}, created(time.Duration(200-i)*time.Second)))
	}
	var planner Planner
	for oldest := 199; oldest > 190; oldest-- {
		for i, out := range planner.Decide(o, Options{}) {
			if first := out.Service.Name == fmt.Sprintf("s%03d", oldest); first != (i == 0) || first != (len(out.Ingress) == 2) || first != (len(out.Reasons) == 0) {
				t.Fatalf("%d. of %d: %s", i, len(o.Services), text([]Outcome{out}))
			}
		}
		o.Services = o.Services[:oldest]
	}
}

// TestTranslated: packets for an ExternalIP that a node does not have arrive at other addresses of it, which no other Service can have then.
func TestTranslated(t *testing.T) {
	o := Objects{
		Nodes: []*v1.Node{node("a", "10.0.0.1/198.51.100.1")}, Slices: endpoints(),
		Report: reports(t, map[string]string{"a": "eth0=10.0.0.1 eth1=192.168.1.1;;s@198.51.100.1:80 x@10.0.0.1:80"}),
	}
	all, one := service("s", []int32{80}), func(a string, edits ...func(*v1.Service)) *v1.Service {
		return service("x", []int32{80}, append(edits, annotated(AnnotationAddresses, a))...)
	}
	first := annotated(AnnotationPriority, "1")
	for _, test := range []struct {
		name     string
		services []*v1.Service
		want     string
	}{
		{"the internal address", []*v1.Service{all, one("10.0.0.1")}, "s: 198.51.100.1\nx: PortTaken"},
		{"the internal address first", []*v1.Service{all, one("10.0.0.1", first)}, "x: 10.0.0.1\ns: PortTaken"},
		{"another one", []*v1.Service{all, one("192.168.1.1")}, "s: 198.51.100.1\nx: PortTaken"},
		{"both of one Service", []*v1.Service{one("10.0.0.0/8, 198.51.100.1"), service("s", []int32{81})}, "s: Probing\nx: 10.0.0.1 ?198.51.100.1 Probing"},
	} {
		o.Services = test.services
		if got := text(Decide(o, Options{})); got != test.want {
			t.Errorf("%s: got\n%s\nwant\n%s", test.name, got, test.want)
		}
	}
}

// TestNoListeners: where a node cannot say which processes listen, connections tell.
func TestNoListeners(t *testing.T) {
	report := reports(t, map[string]string{"a": "eth0=10.0.0.1;;s@10.0.0.1:80", "b": "eth0=10.0.0.2;;s@10.0.0.2:80"})
	report("a").NoListeners = "forbidden"
	o := Objects{Nodes: []*v1.Node{node("a", "10.0.0.1"), node("b", "10.0.0.2")}, Slices: endpoints(), Report: report, Services: []*v1.Service{service("s", []int32{80})}}
	o.Listens = func(Claim) bool { return true } // only asked of the first
	if got, want := text(Decide(o, Options{})), "s: 10.0.0.2 HostListens"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestLeftOut: where annotations of a Service leave a node out, another one has the port.
func TestLeftOut(t *testing.T) {
	report := reports(t, map[string]string{"a": "eth0=10.0.0.1;;s!10.0.0.1:80 x@10.0.0.1:80", "b": "eth0=10.0.0.2;;s@10.0.0.2:80"})
	report("a").Services["ns/s"].Ports[0].Served[0].LeftOut = true
	o := Objects{
		Nodes: []*v1.Node{node("a", "10.0.0.1"), node("b", "10.0.0.2")}, Slices: endpoints(), Report: report,
		Services: []*v1.Service{service("s", []int32{80}, annotated(AnnotationPriority, "1")), service("x", []int32{80})},
	}
	if got, want := text(Decide(o, Options{})), "s: 10.0.0.2 -10.0.0.1\nx: 10.0.0.1 PortTaken"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	o.Nodes = o.Nodes[:1]
	if got, want := text(Decide(o, Options{})), "s: -10.0.0.1 LeftOut\nx: 10.0.0.1"; got != want {
		t.Errorf("on that node alone: got\n%s\nwant\n%s", got, want)
	}
}

// fixed writes IPv6 addresses with ports as the parser wants them.
func fixed(of map[string]string) map[string]string {
	out := map[string]string{}
	for node, text := range of {
		for i := range 3 {
			a := fmt.Sprintf("fd00::%d", i)
			text = strings.NewReplacer("@"+a, "@["+a+"]:80", "!"+a, "!["+a+"]:80").Replace(text)
		}
		out[node] = text
	}
	return out
}

// TestNoPortTwice: whatever the objects and their order, no two Services get one port of one address, nor of an address where packets for
// another one arrive; the outcome does not depend on the order.
func TestNoPortTwice(t *testing.T) {
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 0))
		o := Objects{Slices: endpoints("n0", "n2")}
		reported := map[string]*nodereport.Report{}
		o.Report = func(node string) *nodereport.Report { return reported[node] }
		for i := range 1 + r.IntN(6) {
			internal, addresses := fmt.Sprintf("10.0.0.%d", r.IntN(6)), ""
			if addresses = internal + fmt.Sprintf(" fd00::%d", i); r.IntN(3) == 0 {
				addresses += fmt.Sprintf("/198.51.100.%d", i)
			}
			n := node(fmt.Sprintf("n%d", i), addresses)
			if r.IntN(5) == 0 {
				notReady(n)
			}
			o.Nodes = append(o.Nodes, n)
			if r.IntN(3) > 0 {
				reported[n.Name] = &nodereport.Report{Services: map[string]*nodereport.Service{}, Addresses: []nodereport.Address{
					{Interface: "eth0", Address: netip.MustParseAddr(internal)}, {Interface: "eth1", Address: netip.MustParseAddr(fmt.Sprintf("10.0.0.%d", 6+i))},
				}}
			}
		}
		for i := range 1 + r.IntN(8) {
			s := service(fmt.Sprintf("s%d", i), []int32{int32(80 + r.IntN(3))}, created(time.Duration(r.IntN(3))*time.Second))
			if r.IntN(2) == 0 {
				s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Port: int32(80 + r.IntN(3)), Protocol: v1.ProtocolUDP})
			}
			if r.IntN(3) == 0 {
				families(v1.IPv6Protocol, v1.IPv4Protocol)(s)
			}
			if r.IntN(3) == 0 {
				s.Annotations[AnnotationPriority] = fmt.Sprint(r.IntN(3))
			}
			if r.IntN(4) == 0 {
				s.Annotations[AnnotationAddresses] = fmt.Sprintf("10.0.0.%d/31", 2*r.IntN(6))
			}
			if r.IntN(4) == 0 {
				eTPLocal(s)
			}
			o.Services = append(o.Services, s)
			for _, n := range o.Nodes {
				if report := reported[n.Name]; report != nil && r.IntN(5) > 0 {
					report.Services[nameOf(s)] = allServed(r, s, n, report)
				}
			}
		}
		list := Decide(o, Options{EachNode: seed%2 == 0})
		owner := map[Claim]string{}
		for _, out := range list {
			for c := range claimsOf(&out, o.Nodes, reported) {
				if other := owner[c]; other != "" && other != out.Service.Name {
					t.Fatalf("seed %d: %s and %s have %s:\n%s", seed, other, out.Service.Name, c, text(list))
				}
				owner[c] = out.Service.Name
			}
		}
		shuffled := o
		shuffled.Services, shuffled.Nodes = slices.Clone(o.Services), slices.Clone(o.Nodes)
		r.Shuffle(len(shuffled.Services), func(i, j int) {
			shuffled.Services[i], shuffled.Services[j] = shuffled.Services[j], shuffled.Services[i]
		})
		r.Shuffle(len(shuffled.Nodes), func(i, j int) {
			shuffled.Nodes[i], shuffled.Nodes[j] = shuffled.Nodes[j], shuffled.Nodes[i]
		})
		if a, b := text(list), text(Decide(shuffled, Options{EachNode: seed%2 == 0})); a != b {
			t.Fatalf("seed %d: in another order\n%s\nbefore\n%s", seed, b, a)
		}
	}
}

// allServed is what a node says that serves nearly everything.
func allServed(r *rand.Rand, s *v1.Service, n *v1.Node, report *nodereport.Report) *nodereport.Service {
	var at []nodereport.Served
	for _, a := range n.Status.Addresses {
		at = append(at, nodereport.Served{Address: netip.MustParseAddr(a.Address)})
	}
	for _, a := range report.Addresses {
		at = append(at, nodereport.Served{Address: a.Address})
	}
	at = at[r.IntN(2):]
	known := &nodereport.Service{}
	for _, p := range s.Spec.Ports {
		known.Ports = append(known.Ports, nodereport.Port{Protocol: string(p.Protocol), Port: uint16(p.Port), Served: at})
	}
	return known
}

// claimsOf are the ports that lead to a Service: those of its addresses, advertised or probed, and of the addresses of nodes that do not have
// such an address themselves.
func claimsOf(out *Outcome, nodes []*v1.Node, reported map[string]*nodereport.Report) map[Claim]bool {
	addresses := slices.Clone(out.Probing)
	for _, i := range out.Ingress {
		addresses = append(addresses, netip.MustParseAddr(i.IP))
	}
	claims := map[Claim]bool{}
	for _, a := range addresses {
		places := []netip.Addr{a}
		for _, n := range nodes {
			report := reported[n.Name]
			if report == nil || !isReady(n) || !slices.ContainsFunc(n.Status.Addresses, func(of v1.NodeAddress) bool { return of.Type == v1.NodeExternalIP && of.Address == a.String() }) {
				continue
			}
			for _, of := range n.Status.Addresses {
				if of.Type == v1.NodeInternalIP && netip.MustParseAddr(of.Address).Is4() == a.Is4() {
					places = append(places, netip.MustParseAddr(of.Address))
				}
			}
			if out.Service.Annotations[AnnotationAddresses] == "" {
				for _, of := range report.Addresses {
					places = append(places, of.Address)
				}
			}
		}
		for _, at := range places {
			for _, p := range out.Service.Spec.Ports {
				claims[Claim{at, p.Port, p.Protocol}] = true
			}
		}
	}
	return claims
}
