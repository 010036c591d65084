// SPDX-License-Identifier: Apache-2.0

package shadow

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/golden"
)

// The cluster of these tests: node1 is 172.18.0.1, its pods are 10.244.1.x, those of others
// 10.244.2.x, clients 198.51.100.x.
func facts() proxier.Facts {
	return proxier.Facts{
		NodeIPs: [proxier.Families]netip.Addr{netip.MustParseAddr("172.18.0.1")}, LocalAddrs: []netip.Addr{netip.MustParseAddr("172.18.0.1")},
		Pods:         proxier.Detector{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}},
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")},
	}
}

func service(name, ip string, nodePort int32, change ...func(*v1.Service)) *v1.Service {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeNodePort, ClusterIP: ip, ClusterIPs: []string{ip},
			Ports: []v1.ServicePort{{Port: 80, NodePort: nodePort, Protocol: v1.ProtocolTCP}},
		},
	}
	for _, do := range change {
		do(s)
	}
	return s
}

func local(s *v1.Service) {
	s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
}

func balanced(s *v1.Service) {
	s.Spec.Type, s.Spec.LoadBalancerSourceRanges = v1.ServiceTypeLoadBalancer, []string{"198.51.100.0/25"}
	s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.1"}}
}

func sticky(s *v1.Service) {
	s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
	s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](100)}}
}

func slice(service string, addresses ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: service + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To(""), Port: ptr.To[int32](8080), Protocol: ptr.To(v1.ProtocolTCP)}},
	}
	for _, a := range addresses {
		node := "node2"
		if strings.HasPrefix(a, "10.244.1.") || a == "172.18.0.1" {
			node = "node1"
		}
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, NodeName: &node})
	}
	return s
}

// world is a Shadow with its objects and a clock.
type world struct {
	*Shadow
	px  *proxier.Proxier
	now time.Time
}

const settle = 10 * time.Second

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{now: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
	w.Shadow = New(Options{Node: "node1", Settle: settle, NodePorts: Range{30000, 32767}, Now: func() time.Time { return w.now }})
	var err error
	w.px, err = proxier.New(proxier.Options{NodeName: "node1", Tier: w.Shadow, Facts: facts(), Runner: proxier.DefaultRunnerOptions()})
	if err != nil {
		t.Fatal(err)
	}
	w.Follow(w.px.Table())
	w.Start()
	for _, s := range []*v1.Service{
		service("web", "10.96.0.10", 30080), service("local", "10.96.0.20", 30081, local), service("empty", "10.96.0.30", 30084), service("lb", "10.96.0.40", 30082, balanced),
		service("api", "10.96.0.1", 0), service("agent", "10.96.0.60", 30083), service("sticky", "10.96.0.70", 30085, sticky),
	} {
		w.px.OnServiceAdd(s)
	}
	for _, s := range []*discoveryv1.EndpointSlice{
		slice("web", "10.244.1.1", "10.244.2.1"), slice("local", "10.244.1.1", "10.244.2.1"), slice("lb", "10.244.1.1"), slice("api", "172.18.0.9"),
		slice("agent", "172.18.0.1"), slice("sticky", "10.244.1.1", "10.244.2.1"),
	} {
		w.px.OnEndpointSliceAdd(s)
	}
	w.px.OnServiceSynced()
	w.px.OnEndpointSlicesSynced()
	w.sync(t)
	w.now = w.now.Add(time.Minute)
	return w
}

