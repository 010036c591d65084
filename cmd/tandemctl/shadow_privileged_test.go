// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/observe/shadow"
	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/scenarios"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
	"github.com/tandem-proxy/tandem/test/upstream"
)

const testPatience = time.Minute

// watching is a tandemctl shadow that runs on a node.
type watching struct {
	*lab.Watched
	node *lab.Node
	out  lab.Log
}

// watch starts it for the API of a kube-proxy, with flags of its configuration.
func watch(t *testing.T, at *lab.Node, args ...string) *watching {
	t.Helper()
	w := &watching{Watched: lab.Watch(program(t, "tandemctl", at.Sandbox, append([]string{"shadow", "--for=1h", "--node=" + at.Name, "-o", "json"}, args...)...))}
	w.Stdout = &w.out
	w.Begin(t)
	w.Await(t, testPatience, "shadow watches", w.Says("watching"))
	return w
}

// end interrupts it and returns its report.
func (w *watching) end(t *testing.T, code int) *shadow.Report {
	t.Helper()
	r := w.report(t)
	if got := w.ProcessState.ExitCode(); got != code {
		t.Errorf("exit code %d, want %d\n%s", got, code, w.Log)
	}
	return r
}

// report interrupts it, if that has not been done, and returns its report.
func (w *watching) report(t *testing.T) *shadow.Report {
	t.Helper()
	_ = w.Process.Signal(os.Interrupt)
	_ = w.Wait()
	r := &shadow.Report{}
	if err := json.Unmarshal([]byte(w.out.String()), r); err != nil {
		t.Fatalf("%v\n%s%s", err, w.out.String(), w.Log)
	}
	return r
}

func portOf(r *shadow.Report, service, protocol string) shadow.Port {
	i := slices.IndexFunc(r.Ports, func(p shadow.Port) bool { return p.Service == service && p.Protocol == protocol })
	if i < 0 {
		return shadow.Port{}
	}
	return r.Ports[i]
}

// shadowed is a Service of every kind, with both protocols and families. The number tells its addresses.
func shadowed(name string, last int, policy v1.ServiceExternalTrafficPolicy, affinity v1.ServiceAffinity) *v1.Service {
	ports := []v1.ServicePort{}
	for i, p := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
		ports = append(ports, v1.ServicePort{Name: strings.ToLower(string(p)), Protocol: p, Port: 80, NodePort: int32(30000 + last*10 + i)})
	}
	ips := []string{fmt.Sprintf("10.96.0.%d", last), fmt.Sprintf("fd00:10:96::%d", last)}
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeLoadBalancer, ClusterIP: ips[0], ClusterIPs: ips, IPFamilies: []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol},
			Ports: ports, ExternalTrafficPolicy: policy, InternalTrafficPolicy: ptr(v1.ServiceInternalTrafficPolicyCluster),
			SessionAffinity: affinity, SessionAffinityConfig: &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr(int32(10800))}},
		},
		Status: v1.ServiceStatus{LoadBalancer: v1.LoadBalancerStatus{Ingress: []v1.LoadBalancerIngress{
			{IP: fmt.Sprintf("203.0.113.%d", last), IPMode: ptr(v1.LoadBalancerIPModeVIP)}, {IP: fmt.Sprintf("2001:db8:203:113::%d", last), IPMode: ptr(v1.LoadBalancerIPModeVIP)},
		}}},
	}
}

// slicesOf are the endpoints of a Service.
func slicesOf(service string, pods ...*lab.Pod) (list []fakeapi.Object) {
	for _, kind := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: strings.ToLower(service + "-" + string(kind)), Labels: map[string]string{discoveryv1.LabelServiceName: service}},
			AddressType: kind,
		}
		for _, p := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
			s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr(strings.ToLower(string(p))), Port: ptr(int32(8080)), Protocol: ptr(p)})
		}
		for _, pod := range pods {
			address := pod.Addr4
			if kind == discoveryv1.AddressTypeIPv6 {
				address = pod.Addr6
			}
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{address.String()}, NodeName: &pod.Node.Name, Conditions: discoveryv1.EndpointConditions{Ready: ptr(true)}})
		}
		list = append(list, s)
	}
	return list
}

