// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// sharedNode has upstream's kube-proxy, and clients of all origins.
type sharedNode struct {
	*stage
	theirs     *upstream.Proxy
	theirsIn   string // mode
	theirFlags []string
}

// everyKind is a Service with a frontend of each kind, in both families.
func everyKind() *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "uid-of-web"},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeLoadBalancer, ClusterIP: vip4.Addr().String(), ClusterIPs: []string{vip4.Addr().String(), vip6.Addr().String()},
			IPFamilies: []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}, ExternalIPs: []string{"203.0.113.20", "2001:db8:203:113::20"},
			ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyCluster, InternalTrafficPolicy: ptr.To(v1.ServiceInternalTrafficPolicyCluster),
			Ports: []v1.ServicePort{
				{Name: "t", Port: 80, Protocol: v1.ProtocolTCP, NodePort: 30080, TargetPort: intstr.FromInt32(targetPort)},
				{Name: "u", Port: 80, Protocol: v1.ProtocolUDP, NodePort: 30080, TargetPort: intstr.FromInt32(targetPort)},
			},
		},
		Status: v1.ServiceStatus{LoadBalancer: v1.LoadBalancerStatus{Ingress: []v1.LoadBalancerIngress{{IP: "203.0.113.10", IPMode: ptr.To(v1.LoadBalancerIPModeVIP)}, {IP: "2001:db8:203:113::10", IPMode: ptr.To(v1.LoadBalancerIPModeVIP)}}}},
	}
}

// endpoints of that Service.
func endpoints(pods ...*lab.Pod) (list []fakeapi.Object) {
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: "web-" + strings.ToLower(string(family)), Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
			AddressType: family,
			Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("t"), Port: ptr.To[int32](targetPort), Protocol: ptr.To(v1.ProtocolTCP)}, {Name: ptr.To("u"), Port: ptr.To[int32](targetPort), Protocol: ptr.To(v1.ProtocolUDP)}},
		}
		for _, p := range pods {
			addr := p.Addr4
			if family == discoveryv1.AddressTypeIPv6 {
				addr = p.Addr6
			}
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{addr.String()}, NodeName: &p.Node.Name, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}})
		}
		list = append(list, s)
	}
	return list
}

// addressesOf are those of the Service at a node, by kind.
func addressesOf(n *lab.Node) map[proxier.Kind][]netip.AddrPort {
	return map[proxier.Kind][]netip.AddrPort{
		proxier.ClusterIP:    {vip4, vip6},
		proxier.LoadBalancer: {netip.MustParseAddrPort("203.0.113.10:80"), netip.MustParseAddrPort("[2001:db8:203:113::10]:80")},
		proxier.ExternalIP:   {netip.MustParseAddrPort("203.0.113.20:80"), netip.MustParseAddrPort("[2001:db8:203:113::20]:80")},
		proxier.NodePort:     {netip.AddrPortFrom(n.Addr4, 30080), netip.AddrPortFrom(n.Addr6, 30080)},
	}
}

// newSharedNode starts upstream's kube-proxy on a stage.
func newSharedNode(t *testing.T, mode string, pods func(*stage) []*lab.Pod) *sharedNode {
	t.Helper()
	kernel.NeedsPrograms(t)
	s := &sharedNode{stage: newStage(t, lab.Options{PortsInTurn: mode == "ipvs"}), theirsIn: mode}
	if mode == "ipvs" {
		upstream.NeedsIPVS(t, s.node)
		s.keepsUDP()
	}
	for _, prefix := range []string{"203.0.113.20/32", "2001:db8:203:113::20/128", vip4.Addr().String() + "/32", vip6.Addr().String() + "/128"} {
		if err := s.lab.Announce(netip.MustParsePrefix(prefix), s.node); err != nil {
			t.Fatal(err)
		}
	}
	s.startTheirs(pods(s.stage)...)
	return s
}

func (s *sharedNode) startTheirs(pods ...*lab.Pod) {
	s.t.Helper()
	var err error
	s.theirs, err = upstream.Start(s.t.Context(), s.node, upstream.Options{
		Binary: upstream.BinaryT(s.t), Mode: s.theirsIn, Objects: append(endpoints(pods...), everyKind()), Args: append(slices.Clone(upstream.Flags), s.theirFlags...),
	})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = s.theirs.Close() })
}