func (w *world) sync(t *testing.T) {
	t.Helper()
	if err := w.px.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// connection reads "client dialed backend [seen]"; client and backend have port 5 and 8080 unless
// they say another.
func connection(text string) Connection {
	words := strings.Fields(text)
	at := func(i, port int) netip.AddrPort {
		if a, err := netip.ParseAddrPort(words[i]); err == nil {
			return a
		}
		return netip.AddrPortFrom(netip.MustParseAddr(words[i]), uint16(port))
	}
	c := Connection{Protocol: proxier.TCP, Client: at(0, 5), Dialed: at(1, 80), Backend: at(2, 8080)}
	if c.Seen = c.Client; len(words) > 3 {
		c.Seen = at(3, 5)
	}
	return c
}

// summary is a report in one line.
func summary(r *Report) string {
	text := fmt.Sprintf("%d agree", r.Agreements)
	for _, p := range r.Ports {
		for kind, n := range p.Kinds {
			text += fmt.Sprintf(", %s %s %d", p.Service, kind, n)
		}
	}
	for _, o := range r.Others {
		text += fmt.Sprintf(", other %s %d", o.Dialed, o.Count)
	}
	return text
}

func TestConnections(t *testing.T) {
	for _, test := range []struct{ name, connection, want string }{
		{"a pod", "10.244.1.7 10.96.0.10 10.244.2.1", "1 agree"},
		{"no Service", "10.244.1.7 192.0.2.1 192.0.2.1:80", "0 agree"},
		{"a hostPort", "198.51.100.1 172.18.0.1:8443 10.244.1.9", "0 agree, other 172.18.0.1:8443 1"},
		{"no endpoint of it", "10.244.1.7 10.96.0.10 10.244.2.9", "0 agree, shop/web wrong-backend 1"},
		{"a wrong port", "10.244.1.7 10.96.0.10 10.244.2.1:8081", "0 agree, shop/web wrong-backend 1"},
		{"untranslated", "10.244.1.7 10.96.0.10 10.96.0.10:80", "0 agree, shop/web not-translated 1"},
		{"no endpoints", "10.244.1.7 10.96.0.30 10.244.1.1", "0 agree, shop/empty not-refused 1"},
		{"no endpoints, untranslated", "10.244.1.7 10.96.0.30 10.96.0.30:80", "0 agree, shop/empty not-refused 1"},
		{"no endpoints, this host to itself", "172.18.0.1 172.18.0.1:30084 172.18.0.1:30084", "0 agree"},
		{"no endpoints, this host to itself, translated", "172.18.0.1 172.18.0.1:30084 10.244.1.1 10.244.1.254", "0 agree, shop/empty not-refused 1"},
		{"no endpoints, from outside", "198.51.100.1 172.18.0.1:30084 172.18.0.1:30084", "0 agree, shop/empty not-refused 1"},
		{"an unallocated ClusterIP", "10.244.1.7 10.96.9.9 10.244.1.1", "0 agree, (no Service) unknown-service 1"},
		{"an unallocated ClusterIP, untranslated", "10.244.1.7 10.96.9.9 10.96.9.9:80", "0 agree, (no Service) not-refused 1"},
		{"an unknown NodePort", "198.51.100.1 172.18.0.1:30999 10.244.1.1", "0 agree, (no Service) unknown-service 1"},
		{"a NodePort", "198.51.100.1 172.18.0.1:30080 10.244.1.1 172.18.0.1", "1 agree"},
		{"a NodePort, not masqueraded", "198.51.100.1 172.18.0.1:30080 10.244.1.1", "0 agree, shop/web not-masqueraded 1"},
		{"a NodePort that leads to this host", "198.51.100.1 172.18.0.1:30083 172.18.0.1", "1 agree"},
		{"a NodePort of a Local policy", "198.51.100.1 172.18.0.1:30081 10.244.1.1", "1 agree"},
		{"a NodePort of a Local policy, masqueraded", "198.51.100.1 172.18.0.1:30081 10.244.1.1 172.18.0.1", "0 agree, shop/local masqueraded 1"},
		{"a NodePort of a Local policy, elsewhere", "198.51.100.1 172.18.0.1:30081 10.244.2.1 172.18.0.1", "0 agree, shop/local wrong-backend 1"},
		{"a pod takes the short cut", "10.244.1.7 172.18.0.1:30081 10.244.2.1", "1 agree"},
		{"a pod, any source", "10.244.1.7 172.18.0.1:30080 10.244.2.1 172.18.0.1", "1 agree"},
		{"a pod, masqueraded", "10.244.1.7 10.96.0.10 10.244.2.1 172.18.0.1", "0 agree, shop/web masqueraded 1"},
		{"a pod that its CNI masquerades", "10.244.1.7 10.96.0.1 172.18.0.9 172.18.0.1", "1 agree"},
		{"a pod to itself", "10.244.1.1 10.96.0.10 10.244.1.1 172.18.0.1", "1 agree"},
		{"this host, masqueraded to its own address", "172.18.0.1 10.96.0.10 10.244.2.1", "1 agree"},
		{"this host, masqueraded to another", "172.18.0.1 10.96.0.10 10.244.1.1 10.244.1.254", "1 agree"},
		{"this host by IPVS, from the Service's address", "10.96.0.10 10.96.0.10 10.244.1.1 172.18.0.1", "1 agree"},
		{"source ranges", "198.51.100.1 203.0.113.1 10.244.1.1 172.18.0.1", "1 agree"},
		{"outside source ranges", "198.51.100.200 203.0.113.1 10.244.1.1 172.18.0.1", "0 agree, shop/lb not-refused 1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.Observe(connection(test.connection))
			w.Settled(true)
			r := w.Report()
			if got := summary(r); got != test.want {
				t.Errorf("%s, want %s", got, test.want)
			}
			if len(r.Examples) != r.Disagreements || r.Disagreements > 0 && r.Examples[0].Explanation == nil {
				t.Errorf("examples %+v", r.Examples)
			}
		})
	}
}

