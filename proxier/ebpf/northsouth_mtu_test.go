// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// narrow is the MTU of one link in these tests. All others have 1500.
const narrow = 1400

// TestPathMTU: wherever a link has a smaller MTU than both ends know, the sender gets an ICMP
// error that quotes its own packet, and the transfer continues.
func TestPathMTU(t *testing.T) {
	for name, network := range map[string]lab.Options{"offload": {}, "on wires": {NoOffload: true}} {
		e := newEdge(t, Options{}, network)
		for _, test := range []struct {
			name   string
			remote bool // the backend is on the other node
			// squeeze reduces the MTU of a link. Then client or backend, or both, must get errors.
			squeeze         func(w *way) error
			client, backend bool
		}{
			{name: "behind the remote backend's node", remote: true, client: true,
				squeeze: func(w *way) error { return w.pod.SetMTU(narrow) }},
			{name: "behind the node itself", client: true,
				squeeze: func(w *way) error { return w.pod.SetMTU(narrow) }},
			{name: "before the client, remote backend", remote: true, backend: true,
				squeeze: func(w *way) error { return w.client.SetMTU(narrow) }},
			{name: "before the client, local backend", backend: true,
				squeeze: func(w *way) error { return w.client.SetMTU(narrow) }},
			// The program forwards these packets, so it has to send the errors.
			{name: "from the node to the client", remote: true, backend: true,
				squeeze: func(w *way) error { return w.limitTo(w.client.Sandbox) }},
			// The backend gets errors from its own node.
			{name: "between the nodes", remote: true, client: true, backend: true,
				squeeze: func(w *way) error { return w.two.SetMTU(narrow) }},
		} {
			t.Run(name+"/"+test.name, func(t *testing.T) {
				w := newWay(t, e, test.remote)
				if err := test.squeeze(w); err != nil {
					t.Fatal(err)
				}
				toClient, toBackend := w.errors(t, w.client.Sandbox), w.errors(t, w.pod.Sandbox)
				for _, own := range []netip.Addr{w.at.Addr4, w.at.Addr6} {
					client, backend := netip.AddrPortFrom(addrOf(w.client.Sandbox, own), 0), netip.AddrPortFrom(addrOf(w.pod.Sandbox, own), targetPort)
					to := netip.AddrPortFrom(own, nodePort)
					if err := w.client.Bulk(t.Context(), to, lab.BulkSize); err != nil {
						t.Errorf("to %s: %v", to, err)
					}
					if test.client {
						expectTooLong(t, toClient, network, packet.ProtoTCP, client, to)
					}
					if test.backend && test.remote {
						client = netip.AddrPortFrom(own, 0) // the address that the backend sees
					}
					if test.backend {
						expectTooLong(t, toBackend, network, packet.ProtoTCP, backend, client)
					}
				}
				for who, c := range map[string]*lab.Capture{"client": toClient, "backend": toBackend} {
					if got := len(c.Packets()); (got > 0) != (who == "client" && test.client || who == "backend" && test.backend) {
						t.Errorf("the %s got %d errors", who, got)
					}
				}
			})
		}
	}
}

// TestPathMTUOfDatagrams: the sender of a datagram that is too long and must not be fragmented
// gets an error, in both directions.
func TestPathMTUOfDatagrams(t *testing.T) {
	network := lab.Options{NoOffload: true}
	e := newEdge(t, Options{}, network)
	for name, remote := range map[string]bool{"local": false, "remote": true} {
		t.Run(name, func(t *testing.T) {
			w := newWay(t, e, remote)
			if err := w.pod.SetMTU(narrow); err != nil {
				t.Fatal(err)
			}
			toClient := w.errors(t, w.client.Sandbox)
			for _, n := range w.entries("udp") {
				c, err := w.client.Dial(t.Context(), "udp", n.to)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if err := dontFragment(c.(syscall.Conn), n.to.Addr()); err != nil {
					t.Fatal(err)
				}
				if err := lab.EchoConn(t.Context(), c, narrow-100); err != nil {
					t.Errorf("%s: %v", n, err)
				}
				if err := lab.EchoConn(t.Context(), c, narrow); !errors.Is(err, unix.EMSGSIZE) {
					t.Errorf("%s: sending %d bytes: %v", n, narrow, err)
				}
				expectTooLong(t, toClient, network, packet.ProtoUDP, netip.AddrPortFrom(addrOf(w.client.Sandbox, n.to.Addr()), 0), n.to)
			}
		})
	}
}

