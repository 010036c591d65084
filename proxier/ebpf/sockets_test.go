// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestClusterIP: pods and the host reach a Service over both protocols and families, with backends
// on this node and on another one.
func TestClusterIP(t *testing.T) {
	l := lab.NewT(t)
	one, two := l.Node("node1"), l.Node("node2")
	a, b, client := serve(t, one.Pod("a")), serve(t, two.Pod("b")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	n.OnServiceAdd(dualService())
	n.setPods(a, b)
	n.sync(t)

	for network, to := range targets() {
		for name, from := range map[string]*lab.Sandbox{"pod": client.Sandbox, "host": one.Sandbox, "backend itself": a.Sandbox} {
			got := map[string]int{}
			for range 60 {
				r, err := from.Ask(t.Context(), network[:3], to)
				if err != nil {
					t.Fatalf("%s from %s: %v", network, name, err)
				}
				got[r.Server]++
			}
			if got["a"] < 10 || got["b"] < 10 || got["a"]+got["b"] != 60 {
				t.Errorf("%s from %s: distribution %v", network, name, got)
			}
		}
		// node2 has no programs, so its clients reach nothing.
		if r, err := two.Ask(shortly(t), network[:3], to); err == nil {
			t.Errorf("%s: node2 reached %s", network, r.Server)
		}
	}
}

// TestPeerAddresses: applications see the address that they dialled: by getpeername on a connected
// socket, and as the source of datagrams on an unconnected one. This holds for IPv6 sockets with
// IPv4-mapped addresses, too.
func TestPeerAddresses(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	a, client := serve(t, one.Pod("a")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	n.OnServiceAdd(dualService())
	n.setPods(a)
	n.sync(t)

	for _, network := range []string{"tcp", "udp"} {
		for _, to := range []netip.AddrPort{netip.AddrPortFrom(vip4, 80), netip.AddrPortFrom(vip6, 80), netip.AddrPortFrom(netip.AddrFrom16(vip4.As16()), 80)} {
			c, err := client.Dial(t.Context(), network, to)
			if err != nil {
				t.Fatalf("%s %s: %v", network, to, err)
			}
			if got := peerOf(t, c); got != to {
				t.Errorf("%s: dialled %s, getpeername returns %s", network, to, got)
			}
			if r, err := lab.AskConn(t.Context(), c); err != nil || r.Server != "a" {
				t.Errorf("%s %s: %v %v", network, to, r, err)
			}
			c.Close()
		}
	}

	for _, test := range []struct {
		family int
		to     netip.Addr
	}{{unix.AF_INET, vip4}, {unix.AF_INET6, vip6}, {unix.AF_INET6, netip.AddrFrom16(vip4.As16())}} {
		c, err := client.ListenUDP(test.family)
		if err != nil {
			t.Fatal(err)
		}
		to := netip.AddrPortFrom(test.to, 80)
		from := exchange(t, c, to)
		if from != to {
			t.Errorf("sent to %s, reply from %s", to, from)
		}
		c.Close()
	}
}

// TestTCPPeerIsEndpoint: with that option TCP clients see the endpoint's address, and those of UDP the Service's.
func TestTCPPeerIsEndpoint(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	a, client := serve(t, one.Pod("a")), one.Pod("client")
	n := newNode(t, one, l, Options{TCPPeerIsEndpoint: true})
	n.OnServiceAdd(dualService())
	n.setPods(a)
	n.sync(t)

	for _, vip := range []netip.Addr{vip4, vip6} {
		for _, network := range []string{"tcp", "udp"} {
			to := netip.AddrPortFrom(vip, 80)
			c, err := client.Dial(t.Context(), network, to)
			if err != nil {
				t.Fatalf("%s %s: %v", network, to, err)
			}
			want := to.Addr()
			if network == "tcp" {
				want = a.Addr4
				if vip == vip6 {
					want = a.Addr6
				}
			}
			if got := peerOf(t, c); got.Addr() != want {
				t.Errorf("%s: dialled %s, getpeername returns %s, want %s", network, to, got, want)
			}
			if r, err := lab.AskConn(t.Context(), c); err != nil || r.Server != "a" {
				t.Errorf("%s %s: %v %v", network, to, r, err)
			}
			c.Close()
		}
	}
}

// peerOf calls getpeername. RemoteAddr would return the address that Go stored when dialling.
func peerOf(t testing.TB, c net.Conn) netip.AddrPort {
	t.Helper()
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var peer netip.AddrPort
	if err := raw.Control(func(fd uintptr) {
		sa, err := unix.Getpeername(int(fd))
		if err != nil {
			t.Errorf("getpeername: %v", err)
		}
		switch sa := sa.(type) {
		case *unix.SockaddrInet4:
			peer = netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
		case *unix.SockaddrInet6:
			peer = netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
		}
	}); err != nil {
		t.Fatal(err)
	}
	return peer
}

// exchange sends a datagram, and returns the source address of the reply.
func exchange(t testing.TB, c *net.UDPConn, to netip.AddrPort) netip.AddrPort {
	t.Helper()
	_, from := ask(t, c, to)
	return from
}

// ask sends a datagram, and returns the server and the source address of the reply.
func ask(t testing.TB, c *net.UDPConn, to netip.AddrPort) (server string, from netip.AddrPort) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.WriteToUDPAddrPort([]byte("hello\n"), to); err != nil {
		t.Fatalf("send to %s: %v", to, err)
	}
	b := make([]byte, 256)
	n, from, err := c.ReadFromUDPAddrPort(b)
	if err != nil {
		t.Fatalf("reply of %s: %v", to, err)
	}
	r, err := lab.ParseReply(string(b[:n]))
	if err != nil {
		t.Fatal(err)
	}
	return r.Server, from
}

// TestUnconnectedUDPWithManyPeers: an unconnected UDP socket that sends to several Services sees
// each reply come from the address it sent to.
func TestUnconnectedUDPWithManyPeers(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	a, b, client := serve(t, one.Pod("a")), serve(t, one.Pod("b")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	const services = 5
	for i := range services {
		name := fmt.Sprintf("s%d", i)
		s := dualService()
		s.Name = name
		s.Spec.ClusterIPs = []string{fmt.Sprintf("10.96.1.%d", i)}
		n.OnServiceAdd(s)
		for _, s := range slicesOf(name, a, b) {
			n.OnEndpointSliceAdd(s)
		}
	}
	n.sync(t)
	c, err := client.ListenUDP(unix.AF_INET)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 20 {
		for i := range services {
			to := netip.MustParseAddrPort(fmt.Sprintf("10.96.1.%d:80", i))
			if from := exchange(t, c, to); from != to {
				t.Fatalf("sent to %s, reply from %s", to, from)
			}
		}
	}
}

// TestUnconnectedUDPIsSticky: an unconnected UDP socket stays with its backend, as it would with
// conntrack, until the backend leaves the set; with and without session affinity.
func TestUnconnectedUDPIsSticky(t *testing.T) {
	for _, affinity := range []v1.ServiceAffinity{v1.ServiceAffinityNone, v1.ServiceAffinityClientIP} {
		l := lab.NewT(t)
		one := l.Node("node1")
		pods := []*lab.Pod{serve(t, one.Pod("a")), serve(t, one.Pod("b")), serve(t, one.Pod("c"))}
		client := one.Pod("client")
		n := newNode(t, one, l, Options{})
		n.OnServiceAdd(dualService(func(s *v1.Service) { s.Spec.SessionAffinity = affinity }))
		n.setPods(pods...)
		n.sync(t)
		c, err := client.ListenUDP(unix.AF_INET)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ask := func() string {
			t.Helper()
			name, _ := ask(t, c, netip.AddrPortFrom(vip4, 80))
			return name
		}
		first := ask()
		for range 30 {
			if got := ask(); got != first {
				t.Fatalf("backend changed from %s to %s", first, got)
			}
		}
		// A terminating backend gets no datagrams of new or existing clients.
		keep, rest := split(pods, first)
		n.setPods(rest...)
		leaving := writertest.Slice("web-leaving", "web", keep.Addr4.String())
		leaving.Ports = []discoveryv1.EndpointPort{{Name: ptr.To("u"), Port: ptr.To[int32](targetPort), Protocol: ptr.To(v1.ProtocolUDP)}}
		leaving.Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: ptr.To(false), Serving: ptr.To(true), Terminating: ptr.To(true)}
		n.OnEndpointSliceAdd(leaving)
		n.sync(t)
		if got := ask(); got == first {
			t.Errorf("affinity %s: datagrams still go to %s", affinity, first)
		}
		if r, err := client.Ask(t.Context(), "udp", netip.AddrPortFrom(vip4, 80)); err != nil || r.Server == first {
			t.Errorf("affinity %s: a new socket: %v %v", affinity, r, err)
		}
	}
}

// TestNoBackend: without a backend, callers fail at once. The error is ECONNREFUSED if there is no
// endpoint, and EPERM if internalTrafficPolicy: Local excludes the existing ones.
func TestNoBackend(t *testing.T) {
	for _, noSetRetval := range []bool{false, true} {
		t.Run(fmt.Sprintf("noSetRetval=%v", noSetRetval), func(t *testing.T) {
			if !noSetRetval {
				kernel.Needs(t, capabilities.SetRetval)
			}
			l := lab.NewT(t)
			one, two := l.Node("node1"), l.Node("node2")
			client, remote := one.Pod("client"), two.Pod("remote")
			n := newNode(t, one, l, Options{NoSetRetval: noSetRetval})
			n.OnServiceAdd(dualService())
			n.sync(t)
			for _, to := range []netip.AddrPort{netip.AddrPortFrom(vip4, 80), netip.AddrPortFrom(vip6, 80)} {
				if noSetRetval {
					break
				}
				family := unix.AF_INET
				if to.Addr().Is6() {
					family = unix.AF_INET6
				}
				c, err := client.ListenUDP(family)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := c.WriteToUDPAddrPort([]byte("hello"), to); !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("datagram to %s: %v", to, err)
				}
				c.Close()
			}
			for network, to := range targets() {
				if noSetRetval && network[:3] == "udp" {
					continue // datagrams to port 0 do not fail this way
				}
				if _, err := client.Ask(t.Context(), network[:3], to); !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("%s without endpoints: %v", network, err)
				}
			}
			local := dualService(func(s *v1.Service) {
				s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
			})
			n.OnServiceUpdate(nil, local)
			n.setPods(remote)
			n.sync(t)
			for network, to := range targets() {
				if _, err := client.Ask(t.Context(), network[:3], to); !errors.Is(err, unix.EPERM) {
					t.Errorf("%s without a local endpoint: %v", network, err)
				}
			}
		})
	}
}

