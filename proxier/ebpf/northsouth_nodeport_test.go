// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestNodePortsAreProtected: a host process cannot bind a NodePort, where it would never get a
// connection. This covers only the addresses that serve NodePorts, and the NodePort's protocol.
// Pods may bind any port.
func TestNodePortsAreProtected(t *testing.T) {
	refused := unix.EADDRINUSE
	if !kernel.Has(capabilities.SetRetval) {
		refused = unix.EPERM
	}
	four, six := netip.IPv4Unspecified(), netip.IPv6Unspecified()
	for name, protect := range map[string]bool{"protected": true, "not protected": false} {
		t.Run(name, func(t *testing.T) {
			e := newEdge(t, Options{ProtectNodePorts: protect})
			link, err := e.at.Netlink().LinkByName(lab.Uplink)
			if err != nil {
				t.Fatal(err)
			}
			if err := e.at.Netlink().AddrAdd(link, &netlink.Addr{IPNet: netlink.NewIPNet(besides.AsSlice())}); err != nil {
				t.Fatal(err)
			}
			e.OnServiceUpdate(nil, edgeService(func(s *v1.Service) { s.Spec.Ports = s.Spec.Ports[:1] }))
			e.sync(t)
			for _, test := range []struct {
				what    string
				at      *lab.Sandbox
				network string
				addrs   []netip.Addr
				port    uint16
				taken   bool
			}{
				{"where it is served", e.at.Sandbox, "tcp", []netip.Addr{four, six, e.at.Addr4, e.at.Addr6}, nodePort, protect},
				{"at other addresses", e.at.Sandbox, "tcp", []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback(), besides}, nodePort, false},
				{"of another protocol", e.at.Sandbox, "udp", []netip.Addr{four, six, e.at.Addr4, e.at.Addr6}, nodePort, false},
				{"of another number", e.at.Sandbox, "tcp", []netip.Addr{four, six, e.at.Addr4, e.at.Addr6}, nodePort + 1, false},
				{"of a pod", e.here.Sandbox, "tcp", []netip.Addr{four, six, e.here.Addr4, e.here.Addr6}, nodePort, false},
			} {
				for _, addr := range test.addrs {
					to := netip.AddrPortFrom(addr, test.port)
					err := test.at.Do(func() error {
						socket, err := listenAt(test.network, to)
						if err == nil {
							err = socket.Close()
						}
						return err
					})
					if test.taken != errors.Is(err, refused) || !test.taken && err != nil {
						t.Errorf("bind a port %s, %s: %v", test.what, to, err)
					}
				}
			}
		})
	}
}

// TestOneClientPort: a client may use the same source port for several frontends, even if they
// lead to the same backend.
func TestOneClientPort(t *testing.T) {
	e := newEdge(t, Options{})
	serve(t, e.here)
	serve(t, e.there)
	for _, pod := range []*lab.Pod{e.here, e.there} {
		e.use(t, pod)
		for _, network := range []string{"tcp", "udp"} {
			list := e.entries(network)
			for family := range 2 {
				port := uint16(6000 + 2*len(pod.Name) + family)
				peers := map[netip.AddrPort]entry{}
				for _, n := range []entry{list[family], list[2+family]} {
					c, err := dialShared(t.Context(), e.client.Sandbox, n, port)
					if err != nil {
						t.Fatal(err)
					}
					defer c.Close()
					for range 3 {
						r, err := lab.AskConn(t.Context(), c)
						if err != nil || r.Server != pod.Name {
							t.Fatalf("%s from port %d to %s: %v %v", n, port, pod.Name, r, err)
						}
						if other, taken := peers[r.Peer]; taken && other != n {
							t.Errorf("%s sees %s for both %s and %s", pod.Name, r.Peer, n, other)
						}
						peers[r.Peer] = n
					}
				}
			}
		}
	}
}

// dialShared dials from a port that other sockets may use, too.
func dialShared(ctx context.Context, from *lab.Sandbox, n entry, port uint16) (c net.Conn, err error) {
	share := func(_, _ string, raw syscall.RawConn) error {
		return errors.Join(raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		}), err)
	}
	d := net.Dialer{Control: share}
	own := netip.AddrPortFrom(addrOf(from, n.to.Addr()), port)
	if d.LocalAddr = net.Addr(net.TCPAddrFromAddrPort(own)); n.network == "udp" {
		d.LocalAddr = net.UDPAddrFromAddrPort(own)
	}
	doErr := from.Do(func() error {
		c, err = d.DialContext(ctx, n.network, n.to.String())
		return err
	})
	return c, doErr
}

// listenAt listens in the network namespace of the current thread.
func listenAt(network string, at netip.AddrPort) (io.Closer, error) {
	if at.Addr().Is4() {
		network += "4" // otherwise an unspecified address means both families
	}
	if network[:3] == "udp" {
		return net.ListenPacket(network, at.String())
	}
	return net.Listen(network, at.String())
}

// TestHairpin: a backend reaches itself through its own Service, from its own node also through
// the node's frontends, and from another node.
func TestHairpin(t *testing.T) {
	e := newEdge(t, Options{})
	serve(t, e.here)
	serve(t, e.there)
	for _, pod := range []*lab.Pod{e.here, e.there} {
		e.use(t, pod)
		for _, n := range e.entries() {
			r, err := pod.Ask(t.Context(), n.network, n.to)
			if err != nil || r.Server != pod.Name {
				t.Errorf("%s from %s: %v %v", n, pod.Name, r, err)
			}
			// Through this node, the request is masqueraded.
			if own := addrOf(pod.Sandbox, n.to.Addr()); pod == e.there && r.Peer.Addr() == own {
				t.Errorf("%s: %s saw its own address as the client", n, pod.Name)
			}
		}
	}
}