// origins are a client of each origin.
func (s *sharedNode) origins() [proxier.Origins]*lab.Sandbox {
	return [proxier.Origins]*lab.Sandbox{proxier.FromPod: s.client.Sandbox, proxier.FromHost: s.node.Sandbox, proxier.FromOutside: s.far.Sandbox}
}

// state is what this proxy must not change.
func (s *sharedNode) state() string {
	s.t.Helper()
	state, err := s.node.State(context.Background())
	if err != nil {
		s.t.Fatal(err)
	}
	return state
}

// share is what this proxy serves beside upstream's, and the flags for it.
type share struct {
	name    string
	flags   []string
	kinds   []proxier.Kind
	clients []proxier.Origin
}

var shares = []share{
	{"socket-lb", []string{"--coexist=socket-lb"}, proxier.Kinds(), []proxier.Origin{proxier.FromPod, proxier.FromHost}},
	{"north-south", []string{"--coexist=north-south"}, proxier.Kinds(), []proxier.Origin{proxier.FromOutside}},
	{"ClusterIPs of pods", []string{"--coexist-frontends=ClusterIP", "--coexist-clients=pods"}, []proxier.Kind{proxier.ClusterIP}, []proxier.Origin{proxier.FromPod}},
	{"NodePorts", []string{"--coexist-frontends=NodePort"}, []proxier.Kind{proxier.NodePort}, []proxier.Origin{proxier.FromPod, proxier.FromHost, proxier.FromOutside}},
	{"external addresses of the host and outside", []string{"--coexist-frontends=LoadBalancer,ExternalIP", "--coexist-clients=host,external"},
		[]proxier.Kind{proxier.LoadBalancer, proxier.ExternalIP}, []proxier.Origin{proxier.FromHost, proxier.FromOutside}},
}

// startOurs starts this proxy with other endpoints than upstream's, or the same.
func (s *sharedNode) startOurs(api *fakeapi.API, flags ...string) {
	s.t.Helper()
	s.process = startWith(s.t, s.node, api, flags...)
	s.synced(s.t)
	if !slices.Contains(flags, "--coexist=socket-lb") && !slices.Contains(flags, "--coexist-clients=pods") {
		s.serves(s.t)
	}
}

// endOurs removes the programs, and nothing of the other kube-proxy.
func (s *sharedNode) endOurs() {
	s.t.Helper()
	if s.process != nil {
		_ = s.process.Close()
	}
	before := s.state()
	p := command(s.node, "--cleanup", "--proxy-mode=ebpf", "--coexist=socket-lb")
	if err := p.Run(); err != nil {
		s.t.Errorf("--cleanup: %v\n%s", err, p.Log)
	}
	if on := devicesWithPrograms(s.t, s.node); len(on) > 0 {
		s.t.Errorf("after the cleanup there are programs on %v", on)
	}
	if after := s.state(); after != before {
		s.t.Errorf("the cleanup has changed the node (-before +after):\n%s", cmp.Diff(before, after))
	}
}

// Every frontend is served by exactly one of two kube-proxies, for each client: they have
// different endpoints, so that the answer tells which one it was. Ours writes no rule and no
// setting.
func TestShares(t *testing.T) {
	for _, mode := range []string{"iptables", "nftables", "ipvs"} {
		t.Run(mode, func(t *testing.T) {
			var more [2]*lab.Pod
			s := newSharedNode(t, mode, func(s *stage) []*lab.Pod {
				more = [2]*lab.Pod{serve(t, s.node.Pod("here2")), serve(t, s.there.Node.Pod("there2"))}
				return more[:]
			})
			defer s.endOurs()
			theirs := map[string]bool{more[0].Name: true, more[1].Name: true}
			before := s.state()
			for _, sh := range shares {
				t.Run(sh.name, func(t *testing.T) {
					api := fakeapi.New(append(endpoints(s.here, s.there), everyKind(), upstream.NodeObject(s.node))...)
					s.startOurs(api, sh.flags...)
					defer func() { s.Terminate(t); s.process = nil }()
					ports := addressesOf(s.node)[proxier.NodePort]
					protected := slices.Contains(sh.kinds, proxier.NodePort)
					for _, to := range ports {
						if err := s.node.Do(func() error { return bind(to) }); (err != nil) != protected {
							t.Errorf("bind NodePort %s: %v; ours to protect: %v", to, err, protected)
						}
					}
					for o, from := range s.origins() {
						for kind, list := range addressesOf(s.node) {
							for _, to := range list {
								ours := slices.Contains(sh.kinds, kind) && slices.Contains(sh.clients, proxier.Origin(o))
								for _, network := range []string{"tcp", "udp"} {
									r, err := from.Ask(t.Context(), network, to)
									if err != nil || theirs[r.Server] == ours {
										t.Errorf("%s %s %s by %s: %s answers, %v; ours to serve: %v", proxier.Origin(o), kind, to, network, r.Server, err, ours)
									}
								}
							}
						}
					}
				})
				if after := s.state(); after != before {
					t.Errorf("the node has changed (-before +after):\n%s", cmp.Diff(before, after))
				}
			}
		})
	}
}