// TestChanges: what agrees with what was decided a moment before or after is no disagreement.
func TestChanges(t *testing.T) {
	change := func(to ...string) func(*testing.T, *world) {
		return func(t *testing.T, w *world) {
			w.px.OnEndpointSliceUpdate(nil, slice("web", to...))
			w.sync(t)
		}
	}
	wait := func(d time.Duration) func(*testing.T, *world) {
		return func(_ *testing.T, w *world) {
			w.now = w.now.Add(d)
			w.Settled(false)
		}
	}
	see := func(text string) func(*testing.T, *world) {
		return func(_ *testing.T, w *world) { w.Observe(connection(text)) }
	}
	const gone, comes = "10.244.1.7 10.96.0.10 10.244.2.1", "10.244.1.7 10.96.0.10 10.244.2.2"
	for _, test := range []struct {
		name  string
		steps []func(*testing.T, *world)
		want  string
	}{
		{"the running proxy is later", []func(*testing.T, *world){change("10.244.2.2"), wait(settle / 2), see(gone), wait(2 * settle)}, "1 agree"},
		{"the running proxy is much later", []func(*testing.T, *world){change("10.244.2.2"), wait(settle * 3 / 2), see(gone), wait(2 * settle)}, "0 agree, shop/web wrong-backend 1"},
		{"the running proxy is first", []func(*testing.T, *world){see(comes), wait(settle / 2), change("10.244.2.2"), wait(settle)}, "1 agree"},
		{"the running proxy is first, and it goes again", []func(*testing.T, *world){see(comes), wait(settle / 4), change("10.244.2.2"), wait(settle / 4), change("10.244.2.1"), wait(settle)}, "1 agree"},
		{"a change of another endpoint", []func(*testing.T, *world){see("10.244.1.7 10.96.0.10 10.244.2.9"), change("10.244.2.2"), wait(2 * settle)}, "0 agree, shop/web wrong-backend 1"},
		{"a new Service", []func(*testing.T, *world){func(t *testing.T, w *world) {
			w.px.OnServiceAdd(service("new", "10.96.0.50", 0))
			w.px.OnEndpointSliceAdd(slice("new", "10.244.2.1"))
			w.sync(t)
		}, see("10.244.1.7 10.96.0.50 10.96.0.50:80"), wait(2 * settle)}, "0 agree"},
		{"a Service that goes", []func(*testing.T, *world){func(t *testing.T, w *world) {
			w.px.OnServiceDelete(service("web", "10.96.0.10", 30080))
			w.sync(t)
		}, see(gone), wait(2 * settle)}, "1 agree"},
		{"a Service that went long ago", []func(*testing.T, *world){func(t *testing.T, w *world) {
			w.px.OnServiceDelete(service("web", "10.96.0.10", 30080))
			w.sync(t)
		}, wait(4 * settle), see(gone), wait(2 * settle)}, "0 agree, (no Service) unknown-service 1"},
		{"not settled yet", []func(*testing.T, *world){see(comes), wait(settle / 2)}, "0 agree"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			for _, step := range test.steps {
				step(t, w)
			}
			if got := summary(w.Report()); got != test.want {
				t.Errorf("%s, want %s", got, test.want)
			}
		})
	}
}

