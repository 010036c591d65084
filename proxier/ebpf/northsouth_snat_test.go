// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// TestSourcePortsRunOut: a backend can have as many connections as the node has unused ports. The
// next one is refused and counted. It is served when one of the others has ended.
func TestSourcePortsRunOut(t *testing.T) {
	kernel.Needs(t, capabilities.Loop)
	const first, ports = 1024, 50
	// The host listens on this port, and connects to that backend from another one.
	const listening = first + 7
	for _, network := range []string{"tcp", "udp"} {
		e := newEdge(t, Options{NodePortRange: datapath.PortRange{First: first + ports, Last: 65535}})
		serve(t, e.there)
		other := serve(t, e.two.Pod("other"))
		e.use(t, e.there)
		listen := e.at.ServeTCP
		if network == "udp" {
			listen = e.at.ServeUDP
		}
		if _, err := listen(listening); err != nil {
			t.Fatal(err)
		}
		for i, own := range e.addrs() {
			connected := uint16(first + 13 + i)
			n := entry{network, "node port", netip.AddrPortFrom(own, nodePort)}
			t.Run(n.String(), func(t *testing.T) {
				direct, err := e.at.DialFrom(t.Context(), network, connected, netip.AddrPortFrom(addrOf(e.there.Sandbox, own), targetPort))
				if err != nil {
					t.Fatal(err)
				}
				defer direct.Close()
				counts := counted{tier: e.tier}
				counts.since(t)
				used := map[uint16]*visit{}
				for len(used) < ports-2 {
					v := e.visit(t, n)
					peer := v.seen(t)
					if peer.Addr() != own || peer.Port() < first || peer.Port() >= first+ports || peer.Port() == listening || peer.Port() == connected {
						t.Errorf("the backend sees %s, which must not be used", peer)
					}
					if used[peer.Port()] != nil {
						t.Fatalf("port %d is used twice", peer.Port())
					}
					used[peer.Port()] = v
				}
				if _, err := e.client.Ask(t.Context(), n.network, n.to); !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("connection without a free port: %v", err)
				}
				if got := counts.since(t)["rejected_no_source_port"]; got != 1 {
					t.Errorf("%d packets were rejected without a free port", got)
				}
				// Other backends have ports of their own.
				e.use(t, e.there, other)
				waitFor(t, "a reply of the other backend", func() bool {
					r, err := e.client.Ask(t.Context(), n.network, n.to)
					if err != nil && !errors.Is(err, unix.ECONNREFUSED) {
						t.Error(err)
					}
					return r.Server == "other"
				})
				e.use(t, e.there)

				ended := used[first]
				lab.HangUp(t.Context(), ended.conn) // otherwise a retransmission would get a new flow, and with it a port
				if err := ended.conn.Close(); err != nil {
					t.Fatal(err)
				}
				e.forget(t, ended)
				waitFor(t, "the port to be used again", func() bool {
					r, err := e.client.Ask(t.Context(), n.network, n.to)
					if err == nil && r.Peer.Port() != first {
						t.Errorf("the backend sees %s", r.Peer)
					}
					return err == nil
				})
				for _, v := range used {
					if v != ended {
						v.want(t, "there")
					}
				}
				if _, err := lab.AskConn(t.Context(), direct); err != nil {
					t.Errorf("the host's own connection: %v", err)
				}
			})
		}
	}
}