// bind listens for a moment.
func bind(to netip.AddrPort) error {
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(to))
	if err != nil {
		return err
	}
	return l.Close()
}

// Changes of endpoints, and kills of either kube-proxy, under load from clients of all origins: no
// connection fails, and established ones survive.
func TestSharedUnderLoad(t *testing.T) {
	for _, mode := range []string{"iptables", "nftables", "ipvs"} {
		for _, sh := range shares[:2] { // the presets
			t.Run(mode+"/"+sh.name, func(t *testing.T) {
				pace := strictly
				if mode == "ipvs" {
					pace = slowly
				}
				var more *lab.Pod
				s := newSharedNode(t, mode, func(s *stage) []*lab.Pod {
					more = serve(t, s.node.Pod("here2"))
					return []*lab.Pod{s.here, s.there}
				})
				defer s.endOurs()
				w, theirs := lab.NewLoad(t), lab.NewLoad(t)
				defer w.End()
				defer theirs.End()
				for o, from := range s.origins() {
					load := w
					// Virtual servers of upstream's lose requests that are under way to an endpoint that is removed.
					if mode == "ipvs" && !slices.Contains(sh.clients, proxier.Origin(o)) {
						load = theirs
					}
					for kind, list := range addressesOf(s.node) {
						ways := map[string]netip.AddrPort{}
						for i, to := range list {
							for _, network := range []string{"tcp", "udp"} {
								ways[fmt.Sprintf("%s%d to a %s from %s", network, 4+2*i, kind, proxier.Origin(o))] = to
							}
						}
						load.Use(from, ways, pace)
					}
				}
				long := append(openFlows(t, s.client.Sandbox, targets(), s.here, s.there), openFlows(t, s.far.Sandbox, outside(s.node), s.here, s.there)...)
				long = append(long, openFlows(t, s.node.Sandbox, targets(), s.here, s.there)...)
				w.More(200)
				api := fakeapi.New(append(endpoints(s.here, s.there), everyKind(), upstream.NodeObject(s.node))...)
				s.startOurs(api, sh.flags...)
				w.More(200)
				checkAll(t, long)
				change := func(pods ...*lab.Pod) {
					s.theirs.API.Put(endpoints(pods...)...)
					api.Put(endpoints(pods...)...)
				}
				for range 3 { // endpoints that stay, so that UDP flows do
					change(s.here, s.there, more)
					w.More(100)
					change(s.here, s.there)
					w.More(100)
				}
				checkAll(t, long)
				_ = s.process.Close() // SIGKILL
				w.More(200)
				s.startOurs(api, sh.flags...)
				w.More(200)
				checkAll(t, long)
				if err := s.theirs.Close(); err != nil { // SIGKILL
					t.Fatal(err)
				}
				w.More(200)
				checkAll(t, long)
				s.startTheirs(s.here, s.there)
				w.More(200)
				checkAll(t, long)
				w.End()
				few(t, w)
				if again := theirs.Again.Load(); again > 0 {
					t.Logf("of %d requests to virtual servers of upstream's, %d were repeated", theirs.Asked.Load(), again)
				}
			})
		}
	}
}