// TestShadow runs beside upstream's kube-proxy, with traffic from everywhere to every kind of
// address, and changes. Nothing disagrees, but for a rule that something else planted.
func TestShadow(t *testing.T) {
	for _, mode := range []string{"iptables", "nftables", "ipvs"} {
		t.Run(mode, func(t *testing.T) {
			if mode == "ipvs" {
				upstream.NeedsIPVS(t, lab.NewT(t).Node("node1"))
			}
			testShadow(t, upstream.Options{Binary: upstream.BinaryT(t), Mode: mode})
		})
	}
	// Where upstream's program is missing, as under most kernels with IPVS.
	t.Run("tandem/ipvs", func(t *testing.T) {
		upstream.NeedsIPVS(t, lab.NewT(t).Node("node1"))
		testShadow(t, upstream.Options{Binary: os.Args[0], Mode: "ipvs", Env: []string{asProgram + "=kube-proxy"}})
	})
}

func testShadow(t *testing.T, proxy upstream.Options) {
	l := lab.NewT(t)
	one, two, client := l.Node("node1"), l.Node("node2"), l.Client("client")
	shell, near, far, other := one.Pod("shell"), one.Pod("near"), two.Pod("far"), one.Pod("other")
	for _, p := range []*lab.Pod{near, far, other} {
		if _, err := p.ServeTCP(8080); err != nil {
			t.Fatal(err)
		}
		if _, err := p.ServeUDP(8080); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{"203.0.113.0/24", "2001:db8:203:113::/64"} {
		if err := l.Announce(netip.MustParsePrefix(p), one); err != nil {
			t.Fatal(err)
		}
	}
	const web, local, sticky = 10, 20, 30
	objects := []fakeapi.Object{
		shadowed("web", web, v1.ServiceExternalTrafficPolicyCluster, v1.ServiceAffinityNone), shadowed("local", local, v1.ServiceExternalTrafficPolicyLocal, v1.ServiceAffinityNone),
		shadowed("sticky", sticky, v1.ServiceExternalTrafficPolicyCluster, v1.ServiceAffinityClientIP),
	}
	for _, name := range []string{"web", "local", "sticky"} {
		objects = append(objects, slicesOf(name, near, far)...)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*testPatience)
	defer cancel()
	proxy.Objects, proxy.Args = objects, upstream.Flags
	p, err := upstream.Start(ctx, one, proxy)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	flags := []string{fmt.Sprint("--settle=", max(2*time.Second, lab.RequestTimeout())), "--", "--master=" + p.URL, "--cluster-cidr=10.244.0.0/16,fd00:10:244::/48"}

	addresses := func(last int) (all []netip.AddrPort) {
		for _, a := range []string{"10.96.0.%d", "fd00:10:96::%d", "203.0.113.%d", "2001:db8:203:113::%d"} {
			all = append(all, netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf(a, last)), 80))
		}
		return append(all, netip.AddrPortFrom(one.Addr4, uint16(30000+last*10)), netip.AddrPortFrom(one.Addr6, uint16(30000+last*10)))
	}
	asked := 0
	ask := func(rounds int, services ...int) {
		t.Helper()
		for _, from := range []*lab.Sandbox{shell.Sandbox, near.Sandbox, one.Sandbox, client.Sandbox} {
			for _, last := range services {
				for _, to := range addresses(last) {
					if from == client.Sandbox && (strings.HasPrefix(to.String(), "10.96.") || strings.HasPrefix(to.String(), "[fd00:10:96:")) {
						continue // the fabric has no route there
					}
					for i, network := range []string{"tcp", "udp"} {
						if to.Port() > 80 {
							to = netip.AddrPortFrom(to.Addr(), uint16(30000+last*10+i))
						}
						for range rounds {
							if _, err := from.Ask(ctx, network, to); err != nil {
								t.Errorf("%s to %s by %s: %v", from.Name, to, network, err)
							}
							asked++
						}
					}
				}
			}
		}
	}
	unchanged := func(before string) {
		t.Helper()
		if d := cmp.Diff(before, state(t, one)); d != "" {
			t.Errorf("it changed the node:\n%s", d)
		}
	}
	// It changes nothing. Clients of the Service with affinity would add to the rules of mode nftables.
	before := state(t, one)
	w := watch(t, one, flags...)
	ask(1, web, local)
	unchanged(before)
	w.end(t, 0)
	unchanged(before)

	asked = 0
	w = watch(t, one, flags...)
	ask(2, web, local, sticky)
	// Changes under traffic.
	for i := range 6 {
		pods := []*lab.Pod{near, far}
		if i%2 == 0 {
			pods = append(pods, other)
		}
		for _, s := range slicesOf("web", pods...) {
			p.API.Put(s)
		}
		ask(1, web, local, sticky)
	}
	r := w.end(t, 0)
	if r.Disagreements != 0 || r.Lost > 0 || r.Connections < asked*9/10 {
		t.Errorf("%d connections of %d, %d disagree: %+v", r.Connections, asked, r.Disagreements, r.Examples)
	}
	if n := portOf(r, "shop/web:tcp", "TCP"); n.Connections == 0 || n.EndpointsSeen < 4 {
		t.Errorf("%+v", n)
	}
	if len(r.NeverSeen) != 0 {
		t.Errorf("never seen: %+v", r.NeverSeen)
	}
	if t.Failed() {
		return
	}

	// Planted rules lead to a pod that is no endpoint, and clients of a Service with affinity to endpoints in turn.
	w = watch(t, one, flags...)
	plant := one.Command(ctx, "nft", "-f", "-")
	plant.Stdin = strings.NewReader(fmt.Sprintf(`table ip planted {
				chain output { type nat hook output priority -110; ip daddr 10.96.0.10 tcp dport 80 dnat to %[1]s:8080; }
				chain prerouting {
					type nat hook prerouting priority -110
					ip daddr { 10.96.0.10, 203.0.113.20 } tcp dport 80 dnat to %[1]s:8080
					ip daddr 10.96.0.30 tcp dport 80 numgen inc mod 2 0 dnat to %[2]s:8080
					ip daddr 10.96.0.30 tcp dport 80 dnat to %[3]s:8080
				}
			}`, other.Addr4, near.Addr4, far.Addr4))
	if out, err := plant.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, s := range slicesOf("web", near, far) {
		p.API.Put(s)
	}
	ask(1, web, local, sticky)
	for begun := time.Now(); time.Since(begun) < time.Second; { // longer than two connections count as made at once
		if _, err := shell.Ask(ctx, "tcp", netip.MustParseAddrPort("10.96.0.30:80")); err != nil {
			t.Error(err)
		}
	}
	r = w.end(t, 1)
	wrong := portOf(r, "shop/web:tcp", "TCP")
	if wrong.Kinds[shadow.WrongBackend] < 3 {
		t.Errorf("%+v", wrong)
	}
	if n := portOf(r, "shop/local:tcp", "TCP"); n.Kinds[shadow.WrongBackend] == 0 {
		t.Errorf("%+v", n)
	}
	if n := portOf(r, "shop/sticky:tcp", "TCP"); n.Kinds[shadow.AffinityLost] < 3 {
		t.Errorf("%+v", n)
	}
	if n := portOf(r, "shop/web:udp", "UDP"); n.Disagreements != 0 || n.Agreements == 0 {
		t.Errorf("%+v", n)
	}
	if len(r.Examples) == 0 || r.Examples[0].Explanation == nil || len(r.Examples[0].Explanation.Endpoints) == 0 {
		t.Errorf("examples %+v", r.Examples)
	}
	var text strings.Builder
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", &text)
}

