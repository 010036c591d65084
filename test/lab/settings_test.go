// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab_test

import (
	"context"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// withSettings calls a test with the settings off and on, of one node each.
func withSettings(t *testing.T, s lab.NodeSettings, test func(t *testing.T, l *lab.Lab, on bool)) {
	if err := s.Available(); err != nil {
		lab.SkipOrFail(t, err)
	}
	t.Run("off", func(t *testing.T) { test(t, lab.NewT(t), false) })
	t.Run("on", func(t *testing.T) { test(t, lab.NewT(t, lab.Options{Nodes: s}), true) })
}

// reaches reports whether a request is answered soon.
func reaches(from *lab.Sandbox, to netip.AddrPort) (lab.Reply, bool) {
	ctx, cancel := context.WithTimeout(bg, 200*time.Millisecond)
	defer cancel()
	r, err := from.Ask(ctx, "udp", to)
	return r, err == nil
}

func TestConntrack(t *testing.T) {
	withSettings(t, lab.NodeSettings{Conntrack: true}, func(t *testing.T, l *lab.Lab, on bool) {
		n := l.Node("node1")
		p, c := n.Pod("p"), l.Client("outside")
		mustServe(t, p.Sandbox, 80)
		for _, a := range families(c.Sandbox, p.Sandbox) {
			if _, err := c.Ask(bg, "tcp", port(a[1], 80)); err != nil {
				t.Error(err)
			}
		}
		if got := connections(t, n); got != map[bool]int{true: 2, false: 0}[on] {
			t.Errorf("conntrack knows %d connections", got)
		}
	})
}

// connections counts the conntrack entries of a node.
func connections(tb testing.TB, n *lab.Node) (count int) {
	tb.Helper()
	err := n.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/nf_conntrack")
		for _, c := range b {
			if c == '\n' {
				count++
			}
		}
		return err
	})
	if err != nil {
		tb.Fatal(err)
	}
	return count
}

func TestForwardDrop(t *testing.T) {
	withSettings(t, lab.NodeSettings{ForwardDrop: true}, func(t *testing.T, l *lab.Lab, on bool) {
		n := l.Node("node1")
		p, c := n.Pod("p"), l.Client("outside")
		mustServe(t, p.Sandbox, 80)
		mustServe(t, n.Sandbox, 80)
		for _, vip := range []string{"203.0.113.5", "2001:db8:203:113::5"} {
			// An address of the pod that is outside the node's pod range.
			addr := netip.MustParseAddr(vip)
			prefix := netip.PrefixFrom(addr, addr.BitLen())
			ip(t, p.Sandbox, "addr", "add", prefix.String(), "dev", "lo", "nodad")
			via := p.Addr6
			if addr.Is4() {
				via = p.Addr4
			}
			ip(t, n.Sandbox, "route", "add", prefix.String(), "via", via.String())
			if err := l.Announce(prefix, n); err != nil {
				t.Fatal(err)
			}
			// The node itself forwards nothing to get there.
			eventually(t, "a new address", func() bool { _, ok := reaches(n.Sandbox, port(addr, 80)); return ok })
			if _, ok := reaches(c.Sandbox, port(addr, 80)); ok == on {
				t.Errorf("%s answers: %v", addr, ok)
			}
		}
		for _, a := range append(families(c.Sandbox, p.Sandbox), families(c.Sandbox, n.Sandbox)...) {
			if _, ok := reaches(c.Sandbox, port(a[1], 80)); !ok {
				t.Errorf("%s does not answer", a[1])
			}
		}
	})
}

func TestDropInvalid(t *testing.T) {
	withSettings(t, lab.NodeSettings{DropInvalid: true}, func(t *testing.T, l *lab.Lab, on bool) {
		n := l.Node("node1")
		p, c := n.Pod("p"), l.Client("outside")
		mustServe(t, p.Sandbox, 80)
		replies := capture(t, c.Sandbox, lab.Uplink, func(p lab.Captured) bool { return !p.Outgoing && p.TCP != nil })
		for _, to := range []*lab.Sandbox{p.Sandbox, n.Sandbox} {
			for _, a := range families(c.Sandbox, to) {
				// An unsolicited SYN/ACK is answered by a reset.
				stray := packet.NewTCP(port(a[0], 40000), port(a[1], 80), packet.SYN|packet.ACK, nil)
				syn := packet.NewTCP(port(a[0], 40001), port(a[1], 81), packet.SYN, nil)
				send(t, c.Sandbox, stray, syn)
				expectFirst(t, replies, from(port(a[1], 80)), from(port(a[1], 81)), on)
			}
		}
		header := packet.Ethernet{Dst: mac(t, p.Sandbox, lab.Uplink), Src: mac(t, n.Sandbox, p.HostLink)}
		for _, a := range families(c.Sandbox, p.Sandbox) {
			// If conntrack did not see the SYN of a connection, the pod's SYN/ACK is
			// invalid.
			unseen := packet.NewTCP(port(a[0], 40002), port(a[1], 80), packet.SYN, nil)
			unseen.Ethernet = &header
			if err := n.SendFrame(p.HostLink, unseen.Build()); err != nil {
				t.Fatal(err)
			}
			send(t, c.Sandbox, packet.NewTCP(port(a[0], 40003), port(a[1], 81), packet.SYN, nil))
			expectFirst(t, replies, from(port(a[1], 80)), from(port(a[1], 81)), on)
		}
	})
}

