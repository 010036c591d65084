// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

func capture(tb testing.TB, s *lab.Sandbox, device string, keep func(lab.Captured) bool) *lab.Capture {
	tb.Helper()
	c, err := s.Capture(device, keep)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := c.Close(); err != nil {
			tb.Error(err)
		}
	})
	return c
}

func send(tb testing.TB, s *lab.Sandbox, packets ...packet.Packet) {
	tb.Helper()
	if err := s.Send(bg, packets...); err != nil {
		tb.Fatal(err)
	}
}

// expect fails the test if no such packet comes, or if its checksums are wrong.
func expect(tb testing.TB, c *lab.Capture, match func(lab.Captured) bool) lab.Captured {
	tb.Helper()
	p, err := c.Expect(bg, match)
	if err != nil {
		tb.Fatal(err)
	}
	if err := p.Verify(); err != nil {
		tb.Errorf("%v\n%s", err, p)
	}
	return p
}

func from(a netip.AddrPort) func(lab.Captured) bool {
	return func(c lab.Captured) bool { return c.Source() == a }
}

func port(a netip.Addr, number uint16) netip.AddrPort { return netip.AddrPortFrom(a, number) }

// families are the addresses of two sandboxes, one pair each.
func families(a, b *lab.Sandbox) [][2]netip.Addr {
	return [][2]netip.Addr{{a.Addr4, b.Addr4}, {a.Addr6, b.Addr6}}
}

// A server's answers prove that the kernel accepts the packets.
func TestSend(t *testing.T) {
	l := lab.NewT(t)
	p, c := l.Node("node1").Pod("p"), l.Client("outside")
	mustServe(t, p.Sandbox, 80)
	replies := capture(t, c.Sandbox, lab.Uplink, func(p lab.Captured) bool { return !p.Outgoing })
	for _, a := range families(c.Sandbox, p.Sandbox) {
		here, there := port(a[0], 40000), port(a[1], 80)

		plain := packet.NewUDP(here, there, []byte("?\n"))
		send(t, c.Sandbox, plain)
		if got := expect(t, replies, from(there)); got.Destination() != here || string(got.Payload) != "p "+here.String()+"\n" {
			t.Errorf("answer:\n%s", got)
		}

		long := packet.NewUDP(here, there, make([]byte, 3000))
		send(t, c.Sandbox, long.Fragments(1400, 1)...)
		expect(t, replies, from(there))

		optional := plain.Clone()
		if h := optional.IPv4; h != nil {
			h.Options = []byte{1, 1, 1, 0}
		} else {
			optional.IPv6.Extensions = []packet.Extension{{Type: packet.ProtoDestOptions}}
		}
		send(t, c.Sandbox, optional)
		expect(t, replies, from(there))

		// Wrong packets get no answer: the first answer is that to a later packet.
		wrong := packet.NewUDP(port(a[0], 40001), there, nil)
		wrong.UDP.Checksum = new(uint16(1))
		send(t, c.Sandbox, wrong, plain)
		if got := expect(t, replies, from(there)); got.Destination() != here {
			t.Errorf("a wrong checksum was answered:\n%s", got)
		}

		syn := packet.NewTCP(here, there, packet.SYN, nil)
		send(t, c.Sandbox, syn)
		if got := expect(t, replies, from(there)); got.TCP == nil || got.TCP.Flags != packet.SYN|packet.ACK || got.TCP.Ack != 1 {
			t.Errorf("answer to SYN:\n%s", got)
		}
		closed := packet.NewUDP(here, port(a[1], 81), []byte("x"))
		send(t, c.Sandbox, closed)
		got := expect(t, replies, func(p lab.Captured) bool { return p.ICMP != nil && p.ICMP.Quoted != nil })
		if q := got.ICMP.Quoted; q.Source() != here || q.Destination() != port(a[1], 81) ||
			!got.ICMP.Is(packet.PortUnreachable) && !got.ICMP.Is(packet.PortUnreachable6) {
			t.Errorf("error about a closed port:\n%s", got)
		}
	}
}