// Once this proxy is gone, the other one, which has been there all the time, serves everything: the programs would
// stay as they are for ever. Established connections continue.
func TestSharedAndGone(t *testing.T) {
	for i, mode := range []string{"iptables", "nftables"} {
		sh := shares[i] // a preset
		t.Run(sh.name, func(t *testing.T) {
			var more *lab.Pod
			s := newSharedNode(t, mode, func(s *stage) []*lab.Pod {
				more = serve(t, s.node.Pod("here2"))
				return []*lab.Pod{more}
			})
			defer s.endOurs()
			api := fakeapi.New(append(endpoints(s.here, s.there), everyKind(), upstream.NodeObject(s.node))...)
			s.startOurs(api, append([]string{"--ebpf-yield-grace-period=" + lab.RequestTimeout().String()}, sh.flags...)...)
			from, ways := s.client.Sandbox, targets()
			if slices.Contains(sh.clients, proxier.FromOutside) {
				from, ways = s.far.Sandbox, outside(s.node)
			}
			long := openFlows(t, from, ways, s.here, s.there)
			s.process.Await(t, patience, "the other kube-proxy to be seen", s.process.Says("Another kube-proxy serves the rest of the traffic"))
			_ = s.process.Close() // SIGKILL
			s.process = nil
			await(t, "the other kube-proxy to serve everything", func() (err error) {
				for o, from := range s.origins() {
					for kind, list := range addressesOf(s.node) {
						for _, to := range list {
							for _, network := range []string{"tcp", "udp"} {
								r, askErr := from.Ask(t.Context(), network, to)
								if askErr == nil && r.Server != more.Name {
									askErr = fmt.Errorf("%s %s %s by %s: %s answers", proxier.Origin(o), kind, to, network, r.Server)
								}
								err = errors.Join(err, askErr)
							}
						}
					}
				}
				return err
			})
			checkAll(t, long)
		})
	}
}

// A start without coexistence waits for another kube-proxy to end. With coexistence, the proxy
// reports one that is missing, appears or disappears, and shows what is left to it.
func TestOtherProxy(t *testing.T) {
	s := newSharedNode(t, "iptables", func(s *stage) []*lab.Pod { return []*lab.Pod{s.here, s.there} })
	defer s.endOurs()
	api := fakeapi.New(append(endpoints(s.here, s.there), everyKind(), upstream.NodeObject(s.node))...)
	p := startWith(t, s.node, api, "--take-over-delay=10m")
	p.await(t, "the other kube-proxy to be noticed", p.Says(`"Another kube-proxy runs on this node; waiting for it to end`))
	p.await(t, "its Event", func() error { return hasEvent(api, "Warning OtherProxyRuns") })
	if programs := p.Says(`"Opened the eBPF datapath"`)(); programs == nil {
		t.Error("it did not wait")
	}
	_ = s.theirs.Close()
	p.await(t, "it to take over", p.Says(`"The other kube-proxy has ended; taking over"`))
	p.synced(t)
	p.Terminate(t)

	// All TCP and UDP frontends of these kinds fit, and not the one of the Service that comes last.
	sctp, over := everyKind(), &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "z"},
		Spec: v1.ServiceSpec{
			ClusterIP: "10.96.0.99", ClusterIPs: []string{"10.96.0.99"}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}},
		},
	}
	sctp.Spec.Ports = append(sctp.Spec.Ports, v1.ServicePort{Name: "s", Port: 80, Protocol: v1.ProtocolSCTP, NodePort: 30080, TargetPort: intstr.FromInt32(targetPort)})
	api.Put(sctp, over)
	p = startWith(t, s.node, api, "--coexist-frontends=ClusterIP,NodePort", "--coexist-clients=pods,host", "--ebpf-max-frontends=8")
	s.process = p
	p.synced(t)
	p.await(t, "a missing one to be reported", func() error {
		return errors.Join(hasEvent(api, "Warning OtherProxyMissing"), p.Says(`"Found no other kube-proxy on this node`)())
	})
	metric := func(want string) func() error {
		return func() error {
			if _, body, err := s.node.Get(t.Context(), config.SharedMetricsPort, "/metrics"); err != nil || !strings.Contains(body, "\ntandem_other_proxy "+want+"\n") {
				return fmt.Errorf("tandem_other_proxy is not %s: %w", want, err)
			}
			return nil
		}
	}
	p.await(t, "the metric", metric("0"))
	s.startTheirs(s.here, s.there)
	p.await(t, "one that appears", func() error {
		return errors.Join(metric("1")(), hasEvent(api, "Normal OtherProxyRuns"), p.Says(`"Another kube-proxy serves the rest of the traffic" other="mode iptables at 127.0.0.1:10249, process kube-proxy`)())
	})
	for query, want := range map[string]string{
		"src=198.51.100.1&dst=203.0.113.10:80&device=eth0": `left to the other kube-proxy: the kind is not among coexistence.frontends`,
		"src=198.51.100.1&dst=10.96.0.10:80&device=eth0":   `left to the other kube-proxy: the clients are not among coexistence.clients`,
		"src=127.0.0.1&dst=203.0.113.20:80":                `"name":"foreign","carries":true`,
		"src=127.0.0.1&dst=10.96.0.10:80&protocol=sctp":    `the eBPF datapath does not support SCTP`,
		"src=127.0.0.1&dst=10.96.0.99:80":                  `frontends full`,
		"src=127.0.0.1&dst=10.96.0.10:80":                  `"name":"ebpf","carries":true`,
	} {
		if _, body, err := s.node.Get(t.Context(), config.SharedMetricsPort, "/debug/explain?"+query); err != nil || !strings.Contains(body, want) {
			t.Errorf("explain %s does not say %s: %v %s", query, want, err, body)
		}
	}
	_, body, err := s.node.Get(t.Context(), config.SharedMetricsPort, "/debug/carriers")
	for text, want := range map[string]int{
		`"carrier":"foreign"`: 25, `"carrier":"foreign","reason":"the eBPF datapath does not support SCTP"`: 4, `"carrier":"foreign","reason":"frontends full"`: 1,
	} {
		if n := strings.Count(body, text); err != nil || n != want {
			t.Errorf("the frontends that are left: %d of %s, want %d: %v %s", n, text, want, err, body)
		}
	}
	_ = s.theirs.Close()
	p.await(t, "one that disappears", metric("0"))
}