// observer fails a scenario only if upstream does not program a change: which calls it answers
// otherwise is another test's matter.
type observer struct {
	testing.TB
	unsynced bool // it is known that it does not
}

func (observer) Helper()              {}
func (observer) Skipf(string, ...any) {}

func (o observer) Errorf(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !o.unsynced && strings.Contains(text, upstream.NoSync) {
		o.TB.Errorf("%s", text)
	}
}

// excused are disagreements by what docs/compatibility.md says of upstream: expressions for a
// scenario and its service ports, and the kinds.
var excused = []struct {
	scenario, services string
	kinds              []shadow.Kind
}{
	{"c43-localhost", "default/web:(http|h3)", []shadow.Kind{shadow.NotTranslated}},
	{"c43-localhost-node-ports", "default/web:http", []shadow.Kind{shadow.NotTranslated}},
	{"s0[35]-conflict.*|s08-conflict-node-port", "default/(older|younger|a|b):.*", []shadow.Kind{shadow.WrongBackend, shadow.NotRefused}},
	{"s05-external-ip-cannot-steal|s06-load-balancer-ip-cannot-steal", "default/(thief|victim|web):http", []shadow.Kind{shadow.WrongBackend, shadow.NotRefused}},
	{"s09-ports-twice", "default/web:[abc]", []shadow.Kind{shadow.WrongBackend, shadow.NotRefused}},
	{"s88-restart", "default/(a|b):http", []shadow.Kind{shadow.WrongBackend, shadow.NotRefused}},
	{"s06-one-address-twice|s48-ranges-invalid|s96-denied-ranges", "default/web:http", []shadow.Kind{shadow.NotRefused}},
	{"s20-slice-changes-service", "default/(other|web):http", []shadow.Kind{shadow.NotRefused}},
	{"s22-copies-alike|s22-ready-copy", "default/web:http", []shadow.Kind{shadow.WrongBackend, shadow.NotRefused}},
	{"s28-same-node-then-zone", "default/web:http", []shadow.Kind{shadow.WrongBackend}},
	{"s45-pods-of-other-nodes", "default/web:http", []shadow.Kind{shadow.WrongBackend, shadow.NotRefused}},
	{"s92-maintenance", "default/web:(http|dns)", []shadow.Kind{shadow.WrongBackend, shadow.NotRefused}},
	{"s95-type|s97-nodes", `\(no Service\)`, []shadow.Kind{shadow.UnknownService}},
	{"s100-rejected-ranges", "default/web:(http|dns)", []shadow.Kind{shadow.NotRefused}},
}