// TestAffinity: a client stays with its backend. Clients are identified by network namespace.
func TestAffinity(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	pods := []*lab.Pod{serve(t, one.Pod("a")), serve(t, one.Pod("b")), serve(t, one.Pod("c"))}
	n := newNode(t, one, l, Options{})
	n.OnServiceAdd(dualService(func(s *v1.Service) {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](1)}}
	}))
	n.setPods(pods...)
	n.sync(t)
	client := one.Pod("client")
	ask := func() string {
		t.Helper()
		r, err := client.Ask(t.Context(), "tcp", netip.AddrPortFrom(vip4, 80))
		if err != nil {
			t.Fatal(err)
		}
		return r.Server
	}
	first := ask()
	for range 30 {
		if got := ask(); got != first {
			t.Fatalf("backend changed from %s to %s", first, got)
		}
	}
	// Affinity survives a change that keeps the backend, and ends when the backend is removed.
	keep, rest := split(pods, first)
	n.setPods(rest[0], keep)
	n.sync(t)
	if got := ask(); got != first {
		t.Errorf("a change of other backends moved the client from %s to %s", first, got)
	}
	n.setPods(rest...)
	n.sync(t)
	second := ask()
	if second == first {
		t.Errorf("still on %s, which was removed", first)
	}
	// Affinity expires some time after the latest connection.
	deadline := time.Now().Add(20 * time.Second)
	for moved := false; !moved; {
		if time.Now().After(deadline) {
			t.Fatal("the backend never changed, although affinity lasts one second")
		}
		idle(t, 1100*time.Millisecond)
		moved = ask() != second
	}
	waitFor(t, "the client to count no more", func() bool { return n.tier.Usage()["affinity"].Used == 0 })
	if there, err := lbmap.CountEntries[lbmap.AffinityKey, lbmap.Affinity](n.tier.maps["tdm_affinity"]); there != 1 || err != nil {
		t.Errorf("%d entries stay, %v", there, err)
	}
}