// TestAffinity: a client that gets another endpoint, although the one before is still eligible, is a
// disagreement.
func TestAffinity(t *testing.T) {
	wait := func(d time.Duration) func(*testing.T, *world) {
		return func(_ *testing.T, w *world) {
			w.now = w.now.Add(d)
			w.Settled(false)
		}
	}
	see := func(from, to string) func(*testing.T, *world) {
		return func(_ *testing.T, w *world) { w.Observe(connection(from + " 10.96.0.70 " + to)) }
	}
	endpoints := func(to ...string) func(*testing.T, *world) {
		return func(t *testing.T, w *world) {
			w.px.OnEndpointSliceUpdate(nil, slice("sticky", to...))
			w.sync(t)
		}
	}
	with := func(change ...func(*v1.Service)) func(*testing.T, *world) {
		return func(t *testing.T, w *world) {
			w.px.OnServiceUpdate(nil, service("sticky", "10.96.0.70", 30085, change...))
			w.sync(t)
		}
	}
	const client, other, one, two, three = "10.244.1.7", "10.244.1.8", "10.244.1.1", "10.244.2.1", "10.244.2.2"
	for _, test := range []struct {
		name  string
		steps []func(*testing.T, *world)
		want  string
	}{
		{"stays", []func(*testing.T, *world){see(client, one), wait(time.Second), see(client, one)}, "2 agree"},
		{"another client", []func(*testing.T, *world){see(client, one), wait(time.Second), see(other, two)}, "2 agree"},
		{"another frontend", []func(*testing.T, *world){see(client, one), wait(time.Second), func(_ *testing.T, w *world) {
			w.Observe(connection(client + " 172.18.0.1:30085 " + two + " 172.18.0.1"))
		}}, "2 agree"},
		{"leaves", []func(*testing.T, *world){see(client, one), wait(time.Second), see(client, two)}, "1 agree, shop/sticky affinity-lost 1"},
		{"leaves and returns", []func(*testing.T, *world){see(client, one), wait(time.Second), see(client, two), wait(time.Second), see(client, one)},
			"1 agree, shop/sticky affinity-lost 2"},
		{"leaves after the timeout", []func(*testing.T, *world){see(client, one), wait(100 * time.Second), see(client, two)}, "2 agree"},
		{"leaves a moment before the timeout, which the running proxy counts by another clock", []func(*testing.T, *world){see(client, one), wait(98 * time.Second), see(client, two)}, "2 agree"},
		{"leaves after a timeout that was prolonged later", []func(*testing.T, *world){see(client, one), wait(time.Second), with(func(s *v1.Service) {
			sticky(s)
			s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds = ptr.To[int32](1000)
		}), wait(150 * time.Second), see(client, two)}, "2 agree"},
		{"its endpoint went long ago, and returned", []func(*testing.T, *world){see(client, one), endpoints(two), endpoints(one, two), wait(4 * settle), see(client, two)}, "2 agree"},
		{"leaves before the prolonged timeout", []func(*testing.T, *world){see(client, one), wait(60 * time.Second), see(client, one), wait(60 * time.Second), see(client, two)},
			"2 agree, shop/sticky affinity-lost 1"},
		{"two at once", []func(*testing.T, *world){see(client, one), see(client, two), wait(time.Second), see(client, one), wait(time.Second), see(client, one)}, "4 agree"},
		{"its endpoint goes", []func(*testing.T, *world){see(client, one), wait(time.Second), endpoints(two), wait(time.Second), see(client, two)}, "2 agree"},
		{"its endpoint goes, and the running proxy is first", []func(*testing.T, *world){see(client, one), wait(time.Second), see(client, two), wait(time.Second), endpoints(two)}, "2 agree"},
		{"its endpoint goes for a moment, and the running proxy is later", []func(*testing.T, *world){
			see(client, one), wait(time.Second), endpoints(two), wait(time.Second), endpoints(one, two), wait(time.Second), see(client, one), wait(time.Second), see(client, two),
		}, "3 agree"},
		{"another endpoint goes and comes", []func(*testing.T, *world){see(client, one), wait(time.Second), endpoints(one), endpoints(one, two, three), wait(time.Second), see(client, three)},
			"1 agree, shop/sticky affinity-lost 1"},
		{"affinity comes", []func(*testing.T, *world){with(), wait(4 * settle), see(client, one), see(client, two), wait(time.Second), with(sticky), see(client, one), wait(time.Second), see(client, two)}, "4 agree"},
		{"affinity came long ago", []func(*testing.T, *world){with(), with(sticky), wait(4 * settle), see(client, one), wait(time.Second), see(client, two)}, "1 agree, shop/sticky affinity-lost 1"},
		{"affinity goes", []func(*testing.T, *world){see(client, one), with(), wait(time.Second), see(client, two)}, "2 agree"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			for _, step := range test.steps {
				step(t, w)
			}
			w.Settled(true)
			if got := summary(w.Report()); got != test.want {
				t.Errorf("%s, want %s", got, test.want)
			}
		})
	}
}

