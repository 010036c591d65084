// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/sockets"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestUntranslated: sockets that were connected to a frontend before the programs ran are closed
// if they are listed, and if the programs would serve them now.
func TestUntranslated(t *testing.T) {
	for _, test := range []struct {
		name string
		opts Options
		pods bool // pods are served
	}{
		{"all", Options{}, true},
		{"host alone", Options{Left: proxier.Clients{proxier.FromPod: true}}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			kernel.Since(t, 5, 14, "SO_NETNS_COOKIE, by which namespaces are told apart")
			l := lab.NewT(t, lab.Options{Pause: true}) // makes pods visible in /proc
			one := l.Node("node1")
			client, aside, elsewhere := one.Pod("client"), one.Pod("aside"), l.Node("node2").Pod("elsewhere")
			n := newNode(t, one, l, test.opts)
			v4, v6 := netip.AddrPortFrom(vip4, 80), netip.AddrPortFrom(vip6, 80)
			mapped := netip.AddrPortFrom(netip.AddrFrom16(vip4.As16()), 80)

			type untranslatedSocket struct {
				net.Conn
				name   string
				closed bool
			}
			var untranslated []untranslatedSocket
			var pairs []sockets.Pair
			for _, s := range []struct {
				name          string
				from          *lab.Sandbox
				to            netip.AddrPort
				named, closed bool
			}{
				{"pod IPv4", client.Sandbox, v4, true, test.pods},
				{"pod IPv6", client.Sandbox, v6, true, test.pods},
				{"pod IPv4 by IPv6", client.Sandbox, mapped, true, test.pods},
				{"host IPv4", one.Sandbox, v4, true, true},
				{"host IPv6", one.Sandbox, v6, true, true},
				{"pod, not named", client.Sandbox, v4, false, false},
				{"opted out", aside.Sandbox, v4, true, false},
				{"another node", elsewhere.Sandbox, v4, true, false},
			} {
				c, err := s.from.Dial(t.Context(), "udp", s.to)
				if err != nil {
					t.Fatalf("%s: %v", s.name, err)
				}
				defer c.Close()
				untranslated = append(untranslated, untranslatedSocket{c, s.name, s.closed})
				if local := netip.MustParseAddrPort(c.LocalAddr().String()); s.named {
					pairs = append(pairs, sockets.Pair{Local: netip.AddrPortFrom(local.Addr().Unmap(), local.Port()), Remote: netip.AddrPortFrom(s.to.Addr().Unmap(), s.to.Port())})
				}
			}
			n.OnServiceAdd(dualService())
			n.sync(t)
			n.optOut(t, aside)

			want := 0
			for _, s := range untranslated {
				if s.closed {
					want++
				}
			}
			n.tier.CloseUntranslated(pairs)
			if closed, err := n.tier.sockets.CloseNow(t.Context()); closed != want || err != nil {
				t.Errorf("%d sockets were closed, want %d: %v", closed, want, err)
			}
			for _, s := range untranslated {
				if err := s.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
					t.Fatal(err)
				}
				if _, err := s.Read(make([]byte, 16)); errors.Is(err, unix.ECONNABORTED) != s.closed {
					t.Errorf("%s: read returned %v, want it closed: %v", s.name, err, s.closed)
				}
			}
			if left := n.tier.sockets.TakeUntranslated(); len(left) > 0 {
				t.Errorf("not closed yet: %v", left)
			}
		})
	}
}

// TestUntranslatedWithoutStorage: listed sockets are closed even if socket storage cannot be read.
func TestUntranslatedWithoutStorage(t *testing.T) {
	l := lab.NewT(t, lab.Options{Pause: true})
	one := l.Node("node1")
	n := newNode(t, one, l, Options{})
	n.tier.sockets = sockets.New(sockets.Options{
		Storage: n.tier.maps["tdm_optout"], // not a map of socket storage
		OptOuts: n.tier.maps["tdm_optout"], Stale: n.tier.writer.StaleSockets, Cgroup: n.tier.cgroup, Host: n.tier.netns,
		ProcRoot: "/proc", Report: func(proxier.Problem) {},
	})
	to := netip.AddrPortFrom(vip4, 80)
	c, err := one.Dial(t.Context(), "udp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	n.tier.CloseUntranslated([]sockets.Pair{{Local: netip.MustParseAddrPort(c.LocalAddr().String()), Remote: to}})
	if closed, err := n.tier.sockets.CloseNow(t.Context()); closed != 1 || err == nil {
		t.Errorf("%d sockets were closed, error %v", closed, err)
	}
}

// TestUntranslatedAreKept: after an error, sockets stay listed, and are looked for again.
func TestUntranslatedAreKept(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	n := newNode(t, one, l, Options{ProcRoot: t.TempDir() + "/nowhere"})
	pair := sockets.Pair{Local: netip.AddrPortFrom(one.Addr4, 4000), Remote: netip.AddrPortFrom(vip4, 80)}
	n.tier.CloseUntranslated([]sockets.Pair{pair})
	if _, err := n.tier.sockets.CloseNow(t.Context()); err == nil {
		t.Error("no error")
	}
	if left := n.tier.sockets.TakeUntranslated(); !left.Has(pair) {
		t.Error("the socket is not listed any more")
	}
}
