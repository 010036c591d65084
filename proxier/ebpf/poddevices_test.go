// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
)

// cookieOf is the cookie of a sandbox's network namespace.
func cookieOf(t testing.TB, s *lab.Sandbox) (cookie uint64) {
	t.Helper()
	err := s.Do(func() (err error) {
		cookie, err = ownNetNSCookie()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return cookie
}

// Pods that opted out reach every kind of frontend by packets, as what their
// sockets send is not translated before it leaves them; also the pod that is
// the backend itself.
func TestOptedOutPods(t *testing.T) {
	l := lab.NewT(t, lab.Options{Pause: true}) // pods show in /proc
	one, two := l.Node("node1"), l.Node("node2")
	a, b, client := serve(t, one.Pod("a")), serve(t, two.Pod("b")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	if err := n.tier.SetUplinks(uplinksOf(t, one)); err != nil {
		t.Fatal(err)
	}
	n.UpdateFacts(func(f *proxier.Facts) {
		f.LocalAddrs = []netip.Addr{one.Addr4, one.Addr6}
		f.NodeIPs = [proxier.Families]netip.Addr{one.Addr4, one.Addr6}
		f.Pods.CIDRs = []netip.Prefix{one.PodPrefix4, one.PodPrefix6}
	})
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

	i := inspectNode(t, one)
	for _, pod := range []*lab.Pod{client, a} {
		if err := i.AddOptOut(cookieOf(t, pod.Sandbox)); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.tier.syncPodDevices(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := len(n.tier.pods.on); got != 2 {
		t.Fatalf("%d devices of pods are served", got)
	}
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
						t.Fatalf("%s of %s from %s: %s saw %s", kind, network, from.Name, r.Server, own)
					}
				}
				if got["a"] == 0 || got["b"] == 0 {
					t.Errorf("%s of %s from %s: %v", kind, network, from.Name, got)
				}
			}
		}
	}
	flows := n.tier.flowTable.used()
	if flows == 0 {
		t.Error("no packet was translated")
	}

	// Back at the socket, no device of a pod is looked at.
	for _, pod := range []*lab.Pod{client, a} {
		if _, err := i.RemoveOptOut(cookieOf(t, pod.Sandbox)); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.tier.syncPodDevices(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got := len(n.tier.pods.on); got != 0 {
		t.Errorf("%d devices of pods are still served", got)
	}
	if r, err := client.Ask(t.Context(), "tcp", targets()["tcp4"]); err != nil {
		t.Errorf("%v %v", r, err)
	}
}