// TestIPVS: a connection counts once, whichever of conntrack and IPVS shows it first, and older ones
// do not count.
func TestIPVS(t *testing.T) {
	old, agrees, wrong := connection("10.244.1.6 10.96.0.10 10.244.2.9"), connection("10.244.1.7 10.96.0.10 10.244.2.1"), connection("10.244.1.8 10.96.0.10 10.244.2.9")
	untracked := func(c Connection) Connection {
		c.Backend = c.Dialed
		return c
	}
	for _, test := range []struct {
		name string
		see  []Connection // by conntrack, between the lists
		list []Connection
		late []Connection // by conntrack, after them
		want string
	}{
		{"only IPVS", nil, []Connection{old, agrees, wrong}, nil, "1 agree, shop/web wrong-backend 1"},
		{"conntrack first", []Connection{agrees, wrong}, []Connection{old, agrees, wrong}, nil, "1 agree, shop/web wrong-backend 1"},
		{"conntrack first, without translation", []Connection{untracked(agrees), untracked(wrong)}, []Connection{old, agrees, wrong}, nil, "1 agree, shop/web wrong-backend 1"},
		{"IPVS first", nil, []Connection{old, agrees, wrong}, []Connection{agrees, untracked(wrong)}, "1 agree, shop/web wrong-backend 1"},
		{"only conntrack, without translation", []Connection{untracked(agrees)}, nil, nil, "0 agree, shop/web not-translated 1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.ObserveIPVS([]Connection{old}, true)
			for _, c := range test.see {
				w.Observe(c)
			}
			w.ObserveIPVS(test.list, false)
			for _, c := range test.late {
				w.Observe(c)
			}
			w.ObserveIPVS(test.list, false)
			w.Settled(true)
			if got := summary(w.Report()); got != test.want {
				t.Errorf("%s, want %s", got, test.want)
			}
		})
	}
}