// expectFirst waits for two packets, or only for the second one if the first must
// be dropped.
func expectFirst(tb testing.TB, c *lab.Capture, first, second func(lab.Captured) bool, dropped bool) {
	tb.Helper()
	either := func(p lab.Captured) bool { return first(p) || second(p) }
	got := expect(tb, c, either)
	if dropped == first(got) {
		tb.Errorf("the first packet is to be dropped: %v, got\n%s", dropped, got)
	}
	if !dropped {
		expect(tb, c, second)
	}
}

func mac(tb testing.TB, s *lab.Sandbox, device string) (m packet.MAC) {
	tb.Helper()
	link, err := s.Netlink().LinkByName(device)
	if err != nil {
		tb.Fatal(err)
	}
	copy(m[:], link.Attrs().HardwareAddr)
	return m
}

func TestMasquerade(t *testing.T) {
	withSettings(t, lab.NodeSettings{Masquerade: true}, func(t *testing.T, l *lab.Lab, on bool) {
		n := l.Node("node1")
		p, q, c := n.Pod("p"), l.Node("node2").Pod("q"), l.Client("outside")
		mustServe(t, q.Sandbox, 80)
		mustServe(t, c.Sandbox, 80)
		for i, own := range []netip.Addr{p.Addr4, p.Addr6} {
			outside := own
			if on {
				outside = families(n.Sandbox, n.Sandbox)[i][0]
			}
			for to, want := range map[netip.Addr]netip.Addr{
				families(q.Sandbox, c.Sandbox)[i][0]: own, families(q.Sandbox, c.Sandbox)[i][1]: outside,
			} {
				if r, err := p.Ask(bg, "tcp", port(to, 80)); err != nil || r.Peer.Addr() != want {
					t.Errorf("%s sees %s, %v; want %s", to, r.Peer, err, want)
				}
			}
		}
	})
}

func TestStrictSource(t *testing.T) {
	withSettings(t, lab.NodeSettings{StrictSource: true}, func(t *testing.T, l *lab.Lab, on bool) {
		n := l.Node("node1")
		p, q, c := n.Pod("p"), n.Pod("q"), l.Client("outside")
		arrived := capture(t, p.Sandbox, lab.Uplink, func(p lab.Captured) bool { return p.UDP != nil })
		to := port(p.Addr4, 80)
		spoofed, honest := packet.NewUDP(port(q.Addr4, 1), to, nil), packet.NewUDP(port(c.Addr4, 1), to, nil)
		send(t, c.Sandbox, spoofed, honest)
		expectFirst(t, arrived, from(spoofed.Source()), from(honest.Source()), on)
	})
}

// Settings come and go, all of them together.
func TestSet(t *testing.T) {
	all := lab.NodeSettings{Conntrack: true, ForwardDrop: true, DropInvalid: true, Masquerade: true, StrictSource: true}
	if err := all.Available(); err != nil {
		lab.SkipOrFail(t, err)
	}
	l := lab.NewT(t)
	n := l.Node("node1")
	p, c := n.Pod("p"), l.Client("outside")
	mustServe(t, c.Sandbox, 80)
	for _, s := range []lab.NodeSettings{all, {}, {StrictSource: true}, {Conntrack: true}, {}} {
		if err := n.Set(s); err != nil {
			t.Fatal(err)
		}
		before := connections(t, n)
		for i, a := range families(p.Sandbox, c.Sandbox) {
			want := a[0]
			if s.Masquerade {
				want = families(n.Sandbox, n.Sandbox)[i][0]
			}
			if r, err := p.Ask(bg, "tcp", port(a[1], 80)); err != nil || r.Peer.Addr() != want {
				t.Errorf("%+v: got %+v, %v, want %s", s, r, err, want)
			}
		}
		if tracked := connections(t, n) > before; tracked != s.Conntrack {
			t.Errorf("%+v: connections are tracked: %v", s, tracked)
		}
	}
}

func TestSettingsWithoutTools(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if err := (lab.NodeSettings{StrictSource: true}).Available(); err != nil {
		t.Error(err)
	}
	err := lab.NodeSettings{Conntrack: true}.Available()
	if want := `iptables-restore, which node settings need (Debian package iptables): exec: "iptables-restore": executable file not found in $PATH`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if _, err := lab.New(lab.Options{Nodes: lab.NodeSettings{Conntrack: true}}); err == nil {
		t.Error("a lab opened although a tool that its nodes need is missing")
	}
}