// isExcused reports whether the page explains a kind of disagreement of a service port.
func isExcused(mode, scenario string, r *shadow.Report, p *shadow.Port, kind shadow.Kind) bool {
	switch {
	// It sends on what policy Local leaves no endpoint for.
	case mode == "ipvs" && kind == shadow.NotRefused && allExamples(r, p, kind, func(x *shadow.Example) bool {
		f := x.Explanation.Frontend
		return f.Admitted && strings.HasSuffix(f.Set, "/local")
	}):
		return true
	// It serves no NodePort at loopback addresses.
	case mode == "nftables" && kind == shadow.NotTranslated && allExamples(r, p, kind, func(x *shadow.Example) bool { return x.Dialed.Addr().IsLoopback() }):
		return true
	}
	for _, e := range excused {
		if slices.Contains(e.kinds, kind) && matches(e.scenario, scenario) && matches(e.services, p.Service) {
			return true
		}
	}
	return false
}

func matches(expression, text string) bool {
	return regexp.MustCompile("^(" + expression + ")$").MatchString(text)
}

// allExamples reports whether all examples of a kind of disagreement of a service port are as is told.
func allExamples(r *shadow.Report, p *shadow.Port, kind shadow.Kind, is func(*shadow.Example) bool) bool {
	found := false
	for i := range r.Examples {
		x := &r.Examples[i]
		f := x.Explanation.Frontend
		if x.Kind != kind || x.Protocol != p.Protocol || f == nil || strings.TrimSuffix(f.Namespace+"/"+f.Name+":"+f.Port, ":") != p.Service {
			continue
		}
		if found = is(x); !found {
			return false
		}
	}
	return found
}