// TestAffinityBesideNewerConnection: affinity is not ended by a newer connection of the same client
// that stored its time first.
func TestAffinityBesideNewerConnection(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	pods := []*lab.Pod{serve(t, one.Pod("a")), serve(t, one.Pod("b")), serve(t, one.Pod("c"))}
	client := one.Pod("client")
	n := newNode(t, one, l, Options{})
	n.OnServiceAdd(dualService(func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP }))
	n.setPods(pods...)
	n.sync(t)
	first := ""
	for range 20 {
		r, err := client.Ask(t.Context(), "tcp", netip.AddrPortFrom(vip4, 80))
		if err != nil {
			t.Fatal(err)
		}
		if first == "" {
			first = r.Server
		}
		if r.Server != first {
			t.Fatalf("backend changed from %s to %s", first, r.Server)
		}
		var key lbmap.AffinityKey
		var record lbmap.Affinity
		all := n.tier.maps["tdm_affinity"].Iterate()
		if !all.Next(&key, &record) {
			t.Fatal("no record: ", all.Err())
		}
		record.LastNs += uint64(time.Minute)
		if err := n.tier.maps["tdm_affinity"].Put(key, record); err != nil {
			t.Fatal(err)
		}
	}
	if used := n.tier.Usage()["affinity"].Used; used != 1 {
		t.Errorf("%d clients have an affinity", used)
	}
}

