// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/kubeadm"
	"github.com/tandem-proxy/tandem/test/lab"
)

// nothingRefused checks kube-proxy's requests to the API server so far.
func (c *cluster) nothingRefused() {
	c.tb.Helper()
	r, err := requestsOf(c.plane.path("audit.log"), ProxyUser)
	if err != nil {
		c.tb.Fatal(err)
	}
	for _, refused := range r.Refused {
		c.tb.Errorf("refused: %s", refused)
	}
	for _, granted := range r.Granted {
		if !kubeadm.IsAllowed(granted) {
			c.tb.Errorf("kube-proxy asks to %s", granted)
		}
	}
	for _, must := range []string{"watch services", "watch endpointslices.discovery.k8s.io", "watch nodes", "watch servicecidrs.networking.k8s.io", "create events.events.k8s.io"} {
		if !slices.Contains(r.Granted, must) {
			c.tb.Errorf("the audit log has no %s, only %v", must, r.Granted)
		}
	}
}

// TestServices follows one Service through its life, on two nodes that run kube-proxy as
// kubeadm deploys it, in mode ebpf.
func TestServices(t *testing.T) {
	c := newCluster(t, 2, inMode("ebpf"))
	one, two := c.nodes[0], c.nodes[1]
	web1, web2 := c.run(one, "web", "web-1"), c.run(two, "web", "web-2")
	pods := []*lab.Sandbox{one.Pod("shell-1").Sandbox, two.Pod("shell-2").Sandbox}
	inside := append([]*lab.Sandbox{one.Sandbox, two.Sandbox}, pods...)
	client := c.lab.Client("client").Sandbox
	outside := []*lab.Sandbox{client}

	all := c.startAll()
	for _, p := range all {
		p.mode("ebpf")
	}

	s := c.expose("web")
	to := vip(s, 0)
	c.answer("created", to, inside, web1, web2)

	web3 := c.run(two, "web", "web-3")
	c.answer("scaled up", to, inside, web1, web2, web3)
	c.ready(web3, false)
	c.answer("one is not ready", to, inside, web1, web2)
	c.ready(web3, true)
	c.answer("it is ready again", to, inside, web1, web2, web3)
	c.terminate(web3)
	c.answer("it terminates", to, inside, web1, web2)
	c.terminate(web1)
	c.terminate(web2)
	c.answer("all terminate, and still serve", to, inside, web1, web2, web3)
	web4 := c.run(one, "web", "web-4")
	c.answer("a new one", to, inside, web4)
	for _, p := range []*lab.Pod{web1, web2, web3, web4} {
		c.remove(p)
	}
	c.silent("scaled to nothing", to, inside...)
	web5, web6 := c.run(one, "web", "web-5"), c.run(two, "web", "web-6")
	c.answer("scaled from nothing", to, inside, web5, web6)

	s = c.edit("web", func(s *v1.Service) { s.Spec.IPFamilyPolicy = ptr.To(v1.IPFamilyPolicyRequireDualStack) })
	to6 := vip(s, 1)
	c.answer("dual stack", to6, inside, web5, web6)
	c.answer("dual stack", to, inside, web5, web6)
	c.edit("web", func(s *v1.Service) {
		s.Spec.IPFamilyPolicy, s.Spec.IPFamilies, s.Spec.ClusterIPs = ptr.To(v1.IPFamilyPolicySingleStack), s.Spec.IPFamilies[:1], s.Spec.ClusterIPs[:1]
	})
	c.silent("single stack again", to6, inside...)
	c.answer("single stack again", to, inside, web5, web6)
	s = c.edit("web", func(s *v1.Service) { s.Spec.IPFamilyPolicy = ptr.To(v1.IPFamilyPolicyPreferDualStack) })
	to6 = vip(s, 1)
	c.answer("dual stack again", to6, inside, web5, web6)

	s = c.edit("web", func(s *v1.Service) { s.Spec.Type = v1.ServiceTypeNodePort })
	port := uint16(s.Spec.Ports[0].NodePort)
	if udp := uint16(s.Spec.Ports[1].NodePort); udp != port { // one number for both, as vip has it
		s = c.edit("web", func(s *v1.Service) { s.Spec.Ports[1].NodePort = int32(port) })
	}
	nodePorts := []netip.AddrPort{}
	for _, n := range c.nodes {
		nodePorts = append(nodePorts, netip.AddrPortFrom(n.Addr4, port), netip.AddrPortFrom(n.Addr6, port))
	}
	for _, at := range nodePorts {
		c.answer("a NodePort", at, append(outside, pods[0]), web5, web6)
	}

	s = c.edit("web", func(s *v1.Service) { s.Spec.Type = v1.ServiceTypeLoadBalancer })
	balanced4, balanced6 := lab.ExternalPrefix4.Addr().Next(), lab.ExternalPrefix6.Addr().Next()
	for _, a := range []netip.Addr{balanced4, balanced6} {
		if err := c.lab.Announce(netip.PrefixFrom(a, a.BitLen()), one); err != nil {
			t.Fatal(err)
		}
	}
	c.balance(s, balanced4, balanced6)
	c.answer("a load balancer", netip.AddrPortFrom(balanced4, 80), append(outside, pods...), web5, web6)
	c.answer("a load balancer", netip.AddrPortFrom(balanced6, 80), append(outside, pods...), web5, web6)

	c.edit("web", func(s *v1.Service) { s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal })
	c.answer("externalTrafficPolicy Local", netip.AddrPortFrom(balanced4, 80), outside, web5)
	c.answer("externalTrafficPolicy Local", netip.AddrPortFrom(balanced4, 80), pods, web5, web6)
	reply, err := client.Ask(t.Context(), "tcp", netip.AddrPortFrom(one.Addr4, port))
	if err != nil || reply.Peer.Addr() != client.Addr4 {
		t.Errorf("with externalTrafficPolicy Local, the endpoint sees %v, want %s; error %v", reply, client.Addr4, err)
	}
	c.remove(web5)
	c.silent("externalTrafficPolicy Local without an endpoint", netip.AddrPortFrom(balanced4, 80), client)
	c.edit("web", func(s *v1.Service) {
		s.Spec.ExternalTrafficPolicy, s.Spec.InternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster, ptr.To(v1.ServiceInternalTrafficPolicyLocal)
	})
	c.answer("externalTrafficPolicy Cluster", netip.AddrPortFrom(balanced4, 80), outside, web6)
	c.silent("internalTrafficPolicy Local without an endpoint", to, pods[0])
	c.answer("internalTrafficPolicy Local", to, pods[1:], web6)
	web7 := c.run(one, "web", "web-7")
	c.answer("internalTrafficPolicy Local", to, pods[:1], web7)

	c.edit("web", func(s *v1.Service) {
		s.Spec.Type, s.Spec.InternalTrafficPolicy, s.Spec.ExternalTrafficPolicy = v1.ServiceTypeClusterIP, nil, ""
		s.Spec.Ports[0].NodePort, s.Spec.Ports[1].NodePort = 0, 0
	})
	for _, at := range append(nodePorts, netip.AddrPortFrom(balanced4, 80)) {
		c.silent("ClusterIP again", at, client)
	}
	c.answer("ClusterIP again", to, inside, web6, web7)

	c.edit("web", func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP })
	c.await("affinity", func() error {
		who := map[string]bool{} // for one port: affinity is per port
		for range 8 {
			reply, err := pods[0].Ask(t.Context(), "tcp", to)
			if err != nil {
				return err
			}
			who[reply.Server] = true
		}
		if len(who) != 1 {
			return fmt.Errorf("%v answer", who)
		}
		return nil
	})
	c.edit("web", func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityNone })
	c.answer("no affinity", to, inside, web6, web7)

	c.edit("web", func(s *v1.Service) { s.Spec.Ports[0].Port, s.Spec.Ports[1].Port = 81, 81 })
	c.answer("another port", netip.AddrPortFrom(to.Addr(), 81), inside, web6, web7)
	c.silent("the port before", to, inside...)

	if err := c.client.CoreV1().Services(namespace).Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.silent("deleted", netip.AddrPortFrom(to.Addr(), 81), inside...)
	c.silent("deleted", netip.AddrPortFrom(to6.Addr(), 81), inside...)

	c.await("the Event of each node", func() error {
		list, err := c.client.EventsV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, n := range c.nodes {
			if !slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool { return e.Reason == "Starting" && e.Regarding.Name == n.Name }) {
				return fmt.Errorf("there is none of %s", n.Name)
			}
		}
		return nil
	})
	c.nothingRefused()
	for _, p := range all {
		if log := p.Log.String(); strings.Contains(log, "panic") {
			t.Errorf("the log of %s has a panic", p.node.Name)
		}
	}
}
