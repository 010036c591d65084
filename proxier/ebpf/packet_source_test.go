// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/packet"
)

// sourceScenes are about conflicts over the source port that a backend would see. Only one source
// port can be allocated.
func sourceScenes(p *path, e ends) []scene {
	const SYN, ACK, RST = packet.SYN, packet.ACK, packet.RST
	given := netip.AddrPortFrom(e.client.Addr(), e.nat.Port())
	third := func(flags packet.Flags) packet.Packet { return tcp(e.client, e.nodePort, flags) }
	strangers := func(to netip.AddrPort) packet.Packet { return tcp(e.stranger, to, SYN) }
	return []scene{
		{
			name: "two frontends lead one client's port to one backend",
			steps: []step{
				{in, tcp(e.client, e.local, SYN), next, tcp(e.client, e.here, SYN), "FORWARD_LOCAL", nil},
				{in, tcp(e.client, e.twin, SYN), next, tcp(given, e.here, SYN), "FORWARD_LOCAL", nil},
				{out, tcp(e.here, e.client, SYN|ACK), next, tcp(e.local, e.client, SYN|ACK), "FORWARD_REPLY", nil},
				{out, tcp(e.here, given, SYN|ACK), next, tcp(e.twin, e.client, SYN|ACK), "FORWARD_REPLY", nil},
				{in, tcp(e.client, e.twin, ACK), next, tcp(given, e.here, ACK), "FORWARD_LOCAL", nil},
				{in, third(SYN), redirect, p.resetOf(e.nodePort, e.client, RST|ACK, 0, 1), "REJECT_NO_PORT", nil},
				// Other clients, and UDP, do not conflict.
				{in, strangers(e.twin), next, tcp(e.stranger, e.here, SYN), "FORWARD_LOCAL", nil},
				{in, udp(e.client, e.twin), next, udp(e.client, e.here), "FORWARD_LOCAL", nil},
			},
			stats: map[string]lbmap.ServiceStats{"local": {Connections: 2}, "twin": {Connections: 3}},
		},
		{
			name: "all source ports are used",
			steps: []step{
				{in, tcp(e.client, e.remote, SYN), redirect, forwarded(tcp(e.nat, e.there, SYN)), "FORWARD_REMOTE", nil},
				{in, strangers(e.remote), redirect, p.resetOf(e.remote, e.stranger, RST|ACK, 0, 1), "REJECT_NO_PORT", nil},
				{in, udp(e.client, e.remote), redirect, forwarded(udp(e.nat, e.there)), "FORWARD_REMOTE", nil},
				{in, udp(e.stranger, e.remote), redirect, p.portUnreachable(e.remote, udp(e.stranger, e.remote)), "REJECT_NO_PORT", nil},
				// The first connection keeps its port until its flow has expired.
				{in, tcp(e.there, e.nat, SYN|ACK), redirect, forwarded(tcp(e.remote, e.client, SYN|ACK)), "FORWARD_REPLY", nil},
				{happens: func(p *path) error { return p.expire(90 * time.Second) }},
				{in, strangers(e.remote), redirect, forwarded(tcp(e.nat, e.there, SYN)), "FORWARD_REMOTE", nil},
				{in, tcp(e.there, e.nat, SYN|ACK), redirect, forwarded(tcp(e.remote, e.stranger, SYN|ACK)), "FORWARD_REPLY", nil},
			},
		},
		{
			name: "connections of this host from a source port that a flow has",
			steps: []step{
				{in, tcp(e.client, e.remote, SYN), redirect, forwarded(tcp(e.nat, e.there, SYN)), "FORWARD_REMOTE", nil},
				{out, udp(e.nat, e.there), next, same, "", nil},
				{out, tcp(e.nat, e.there, ACK), next, same, "", nil},
				// There is no other port.
				{out, tcp(e.nat, e.there, SYN), next, same, "", nil},
				{in, tcp(e.there, e.nat, RST), redirect, forwarded(tcp(e.remote, e.client, RST)), "FORWARD_REPLY", nil},
			},
		},
		{
			name: "a client whose address this node has, so that nothing leads there",
			steps: []step{
				{in, tcp(e.nodePort, e.remote, SYN), redirect, forwarded(tcp(e.nat, e.there, SYN)), "FORWARD_REMOTE", nil},
				{in, tcp(e.there, e.nat, SYN|ACK), shot, same, "DROP_NO_ROUTE", nil},
				{in, quoting(e.there.Addr(), e.message(packet.PortUnreachable, packet.PortUnreachable6), 0, tcp(e.nat, e.there, SYN), 0),
					shot, same, "DROP_NO_ROUTE", nil},
			},
		},
	}
}

