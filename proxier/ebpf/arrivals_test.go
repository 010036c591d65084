// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// rawClient sends packets without a socket for their connections, as sandboxes (gVisor), virtual machines
// (Kata) and raw sockets do, and sends them again until an answer comes.
type rawClient struct {
	*lab.Pod
	answers *lab.Capture
	port    uint16
}

func newRawClient(t testing.TB, p *lab.Pod) *rawClient {
	t.Helper()
	return &rawClient{Pod: p, answers: arrivals(t, p), port: 40000}
}

// reach sends the first packet of a connection up to attempts times, and expects an answer from where it
// was sent to.
func (c *rawClient) reach(t testing.TB, network string, to netip.AddrPort, attempts int) error {
	t.Helper()
	c.port++
	from := netip.AddrPortFrom(addrOf(c.Sandbox, to.Addr()), c.port)
	sent := packet.NewUDP(from, to, []byte("?\n"))
	if network[:3] == "tcp" {
		sent = packet.NewTCP(from, to, packet.SYN, nil)
	}
	var err error
	for range attempts {
		if err := c.Send(t.Context(), sent); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond*lab.Slower()) // a program may have to be loaded first
		_, err = c.answers.Expect(ctx, func(p lab.Captured) bool {
			return p.Source() == to && p.Destination() == from && (p.TCP == nil || p.TCP.Flags == packet.SYN|packet.ACK)
		})
		cancel()
		if err == nil {
			return nil
		}
	}
	return err
}

// TestArrivalsOfEachKind: the first packet to a frontend of any kind has the pod's device served. One to
// another address, to a ClusterIP that a device of the node has, or to a Service that is not in the maps, has not.
func TestArrivalsOfEachKind(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	web := serve(t, one.Pod("web"))
	n := newPodNode(t, one, l)
	service := dualService(func(s *v1.Service) { s.Spec.Type = v1.ServiceTypeLoadBalancer })
	for i := range service.Spec.Ports {
		service.Spec.Ports[i].NodePort = int32(30080 + i)
	}
	for _, lb := range guarded {
		service.Status.LoadBalancer.Ingress = append(service.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: lb.Addr().String()})
	}
	n.OnServiceAdd(service)
	n.setPods(web)
	dns := netip.MustParseAddr("10.96.0.53")
	n.OnServiceAdd(writertest.Service("dns", dns.String()))
	n.UpdateFacts(func(f *proxier.Facts) {
		f.LocalAddrs = append(slices.Clone(f.LocalAddrs), dns)
		f.ServiceCIDRs = []netip.Prefix{lab.ServicePrefix4, lab.ServicePrefix6}
	})
	n.sync(t)
	n.runTier(t)
	tcp, udp := uint16(30080), uint16(30081)
	for i, test := range []struct {
		network string
		to      netip.AddrPort
		served  bool
	}{
		{"tcp", netip.AddrPortFrom(vip4, 80), true},
		{"udp", netip.AddrPortFrom(vip6, 80), true},
		{"tcp", guarded[1], true},
		{"udp", guarded[0], true},
		{"tcp", netip.AddrPortFrom(one.Addr4, tcp), true},
		{"udp", netip.AddrPortFrom(one.Addr6, udp), true},
		{"tcp", netip.AddrPortFrom(vip4, 81), false},
		{"udp", netip.AddrPortFrom(one.Addr4, tcp), false},
		{"tcp", netip.AddrPortFrom(dns, 80), false},
		{"udp", netip.MustParseAddrPort("198.51.100.9:80"), false},
	} {
		raw := newRawClient(t, one.Pod(fmt.Sprintf("client%d", i)))
		attempts := 50
		if !test.served {
			attempts = 1
		}
		if err := raw.reach(t, test.network, test.to, attempts); (err == nil) != test.served {
			t.Errorf("%s to %s: %v, want it served: %v", test.network, test.to, err, test.served)
		}
	}
	n.tier.mu.Lock()
	defer n.tier.mu.Unlock()
	if got := len(n.tier.podDevices.Served); got != 6 {
		t.Errorf("%d devices of pods are served, want 6", got)
	}
}

// runTier runs the tier until the test ends.
func (n *node) runTier(t testing.TB) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n.tier.Run(ctx)
	}()
	t.Cleanup(func() {
		stop()
		<-ended
	})
}