// TestOtherProxyLeaves: another kube-proxy is killed that ran beside this one, which was told nothing of it. What it wrote is removed, as
// after a process before this one: by the fallback, or without one as what another mode left.
func TestOtherProxyLeaves(t *testing.T) {
	beside := func(t *testing.T, s *stage, flags ...string) (*process, *fakeapi.API) {
		api := fakeapi.New(append(endpoints(s.here, s.there), everyKind(), upstream.NodeObject(s.node))...)
		p := startWith(t, s.node, api, append(flags, "--take-over-delay=1s", "--metrics-bind-address=127.0.0.1:10300", "--healthz-bind-address=127.0.0.1:10301")...)
		p.synced(t)
		return p, api
	}
	noticed := func(t *testing.T, p *process) {
		p.await(t, "the other one to be noticed", p.Says(`"Another kube-proxy runs on this node; both write rules`))
	}
	ended := func(t *testing.T, p *process) {
		p.await(t, "its end to be noticed", p.Says(`"The other kube-proxy on this node has ended; removing what it left"`))
	}
	t.Run("upstream's", func(t *testing.T) {
		s := newSharedNode(t, "iptables", func(s *stage) []*lab.Pod { return []*lab.Pod{s.here, s.there} })
		defer s.endOurs()
		p, _ := beside(t, s.stage)
		s.process = p
		noticed(t, p)
		p.await(t, "its rules to be removed", func() error { return holds(t, s.node, "KUBE-S", false) })
		s.theirs.API.Put(endpoints(s.here)[0])
		p.await(t, "it to write them again", func() error { return holds(t, s.node, ":KUBE-SVC-", true) })
		_ = s.theirs.Close()
		ended(t, p)
		p.await(t, "its rules to be removed once more", func() error { return holds(t, s.node, "KUBE-S", false) })
	})
	t.Run("ours in mode iptables, without a fallback", func(t *testing.T) {
		s := newStage(t)
		p, api := beside(t, s, "--ebpf-fallback=none")
		other := startWith(t, s.node, api, "--proxy-mode=iptables")
		other.synced(t)
		if err := holds(t, s.node, ":KUBE-SVC-", true); err != nil {
			t.Fatal(err)
		}
		noticed(t, p)
		_ = other.Close() // SIGKILL
		ended(t, p)
		p.await(t, "its rules to be removed", func() error { return holds(t, s.node, "KUBE-S", false) })
		p.await(t, "its counters to be removed", func() error {
			there, err := counterThere(s.node)
			if there {
				return errors.New("the kernel has a counter")
			}
			if errors.Is(err, nfacct.ErrNotSupported) {
				return nil
			}
			return err
		})
	})
}

func hasEvent(api *fakeapi.API, want string) error {
	if all := allEvents(api); !slices.ContainsFunc(all, func(e string) bool { return strings.HasPrefix(e, want+" Node/") }) {
		return fmt.Errorf("no %s among the Events:\n%s", want, strings.Join(all, "\n"))
	}
	return nil
}