// TestPacketPorts allocates all source ports. Sockets of the node hold some ports.
func TestPacketPorts(t *testing.T) {
	kernel.Needs(t, capabilities.Loop)
	const first, last = 1024, 1123 // more ports than are tried at intervals
	sizes := pathSizes
	sizes.YoungFlows = 512
	p := newPath(t, Options{Sizes: sizes, NodePortRange: datapath.PortRange{First: last + 1, Last: 65535}})
	p.endsCluster(t)
	held := []uint16{1030, 1031, 1100}
	for _, at := range []netip.AddrPort{
		netip.AddrPortFrom(netip.IPv6Unspecified(), held[0]), netip.AddrPortFrom(p.at.Addr4, held[1]), netip.AddrPortFrom(p.at.Addr6, held[1]),
		netip.AddrPortFrom(netip.IPv4Unspecified(), held[2]), netip.AddrPortFrom(p.at.Addr6, held[2]),
	} {
		p.hold(t, at)
	}
	for _, e := range []ends{endsOf(proxier.IPv4), endsOf(proxier.IPv6)} {
		for protocol, send := range map[string]func(src, dst netip.AddrPort) packet.Packet{
			"TCP": func(src, dst netip.AddrPort) packet.Packet { return tcp(src, dst, packet.SYN) }, "UDP": udp,
		} {
			t.Run(e.String()+"/"+protocol, func(t *testing.T) {
				given := map[uint16]bool{}
				var err error
				for port := uint16(2000); ; port++ {
					frame := p.frame(send(netip.AddrPortFrom(e.client.Addr(), port), e.remote))
					to := packet.Packet{}
					err = p.at.Do(func() error {
						got, err := p.run(in, frame)
						to = packet.Parse(got.Frame)
						return err
					})
					if err != nil {
						t.Fatal(err)
					}
					if to.Destination().Addr() != e.there.Addr() {
						break // rejected
					}
					if given[to.Source().Port()] {
						t.Fatalf("port %d was allocated twice", to.Source().Port())
					}
					given[to.Source().Port()] = true
				}
				var want []uint16
				for port := uint16(first); port <= last; port++ {
					if !slices.Contains(held, port) {
						want = append(want, port)
					}
				}
				if got := slices.Sorted(maps.Keys(given)); !slices.Equal(got, want) {
					t.Errorf("%d ports were allocated, %v, want %d", len(got), got, len(want))
				}
				if err := p.reset(); err != nil {
					t.Fatal(err)
				}
			})
		}
	}
}

// TestPacketManyPorts allocates more ports than one search tries. The first search of a second
// tries all ports. Later searches may miss a port that has become free.
func TestPacketManyPorts(t *testing.T) {
	kernel.Needs(t, capabilities.Loop)
	const first, ports, rounds = 1024, 400, 100 // a search tries 288
	sizes := pathSizes
	sizes.YoungFlows = 512
	p := newPath(t, Options{Sizes: sizes, NodePortRange: datapath.PortRange{First: first + ports, Last: 65535}})
	p.endsCluster(t)
	for _, e := range []ends{endsOf(proxier.IPv4), endsOf(proxier.IPv6)} {
		t.Run(e.String(), func(t *testing.T) {
			if err := p.reset(); err != nil {
				t.Fatal(err)
			}
			given, client := map[uint16]bool{}, uint16(2000)
			// give opens another connection, and reports whether it got a port.
			give := func() bool {
				client++
				got, err := p.ask(in, tcp(netip.AddrPortFrom(e.client.Addr(), client), e.remote, packet.SYN))
				if err != nil {
					t.Fatal(err)
				}
				to := packet.Parse(got.Frame)
				if to.Destination().Addr() != e.there.Addr() {
					return false
				}
				port := to.Source().Port()
				if given[port] || port < first || port >= first+ports {
					t.Fatalf("port %d was allocated, as number %d", port, len(given)+1)
				}
				given[port] = true
				return true
			}
			for len(given) < ports {
				if !give() {
					t.Fatalf("no port was allocated after %d of %d ports", len(given), ports)
				}
			}
			r := rand.New(rand.NewPCG(1, uint64(e.Family)))
			missed := 0
			for range rounds {
				port := uint16(first + r.IntN(ports))
				p.endOf(t, port)
				delete(given, port)
				if give() {
					continue
				}
				missed++
				// As at the start of another second.
				if err := lbmap.DeleteAll(p.maps["tdm_snat"]); err != nil {
					t.Fatal(err)
				}
				if !give() {
					t.Fatalf("port %d is free, but a search of all ports did not find it", port)
				}
			}
			if give() {
				t.Error("a port was allocated although none is free")
			}
			// Some of the 288 tries are duplicates.
			if missed == 0 || missed > rounds/2 {
				t.Errorf("the only free port was missed in %d of %d searches", missed, rounds)
			}
		})
	}
}

// endOf ends the flow that uses a source port.
func (p *path) endOf(t *testing.T, port uint16) {
	t.Helper()
	for i := range p.flows {
		if f := &p.flows[i]; lbmap.FlowStage(f.Life) >= lbmap.FlowYoung && f.Reply.Dport == lbmap.NetworkPort(port) {
			f.Flags, f.Seen = f.Flags|lbmap.FlowClosed, f.Seen-60
		}
	}
	timeouts := flowtable.DefaultTimeouts()
	if n, err := p.tier.flowTable.Sweep(t.Context(), &timeouts, flowtable.MonotonicSeconds()); err != nil || n != 1 {
		t.Fatalf("%d flows ended: %v", n, err)
	}
}

// hold binds a port with two sockets of the node: a TCP listener, and a UDP socket.
func (p *path) hold(t *testing.T, at netip.AddrPort) {
	t.Helper()
	err := p.at.Do(func() error {
		for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
			family := unix.AF_INET6
			var addr unix.Sockaddr = &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
			if at.Addr().Is4() {
				family, addr = unix.AF_INET, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
			}
			fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			t.Cleanup(func() { unix.Close(fd) })
			if err := unix.Bind(fd, addr); err != nil {
				return fmt.Errorf("bind %s: %w", at, err)
			}
			if kind == unix.SOCK_STREAM {
				if err := unix.Listen(fd, 1); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