// TestShadowScenarios plays scenarios with upstream's kube-proxy, in its modes by turns, and a tool that
// watches on each node. It raises no alarm but those that the page of differences explains.
func TestShadowScenarios(t *testing.T) {
	binary := upstream.BinaryT(t)
	if err := lab.Available(); err != nil {
		lab.SkipOrFail(t, err)
	}
	list, err := scenarios.WithoutPods()
	if err != nil {
		t.Fatal(err)
	}
	step := 1
	if testing.Short() {
		step = 30
	}
	differences, err := os.ReadFile("../../docs/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range excused {
		if !regexp.MustCompile("(?m)^\\| `(" + e.scenario + ")` \\|").Match(differences) {
			t.Errorf("docs/compatibility.md has no row of %s, whose disagreements are excused", e.scenario)
		}
	}
	var mu sync.Mutex
	connections := 0
	play := func(t *testing.T, s *scenarios.Scenario, mode string) {
		var watched []*watching
		p := upstream.Program{Binary: binary, Mode: mode}
		p.Started = func(_ context.Context, node *lab.Node, _ *upstream.Proxy, flags []string) error {
			mu.Lock()
			defer mu.Unlock()
			for _, w := range watched {
				if w.node == node {
					_ = w.Process.Signal(os.Interrupt) // of an earlier process
				}
			}
			w := watch(t, node, append([]string{fmt.Sprint("--settle=", lab.Slower()*time.Second), "--"}, flags...)...)
			w.node = node
			watched = append(watched, w)
			return nil
		}
		ended := false
		o := observer{t, strings.Contains(string(differences), "| `"+s.Name+"` | `apply ")}
		live.PlayProgramThen(o, s, p, func() {
			ended = true
			for _, w := range watched {
				r := w.report(t)
				mu.Lock()
				connections += r.Connections
				mu.Unlock()
				var alarms []string
				for _, port := range r.Ports {
					for kind, n := range port.Kinds {
						if !isExcused(mode, s.Name, r, &port, kind) {
							alarms = append(alarms, fmt.Sprintf("%d of %s %s %s", n, port.Service, port.Protocol, kind))
						}
					}
				}
				if len(alarms) > 0 {
					var text strings.Builder
					_ = r.WriteText(&text)
					t.Errorf("mode %s, %s: %v: %s\n%s", mode, w.node.Name, alarms, &text, w.Log)
				}
			}
		})
		if !ended {
			t.Error("the scenario did not end")
		}
	}
	hasIPVS := false
	t.Run("ipvs", func(t *testing.T) {
		upstream.NeedsIPVS(t, lab.NewT(t).Node("node1"))
		hasIPVS = true
	})
	next := make(chan func())
	var wg sync.WaitGroup
	for range upstream.Players() {
		wg.Go(func() {
			for do := range next {
				do()
			}
		})
	}
	modes := []string{"iptables", "nftables"}
	if hasIPVS {
		modes = append(modes, "ipvs")
	}
	number := 0
	for i := 0; i < len(list); i += step {
		for m, mode := range modes {
			if m < 2 && testing.Short() && m != i/step%2 {
				continue // modes iptables and nftables by turns
			}
			if kernel.Dealt(number) {
				next <- func() { t.Run(mode+"/"+list[i].Name, func(t *testing.T) { play(t, list[i], mode) }) }
			}
			number++
		}
	}
	close(next)
	wg.Wait()
	// A part of the scenarios can be one, in which no call reaches a Service.
	if t.Logf("%d connections", connections); connections == 0 && !kernel.IsPart() {
		t.Error("no connection was seen")
	}
}
