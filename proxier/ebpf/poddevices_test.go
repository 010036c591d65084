// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
)

// cookieOf returns the cookie of a sandbox's network namespace.
func cookieOf(t testing.TB, s *lab.Sandbox) (cookie uint64) {
	t.Helper()
	err := s.Do(func() (err error) {
		cookie, err = netns.Cookie()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return cookie
}

// newPodNode returns a node that knows its uplinks, addresses and pod CIDRs.
func newPodNode(t testing.TB, at *lab.Node, l *lab.Lab) *node {
	t.Helper()
	n := newNode(t, at, l, Options{NodePortRange: nodePortRange})
	if err := n.tier.SetUplinks(t.Context(), uplinksOf(t, at)); err != nil {
		t.Fatal(err)
	}
	n.UpdateFacts(func(f *proxier.Facts) {
		f.LocalAddrs = []netip.Addr{at.Addr4, at.Addr6}
		f.NodeIPs = [proxier.Families]netip.Addr{at.Addr4, at.Addr6}
		f.Pods.CIDRs = []netip.Prefix{at.PodPrefix4, at.PodPrefix6}
	})
	return n
}

// optOut opts out pods, and expects that just their devices are served.
func (n *node) optOut(t testing.TB, pods ...*lab.Pod) *inspect.Inspector {
	t.Helper()
	i := inspectNode(t, n.at)
	for _, pod := range pods {
		if err := i.AddOptOut(cookieOf(t, pod.Sandbox)); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.tier.syncOptOuts(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := len(n.tier.podDevices.Served); got != len(pods) {
		t.Fatalf("%d devices of pods are served", got)
	}
	return i
}

// TestOptedOutPods: pods that opted out reach every kind of frontend. Their packets leave the
// sockets untranslated, and are translated on the pod's device. This includes the pod that is the
// backend itself.
func TestOptedOutPods(t *testing.T) {
	l := lab.NewT(t, lab.Options{Pause: true}) // makes pods visible in /proc
	one, two := l.Node("node1"), l.Node("node2")
	a, b, client := serve(t, one.Pod("a")), serve(t, two.Pod("b")), one.Pod("client")
	n := newPodNode(t, one, l)
	s := dualService()
	s.Spec.Type = v1.ServiceTypeLoadBalancer
	for i := range s.Spec.Ports {
		s.Spec.Ports[i].NodePort = int32(30080 + i)
	}
	s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.10"}, {IP: "2001:db8:203:113::10"}}
	s.Spec.LoadBalancerSourceRanges = []string{client.Addr4.String() + "/32", client.Addr6.String() + "/128", a.Addr4.String() + "/32", a.Addr6.String() + "/128"}
	n.OnServiceAdd(s)
	n.setPods(a, b)
	n.sync(t)

	i := n.optOut(t, client, a)
	for network, to := range targets() {
		node, lb := one.Addr4, netip.MustParseAddr("203.0.113.10")
		if network[3] == '6' {
			node, lb = one.Addr6, netip.MustParseAddr("2001:db8:203:113::10")
		}
		nodePort := uint16(30080)
		if network[:3] == "udp" {
			nodePort++
		}
		for kind, to := range map[string]netip.AddrPort{"ClusterIP": to, "NodePort": netip.AddrPortFrom(node, nodePort), "LoadBalancer": netip.AddrPortFrom(lb, 80)} {
			for _, from := range []*lab.Pod{client, a} {
				got := map[string]int{}
				for range 30 {
					r, err := from.Ask(t.Context(), network[:3], to)
					if err != nil {
						t.Fatalf("%s of %s from %s: %v", kind, network, from.Name, err)
					}
					got[r.Server]++
					if own := r.Peer.Addr(); own != from.Addr4 && own != from.Addr6 && r.Server != from.Name {
						t.Fatalf("%s of %s from %s: %s sees %s", kind, network, from.Name, r.Server, own)
					}
				}
				if got["a"] == 0 || got["b"] == 0 {
					t.Errorf("%s of %s from %s: %v", kind, network, from.Name, got)
				}
			}
		}
	}
	flows := n.tier.flowTable.Used()
	if flows == 0 {
		t.Error("no packet was translated")
	}

	// When the opt-out ends, sockets are translated again, and no pod device is served.
	for _, pod := range []*lab.Pod{client, a} {
		if _, err := i.RemoveOptOut(cookieOf(t, pod.Sandbox)); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.tier.syncOptOuts(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got := len(n.tier.podDevices.Served); got != 0 {
		t.Errorf("%d devices of pods are still served", got)
	}
	if r, err := client.Ask(t.Context(), "tcp", targets()["tcp4"]); err != nil {
		t.Errorf("%v %v", r, err)
	}
}

// TestPodDevicesAreInherited: a device whose pod does not opt out any more stays a pod's device
// while it is served, also by the next process. Its established connections continue, even if the
// pod is behind a bridge, so that its frames are not addressed to the device.
func TestPodDevicesAreInherited(t *testing.T) {
	for _, tt := range []struct {
		name  string
		sizes lbmap.Sizes
	}{
		{name: "the same maps"},
		{name: "other maps", sizes: lbmap.Sizes{Frontends: 1 << 11, TCPFlows: 1 << 9}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := lab.NewT(t, lab.Options{Pause: true})
			one := l.Node("node1")
			web, client := serve(t, one.Pod("web")), one.Pod("client")
			n := newPodNode(t, one, l)
			n.OnServiceAdd(dualService())
			n.setPods(web)
			n.sync(t)
			i := n.optOut(t, client)
			to := targets()["tcp4"]
			c, err := client.Dial(t.Context(), "tcp", to)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			ask := func() {
				t.Helper()
				if r, err := lab.AskConn(t.Context(), c); err != nil {
					t.Errorf("%v %v", r, err)
				}
			}
			ask()
			if _, err := i.RemoveOptOut(cookieOf(t, client.Sandbox)); err != nil {
				t.Fatal(err)
			}
			link, err := one.Netlink().LinkByName(client.HostLink)
			if err != nil {
				t.Fatal(err)
			}
			ask()
			n.close()
			n.start(t, Options{Sizes: tt.sizes})
			if err := n.tier.SetUplinks(t.Context(), uplinksOf(t, one)); err != nil {
				t.Fatal(err)
			}
			n.OnServiceAdd(dualService())
			n.setPods(web)
			n.sync(t)
			ask()
			if v, on := n.tier.devices.Served[link.Attrs().Index]; !on || v.Role != lbmap.RolePod {
				t.Errorf("the device is served: %v, with variant %v; want a pod's", on, v)
			}

			counts := counted{tier: n.tier}
			counts.since(t)
			from := c.LocalAddr().(*net.TCPAddr).AddrPort()
			frame := packet.NewTCP(from, to, packet.ACK, nil)
			frame.Ethernet = &packet.Ethernet{Dst: packet.MAC{2, 0, 0, 0, 0, 9}}
			if err := client.SendFrame(lab.Uplink, frame.Build()); err != nil {
				t.Fatal(err)
			}
			waitFor(t, "the programs to translate the frame", func() bool { return counts.since(t)["forwarded_local"] > 0 })
		})
	}
}

// TestFramesOfOptedOutPods: frames that a pod sends without a socket are translated where they
// leave the pod, and replies where they enter it. Backends are a pod of this node, one of another
// node, and the client itself, which then sees the node's address.
func TestFramesOfOptedOutPods(t *testing.T) {
	l := lab.NewT(t, lab.Options{Pause: true})
	one, two := l.Node("node1"), l.Node("node2")
	here, there, client := serve(t, one.Pod("here")), serve(t, two.Pod("there")), serve(t, one.Pod("client"))
	n := newPodNode(t, one, l)
	n.OnServiceAdd(dualService())
	n.sync(t)
	n.optOut(t, client)
	port := uint16(40000)
	for _, backend := range []*lab.Pod{here, there, client} {
		n.setPods(backend)
		n.sync(t)
		for network, vip := range targets() {
			port++
			what := network + " to " + backend.Name
			from := netip.AddrPortFrom(addrOf(client.Sandbox, vip.Addr()), port)
			to := netip.AddrPortFrom(addrOf(backend.Sandbox, vip.Addr()), targetPort)
			seen := from.Addr()
			if backend == client {
				seen = addrOf(one.Sandbox, vip.Addr())
			}
			sent := packet.NewUDP(from, vip, []byte("?\n"))
			if network[:3] == "tcp" {
				sent = packet.NewTCP(from, vip, packet.SYN, nil)
			}

			requests, answers := arrivals(t, backend), arrivals(t, client)
			if err := client.Send(t.Context(), sent); err != nil {
				t.Fatal(err)
			}
			request, err := requests.Expect(t.Context(), func(c lab.Captured) bool { return c.Destination() == to })
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if request.Source().Addr() != seen || request.Verify() != nil {
				t.Errorf("%s: the backend gets\n%s\n%v; want it from %s", what, request, request.Verify(), seen)
			}
			answer, err := answers.Expect(t.Context(), func(c lab.Captured) bool { return c.Destination() == from })
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if answer.Source() != vip || answer.Verify() != nil || answer.TCP != nil && answer.TCP.Flags != packet.SYN|packet.ACK {
				t.Errorf("%s: the reply is\n%s\n%v", what, answer, answer.Verify())
			}
			if err := errors.Join(requests.Close(), answers.Close()); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestTransfersOfOptedOutPods: megabytes in both directions, and fragmented datagrams, arrive
// unchanged, as in TestTransfers for outside clients.
func TestTransfersOfOptedOutPods(t *testing.T) {
	for name, network := range map[string]lab.Options{
		"offload":  {Pause: true},
		"on wires": {Pause: true, NoOffload: true, Nodes: live.Guarded},
	} {
		t.Run(name, func(t *testing.T) {
			l := lab.NewT(t, network)
			one, two := l.Node("node1"), l.Node("node2")
			client := one.Pod("client")
			n := newPodNode(t, one, l)
			n.OnServiceAdd(dualService())
			n.sync(t)
			n.optOut(t, client)
			for _, backend := range []*lab.Pod{one.Pod("here"), two.Pod("there"), client} {
				if _, err := backend.ServeBulk(targetPort); err != nil {
					t.Fatal(err)
				}
				if _, err := backend.ServeEcho(targetPort); err != nil {
					t.Fatal(err)
				}
				n.setPods(backend)
				n.sync(t)
				for network, to := range targets() {
					if network[:3] == "tcp" {
						if err := client.Bulk(t.Context(), to, lab.BulkSize); err != nil {
							t.Errorf("%s to %s: %v", network, backend.Name, err)
						}
						continue
					}
					for _, size := range []int{100, 2_000, 8_000} {
						if err := client.Echo(t.Context(), to, size); err != nil {
							t.Errorf("%d bytes of %s to %s: %v", size, network, backend.Name, err)
						}
					}
				}
			}
			if n.tier.flowTable.Used() == 0 {
				t.Error("no packet was translated")
			}
		})
	}
}

// arrivals captures the packets that reach a pod.
func arrivals(t testing.TB, p *lab.Pod) *lab.Capture {
	t.Helper()
	c, err := p.Capture(lab.Uplink, func(c lab.Captured) bool { return !c.Outgoing })
	if err != nil {
		t.Fatal(err)
	}
	return c
}