// SendFrame does not change a frame.
func TestSendFrame(t *testing.T) {
	l := lab.NewT(t)
	n := l.Node("node1")
	p := n.Pod("p")
	got := capture(t, p.Sandbox, lab.Uplink, nil)
	frame := []byte("\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x01\x88\xb5anything")
	if err := n.SendFrame(p.HostLink, frame); err != nil {
		t.Fatal(err)
	}
	c := expect(t, got, func(c lab.Captured) bool { return c.Ethernet.Type == 0x88b5 })
	if string(c.Frame) != string(frame) || c.Outgoing || time.Since(c.Time).Abs() > time.Minute {
		t.Errorf("got %s: % x", c, c.Frame)
	}
	if err := n.SendFrame("nothing", frame); err == nil {
		t.Error("a device that does not exist took a frame")
	}
	blackhole := packet.NewUDP(port(n.Addr4, 1), port(netip.MustParseAddr("10.244.1.77"), 1), nil)
	if err := n.Send(bg, blackhole); err == nil {
		t.Error("a packet was sent although no route leads to its destination")
	}
}

func TestExpect(t *testing.T) {
	l := lab.NewT(t)
	n := l.Node("node1")
	p := n.Pod("p")
	udp := func(c lab.Captured) bool { return c.UDP != nil }
	all := capture(t, n.Sandbox, p.HostLink, udp)
	for i := range 3 {
		send(t, p.Sandbox, packet.NewUDP(port(p.Addr4, uint16(i)), port(n.Addr4, 9), nil))
	}
	// Expect finds each packet once, and none before the last one found.
	expect(t, all, from(port(p.Addr4, 1)))
	for _, match := range []func(lab.Captured) bool{from(port(p.Addr4, 0)), from(port(p.Addr4, 1))} {
		ctx, cancel := context.WithTimeout(bg, 50*time.Millisecond)
		_, err := all.Expect(ctx, match)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "udp 2 > 9") {
			t.Errorf("got %v, want a timeout that lists what was seen", err)
		}
	}
	if got := expect(t, all, udp); got.UDP.Src != 2 || got.Ethernet.Src != mac(t, p.Sandbox, lab.Uplink) {
		t.Errorf("next packet:\n%s", got)
	}
	if got := all.Packets(); len(got) != 3 {
		t.Errorf("kept %d packets, want 3:\n%v", len(got), got)
	}
	for range 2 {
		if err := all.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Captures show super-packets and partial checksums, and Verify accepts them.
func TestOffload(t *testing.T) {
	for name, opts := range map[string]lab.Options{"on": {}, "off": {NoOffload: true}} {
		t.Run(name, func(t *testing.T) {
			l := lab.NewT(t, opts)
			p, c := l.Node("node1").Pod("p"), l.Client("outside")
			srv, err := p.ServeBulk(80)
			if err != nil {
				t.Fatal(err)
			}
			segments := capture(t, p.Sandbox, lab.Uplink, func(c lab.Captured) bool { return c.TCP != nil })
			for _, a := range families(c.Sandbox, p.Sandbox) {
				if err := c.Bulk(bg, port(a[1], srv.Port), 1<<20); err != nil {
					t.Fatal(err)
				}
			}
			partial, super := 0, 0
			for _, p := range segments.Packets() {
				if err := p.Verify(); err != nil {
					t.Fatalf("%v\n%s", err, p)
				}
				if p.Partial {
					partial++
				}
				if len(p.Frame) > 1514 {
					super++
				}
			}
			if (partial > 0) == opts.NoOffload || (super > 0) == opts.NoOffload {
				t.Errorf("%d packets with partial checksums, %d super-packets", partial, super)
			}
		})
	}
}

func TestPing(t *testing.T) {
	l := lab.NewT(t)
	n := l.Node("node1")
	p, c := n.Pod("p"), l.Client("outside")
	for _, a := range families(c.Sandbox, p.Sandbox) {
		for _, to := range a { // to itself as well
			if err := c.Ping(bg, to); err != nil {
				t.Error(err)
			}
		}
	}
	ctx, cancel := context.WithTimeout(bg, 50*time.Millisecond)
	defer cancel()
	if err := c.Ping(ctx, netip.MustParseAddr("203.0.113.5")); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("unused address: got %v, want a timeout", err)
	}
	for _, route := range []string{"203.0.113.0/24", "2001:db8:203:113::/64"} {
		ip(t, l.Fabric(), "route", "add", "unreachable", route)
	}
	for _, to := range []string{"203.0.113.5", "2001:db8:203:113::5"} {
		if err := c.Ping(bg, netip.MustParseAddr(to)); !errors.Is(err, unix.EHOSTUNREACH) && !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("unreachable %s: got %v", to, err)
		}
	}
}