// TestSourcePortsOfHost: a connection of this host may leave by a source port that a client's
// connection towards the same backend has, because netfilter masquerades a pod's connection, or a
// socket is bound to the port. It may also be the port that another connection of this host got
// for that reason. All of them work.
func TestSourcePortsOfHost(t *testing.T) {
	e := newEdge(t, Options{})
	serve(t, e.there)
	e.use(t, e.there)
	for _, n := range e.entries() {
		t.Run(n.String(), func(t *testing.T) {
			v := e.visit(t, n)
			counts := counted{tier: e.tier}
			counts.since(t)
			var conns []net.Conn
			seen := []netip.AddrPort{v.seen(t)}
			for range 3 {
				last := seen[len(seen)-1]
				own, err := e.at.DialFrom(t.Context(), n.network, last.Port(), netip.AddrPortFrom(addrOf(e.there.Sandbox, n.to.Addr()), targetPort))
				if err != nil {
					t.Fatalf("the host's connection from port %d: %v", last.Port(), err)
				}
				defer own.Close()
				r, err := lab.AskConn(t.Context(), own)
				if err != nil {
					t.Fatalf("the host's connection from port %d: %v", last.Port(), err)
				}
				if r.Peer.Addr() != last.Addr() || slices.Contains(seen, r.Peer) {
					t.Errorf("the backend sees another connection of the host from %s, want a port other than in %v", r.Peer, seen)
				}
				conns, seen = append(conns, own), append(seen, r.Peer)
			}
			for i, own := range conns {
				if r, err := lab.AskConn(t.Context(), own); err != nil || r.Peer != seen[i+1] {
					t.Errorf("connection %d of the host: %v, error %v; want the peer %s", i, r, err, seen[i+1])
				}
			}
			v.want(t, "there")
			if got := counts.since(t)["remapped"]; got == 0 {
				t.Error("no packet was counted as remapped")
			}
		})
	}
}

// TestSourcePortsOfClients: a client may use the source port of a connection to a Service for one to the
// backend itself: a client outside, and a pod which packets serve, or which packets served just now. Both
// connections work.
func TestSourcePortsOfClients(t *testing.T) {
	e := newEdge(t, Options{}, lab.Options{Pause: true})
	serve(t, e.here)
	e.use(t, e.here)
	pod := e.at.Pod("pod")
	i := e.optOut(t, pod)
	test := func(client *lab.Sandbox, between func(), entries ...entry) {
		for j, n := range entries {
			t.Run(client.Name+" "+n.String(), func(t *testing.T) {
				counts := counted{tier: e.tier}
				counts.since(t)
				from := uint16(20000 + j)
				ask := func(c net.Conn) netip.AddrPort {
					r, err := lab.AskConn(t.Context(), c)
					if err != nil {
						t.Fatalf("to %s: %v", c.RemoteAddr(), err)
					}
					return r.Peer
				}
				service, err := client.DialFrom(t.Context(), n.network, from, n.to)
				if err != nil {
					t.Fatal(err)
				}
				defer service.Close()
				seen := ask(service)
				between()
				direct, err := client.DialFrom(t.Context(), n.network, from, netip.AddrPortFrom(addrOf(e.here.Sandbox, n.to.Addr()), targetPort))
				if err != nil {
					t.Fatalf("to the backend: %v", err)
				}
				defer direct.Close()
				other := ask(direct)
				if other.Addr() != seen.Addr() || other.Port() == seen.Port() {
					t.Errorf("the backend sees %s and %s, want two ports", seen, other)
				}
				if got := ask(service); got != seen {
					t.Errorf("the backend sees the connection to the Service from %s, before from %s", got, seen)
				}
				if got := ask(direct); got != other {
					t.Errorf("the backend sees the connection from %s, before from %s", got, other)
				}
				if got := counts.since(t)["remapped"]; got == 0 {
					t.Error("no packet was counted as remapped")
				}
			})
		}
	}
	test(e.client.Sandbox, func() {}, e.entries("tcp")...)
	test(pod.Sandbox, func() {}, e.entries()...)
	back := func() {
		if _, err := i.RemoveOptOut(cookieOf(t, pod.Sandbox)); err != nil {
			t.Fatal(err)
		}
	}
	test(pod.Sandbox, back, e.entries("tcp")[0])
}

// seen sends another request, and returns the client's address as the backend sees it.
func (v *visit) seen(t testing.TB) netip.AddrPort {
	t.Helper()
	r, err := lab.AskConn(t.Context(), v.conn)
	if err != nil {
		t.Fatalf("%s: %v", v.entry, err)
	}
	return r.Peer
}