func TestReport(t *testing.T) {
	w := newWorld(t)
	for range 5 {
		w.Observe(connection("10.244.1.7 10.96.0.10 10.244.2.9"))
	}
	w.Observe(connection("10.244.1.7 10.96.0.10 10.244.2.1"))
	w.Lost()
	w.now = w.now.Add(2 * settle)
	w.Settled(false)
	var text strings.Builder
	r := w.Report()
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	if len(r.Examples) != examplesPerKind {
		t.Errorf("%d examples", len(r.Examples))
	}
	for _, want := range []string{
		"node1, 1m20s: 6 connections to Services, 1 agree, 5 disagree\n", "the kernel lost notifications 1 times",
		"shop/web      TCP    6            1      5         1 of 2          wrong-backend: 5\n",
		"TCP 10.244.1.7:5 -> 10.96.0.10:80: was translated to 10.244.2.9:8080, which is not eligible\n    forward: to one of 2 endpoints\n",
		"shop/local TCP ClusterIP 10.96.0.20:80\n",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, &text)
		}
	}
}

// TestReportPage: docs/preflight.md shows what is reported of a kube-proxy that leads a connection to an endpoint that is not eligible.
func TestReportPage(t *testing.T) {
	now := time.Date(2026, 11, 23, 5, 40, 0, 0, time.UTC)
	w := New(Options{Node: "node1", Settle: settle, NodePorts: Range{30000, 32767}, Now: func() time.Time { return now }})
	px, err := proxier.New(proxier.Options{NodeName: "node1", Tier: w, Facts: facts(), Runner: proxier.DefaultRunnerOptions()})
	if err != nil {
		t.Fatal(err)
	}
	w.Follow(px.Table())
	w.Start()
	vips := map[string]string{"web": "10.96.0.10", "local": "10.96.0.20"}
	for name, vip := range vips {
		px.OnServiceAdd(service(name, vip, 0, func(s *v1.Service) {
			s.Spec.Type = v1.ServiceTypeClusterIP
			s.Spec.Ports = []v1.ServicePort{{Name: "tcp", Port: 80, Protocol: v1.ProtocolTCP}, {Name: "udp", Port: 80, Protocol: v1.ProtocolUDP}}
		}))
		s := slice(name, "10.244.1.2", "10.244.2.1")
		s.Name = name + "-ipv4"
		s.Ports = append(s.Ports, s.Ports[0])
		for i, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
			s.Ports[i].Name, s.Ports[i].Protocol = ptr.To(strings.ToLower(string(protocol))), ptr.To(protocol)
		}
		px.OnEndpointSliceAdd(s)
	}
	px.OnServiceSynced()
	px.OnEndpointSlicesSynced()
	if err := px.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	now = now.Add(9*time.Minute + 5*time.Second)
	for name, vip := range vips {
		for _, protocol := range []proxier.Protocol{proxier.TCP, proxier.UDP} {
			for n := range 22 {
				c := connection("10.244.1.1:33044 " + vip + " " + []string{"10.244.1.2", "10.244.2.1"}[n%2])
				if c.Protocol = protocol; name == "web" && protocol == proxier.TCP && n == 21 {
					c.Backend = netip.MustParseAddrPort("10.244.1.3:8080")
				}
				w.Observe(c)
			}
		}
	}
	now = now.Add(55 * time.Second)
	w.Settled(true)
	var text strings.Builder
	if err := w.Report().WriteText(&text); err != nil {
		t.Fatal(err)
	}
	golden.Shown(t, "../../docs/preflight.md", "tandemctl shadow --for 10m", "tandemctl: watching 4 service ports; interrupt to end early\n"+text.String())
}