func dontFragment(c syscall.Conn, family netip.Addr) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	control := func(fd uintptr) {
		if family.Is4() {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
		} else {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO)
		}
	}
	return errors.Join(raw.Control(control), os.NewSyscallError("setsockopt", err))
}

// way has a client and a backend that communicate through the edge. Both are new, so that neither
// has learnt a path MTU.
type way struct {
	*edge
	client *lab.Client
	pod    *lab.Pod // the backend
}

func newWay(t testing.TB, e *edge, remote bool) *way {
	t.Helper()
	at := e.at
	if remote {
		at = e.two
	}
	name := filepath.Base(t.Name())
	w := &way{edge: e, client: e.lab.Client("client " + name), pod: at.Pod("backend " + name)}
	for _, s := range []*lab.Sandbox{w.client.Sandbox, w.pod.Sandbox} {
		if err := announceWide(s); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.pod.ServeBulk(targetPort); err != nil {
		t.Fatal(err)
	}
	if _, err := w.pod.ServeEcho(targetPort); err != nil {
		t.Fatal(err)
	}
	w.use(t, w.pod)
	return w
}

// announceWide makes a machine announce the segment size of a link with MTU 1500, whatever its own
// is. Otherwise no peer would ever send it segments that are too long.
func announceWide(s *lab.Sandbox) error {
	for family, mss := range map[int]int{netlink.FAMILY_V4: 1460, netlink.FAMILY_V6: 1440} {
		routes, err := s.Netlink().RouteList(nil, family)
		if err != nil {
			return err
		}
		for _, r := range routes {
			if r.Gw == nil {
				continue
			}
			r.AdvMSS = mss
			if err := s.Netlink().RouteReplace(&r); err != nil {
				return err
			}
		}
	}
	return nil
}

// limitTo gives this node a route with a small MTU.
func (w *way) limitTo(s *lab.Sandbox) error {
	nl := w.at.Netlink()
	for _, a := range []netip.Addr{s.Addr4, s.Addr6} {
		routes, err := nl.RouteGet(a.AsSlice())
		if err != nil {
			return err
		}
		r := netlink.Route{Dst: netlink.NewIPNet(a.AsSlice()), Gw: routes[0].Gw, LinkIndex: routes[0].LinkIndex, MTU: narrow, MTULock: true}
		if err := nl.RouteReplace(&r); err != nil {
			return err
		}
	}
	return nil
}

// errors captures the ICMP errors about packets that were too long, which a machine receives.
func (w *way) errors(t testing.TB, s *lab.Sandbox) *lab.Capture {
	t.Helper()
	c, err := s.Capture(lab.Uplink, func(c lab.Captured) bool {
		return !c.Outgoing && (c.ICMP.Is(packet.FragNeeded) || c.ICMP.Is(packet.PacketTooBig6))
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// expectTooLong waits for an error about a packet between these addresses. Port 0 matches any
// port.
func expectTooLong(t testing.TB, c *lab.Capture, network lab.Options, protocol uint8, from, to netip.AddrPort) {
	t.Helper()
	// With the race detector on a busy machine, the capture of a transfer takes seconds to read.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	same := func(got, want netip.AddrPort) bool {
		return got == want || want.Port() == 0 && got.Addr() == want.Addr()
	}
	got, err := c.Expect(ctx, func(c lab.Captured) bool {
		q := c.ICMP.Quoted
		return q != nil && q.Protocol() == protocol && same(q.Source(), from) && same(q.Destination(), to)
	})
	if err != nil {
		t.Errorf("ICMP error about a packet from %s to %s: %v", from, to, err)
		return
	}
	if got.ICMP.Rest&0xffff != narrow {
		t.Errorf("the error reports an MTU of %d bytes", got.ICMP.Rest&0xffff)
	}
	if network.NoOffload {
		if err := got.Verify(); err != nil {
			t.Errorf("%v in\n%s", err, got)
		}
	}
}