// forget ends the flow of a connection, as after a day without packets.
func (e *edge) forget(t testing.TB, v *visit) {
	t.Helper()
	client := netip.MustParseAddrPort(v.conn.LocalAddr().String())
	timeouts := flowtable.DefaultTimeouts()
	waitFor(t, "the end of a flow", func() bool { // its last packets may still be queued
		err := e.tier.flowTable.Each(func(_ int, list []lbmap.Flow) error {
			for i := range list {
				f := &list[i]
				if lbmap.FlowStage(f.Life) >= lbmap.FlowYoung && lbmap.ToAddrPort(f.Request.Src, f.Request.Sport) == client {
					atomic.StoreUint32(&f.Seen, flowtable.MonotonicSeconds()-25*60*60)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		ended, err := e.tier.flowTable.Sweep(t.Context(), &timeouts, flowtable.MonotonicSeconds())
		if err != nil || ended > 1 {
			t.Fatalf("%d flows ended: %v", ended, err)
		}
		return ended == 1
	})
}

// TestClientsWithTheSamePort: clients with the same source port get different ones towards the
// same backend.
func TestClientsWithTheSamePort(t *testing.T) {
	e := newEdge(t, Options{NodePortRange: datapath.PortRange{First: 1028, Last: 65535}}) // just enough ports
	serve(t, e.there)
	e.use(t, e.there)
	for i, n := range e.entries() {
		var peers []netip.AddrPort
		for _, c := range []*lab.Client{e.client, e.lab.Client("client " + n.String())} {
			conn, err := c.DialFrom(t.Context(), n.network, uint16(5555+i), n.to)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			r, err := lab.AskConn(t.Context(), conn)
			if err != nil {
				t.Fatalf("%s: %v", n, err)
			}
			peers = append(peers, r.Peer)
		}
		if peers[0] == peers[1] {
			t.Errorf("%s: the backend sees %s for both clients", n, peers[0])
		}
	}
}

// TestSourcePorts: no source port is privileged, a NodePort, or one that the kernel assigns to
// the host's own connections, as long as there are others. Ports towards each backend are
// distributed over the whole pool, and none is used twice.
func TestSourcePorts(t *testing.T) {
	const flows, backends = 5000, 8
	nodePorts := datapath.PortRange{First: 30000, Last: 32767}
	e := newEdge(t, Options{NodePortRange: nodePorts, Sizes: lbmap.Sizes{Frontends: 64, Services: 64, Backends: 64, Slots: 64,
		Affinity: 64, UDPPeers: 16, OptOuts: 16, TCPFlows: 16, UDPFlows: 16, YoungFlows: flows}})
	var unused []netip.Addr
	for i := range byte(backends) {
		unused = append(unused, netip.AddrFrom4([4]byte{10, 244, 2, 200 + i}))
	}
	e.useAddrs(t, unused...)
	w := newWire(t, e.client, lb4)
	for i := range uint16(flows) {
		from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(i % 7), 1}), 1024+i)
		if err := w.send(w.frame(packet.NewTCP(from, netip.AddrPortFrom(lb4, lbPort), packet.SYN, nil))); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, "all flows to be created", func() bool { return e.tier.flowTable.Used() == flows })
	var ephemeral datapath.PortRange
	if err := e.at.Do(func() (err error) { ephemeral, err = datapath.EphemeralPorts(); return err }); err != nil {
		t.Fatal(err)
	}
	used := map[netip.Addr][]uint16{}
	err := e.tier.flowTable.Each(func(_ int, list []lbmap.Flow) error {
		for i := range list {
			if f := &list[i]; lbmap.FlowStage(f.Life) >= lbmap.FlowYoung {
				backend, port := lbmap.ToAddr(f.Reply.Src), lbmap.ToAddrPort(f.Reply.Dst, f.Reply.Dport).Port()
				used[backend] = append(used[backend], port)
				if one := (datapath.PortRange{First: port, Last: port}); port < 1024 || one.Overlaps(nodePorts) || one.Overlaps(ephemeral) {
					t.Errorf("port %d is used, which is reserved", port)
				}
			}
		}
		return nil
	})
	if err != nil || len(used) != backends {
		t.Fatalf("%d backends are used: %v", len(used), err)
	}
	for backend, ports := range used {
		slices.Sort(ports)
		if all := len(ports); len(slices.Compact(ports)) != all {
			t.Errorf("%s: a port is used twice", backend)
		}
		// These blocks of 4096 ports are entirely in the pool.
		for _, block := range []uint16{1, 2, 3, 4, 5, 6} {
			if !slices.ContainsFunc(ports, func(p uint16) bool { return p/4096 == block }) {
				t.Errorf("%s: of %d ports, none is in %d-%d", backend, len(ports), block*4096, block*4096+4095)
			}
		}
	}
}