// bridge joins pods of a node by a bridge, as the bridge CNI plugin does: they reach each other directly, and
// everything else by the bridge's addresses.
func bridge(t testing.TB, n *lab.Node, pods ...*lab.Pod) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	nl := n.Netlink()
	must(nl.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cni0", HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 1, 0}}}))
	br, err := nl.LinkByName("cni0")
	must(err)
	must(nl.LinkSetUp(br))
	for _, p := range pods {
		port, err := nl.LinkByName(p.HostLink)
		must(err)
		addrs, err := nl.AddrList(port, netlink.FAMILY_ALL)
		must(err)
		for _, a := range addrs {
			if a.IP.IsLinkLocalUnicast() {
				continue
			}
			must(nl.AddrDel(port, &a))
			if err := nl.AddrAdd(br, &netlink.Addr{IPNet: a.IPNet, Flags: unix.IFA_F_NODAD}); !errors.Is(err, unix.EEXIST) {
				must(err)
			}
		}
		must(nl.LinkSetMaster(port, br))
		up, err := p.Netlink().LinkByName(lab.Uplink)
		must(err)
		for i, a := range []netip.Addr{p.Addr4, p.Addr6} {
			must(nl.RouteReplace(&netlink.Route{LinkIndex: br.Attrs().Index, Dst: netlink.NewIPNet(a.AsSlice()), Scope: netlink.SCOPE_LINK}))
			prefix := []netip.Prefix{n.PodPrefix4, n.PodPrefix6}[i]
			must(p.Netlink().RouteReplace(&netlink.Route{LinkIndex: up.Attrs().Index, Scope: netlink.SCOPE_LINK,
				Dst: &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), a.BitLen())}}))
		}
	}
}

// TestPodsWithoutSockets: packets that a pod sends without a socket reach Services, though the pod did not opt out.
// The first one has programs attached to the pod's device, and to no other.
func TestPodsWithoutSockets(t *testing.T) {
	t.Run("routed", func(t *testing.T) { testPodsWithoutSockets(t, func(testing.TB, *lab.Node, ...*lab.Pod) {}) })
	t.Run("bridged", func(t *testing.T) { testPodsWithoutSockets(t, bridge) })
}

func testPodsWithoutSockets(t *testing.T, join func(testing.TB, *lab.Node, ...*lab.Pod)) {
	l := lab.NewT(t)
	one, two := l.Node("node1"), l.Node("node2")
	here, there, client, other := serve(t, one.Pod("here")), serve(t, two.Pod("there")), one.Pod("client"), one.Pod("other")
	join(t, one, here, client, other)
	n := newPodNode(t, one, l)
	n.OnServiceAdd(dualService())
	n.setPods(here, there)
	n.sync(t)
	n.runTier(t)
	raw := newRawClient(t, client)
	for network, to := range targets() {
		// Sockets cause nothing to be attached.
		if _, err := other.Ask(t.Context(), network[:3], to); err != nil {
			t.Fatal(err)
		}
		if err := raw.reach(t, network, to, 50); err != nil {
			t.Errorf("%s: %v", network, err)
		}
		for range 8 { // backends here and there
			if err := raw.reach(t, network, to, 1); err != nil {
				t.Errorf("%s: %v", network, err)
			}
		}
	}
	index := func(name string) int {
		link, err := one.Netlink().LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		return link.Attrs().Index
	}
	served := func() map[int]datapath.Role {
		n.tier.mu.Lock()
		defer n.tier.mu.Unlock()
		all := map[int]datapath.Role{}
		for i, v := range n.tier.devices.Served {
			all[i] = v.Role
		}
		return all
	}
	if all := served(); len(all) != 2 || all[index(client.HostLink)] != lbmap.RolePod {
		t.Errorf("served devices: %v", all)
	}

	// The next process goes on.
	n.close()
	n.start(t, Options{})
	if err := n.tier.SetUplinks(t.Context(), uplinksOf(t, one)); err != nil {
		t.Fatal(err)
	}
	n.OnServiceAdd(dualService())
	n.setPods(here, there)
	n.sync(t)
	for network, to := range targets() {
		if err := raw.reach(t, network, to, 1); err != nil {
			t.Errorf("%s after a restart: %v", network, err)
		}
	}
	n.tier.mu.Lock()
	_, kept := n.tier.podDevices.Seen[index(client.HostLink)]
	n.tier.mu.Unlock()
	if !kept {
		t.Error("after a restart the device is served for a while only")
	}
}