func split(pods []*lab.Pod, name string) (one *lab.Pod, rest []*lab.Pod) {
	for _, p := range pods {
		if p.Name == name {
			one = p
		} else {
			rest = append(rest, p)
		}
	}
	return one, rest
}

// idle waits until a timeout by the kernel's clock has passed. There is no condition to wait for.
func idle(t testing.TB, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// TestTwoNodes: nodes with the same VIP and different backends do not affect each other.
func TestTwoNodes(t *testing.T) {
	l := lab.NewT(t)
	for _, name := range []string{"node1", "node2"} {
		at := l.Node(name)
		pod := serve(t, at.Pod("pod-of-"+name))
		n := newNode(t, at, l, Options{})
		n.OnServiceAdd(dualService(func(s *v1.Service) {
			s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
		}))
		n.setPods(pod)
		n.sync(t)
	}
	for _, at := range l.Nodes() {
		for network, to := range targets() {
			for range 20 {
				r, err := at.Ask(t.Context(), network[:3], to)
				if err != nil || r.Server != "pod-of-"+at.Name {
					t.Fatalf("%s on %s: %v %v", network, at.Name, r, err)
				}
			}
		}
	}
}

// TestOptOut: packets of sockets that opted out go to the VIP.
func TestOptOut(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	a, client := serve(t, one.Pod("a")), one.Pod("client")
	n := newNode(t, one, l, Options{Left: proxier.Clients{proxier.FromPod: true}})
	n.OnServiceAdd(dualService())
	n.setPods(a)
	n.sync(t)
	to := netip.AddrPortFrom(vip4, 80)
	if _, err := one.Ask(t.Context(), "tcp", to); err != nil {
		t.Errorf("host: %v", err)
	}
	if _, err := client.Ask(shortly(t), "tcp", to); err == nil {
		t.Error("a pod was translated that is left to others")
	}

	n.close()
	n.start(t, Options{})
	n.OnServiceAdd(dualService())
	n.setPods(a)
	n.sync(t)
	if _, err := client.Ask(t.Context(), "tcp", to); err != nil {
		t.Errorf("pod: %v", err)
	}
	var cookie uint64
	if err := client.Do(func() (err error) { cookie, err = netns.Cookie(); return err }); err != nil {
		t.Fatal(err)
	}
	if err := n.tier.maps["tdm_optout"].Put(cookie, uint8(1)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Ask(shortly(t), "tcp", to); err == nil {
		t.Error("a pod that has opted out was translated")
	}
	if _, err := a.Ask(t.Context(), "tcp", to); err != nil {
		t.Errorf("a pod that has not opted out: %v", err)
	}

	// Opt-outs survive restarts, also into new maps.
	for _, optOuts := range []uint32{16, 32} {
		n.close()
		n.start(t, Options{Sizes: lbmap.Sizes{Frontends: 64, Services: 64, Backends: 64, Slots: 64, Affinity: 64, UDPPeers: 64, OptOuts: optOuts}})
		n.OnServiceAdd(dualService())
		n.setPods(a)
		n.sync(t)
		if _, err := client.Ask(shortly(t), "tcp", to); err == nil {
			t.Errorf("opt-outs=%d: the opt-out was lost", optOuts)
		}
	}
}
