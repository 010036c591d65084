// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab_test

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// A packet that is too big for a link is rejected in front of that link, and nowhere else.
func TestSetMTU(t *testing.T) {
	const low = 1400
	l := lab.NewT(t)
	n1, n2 := l.Node("node1"), l.Node("node2")
	p1, p2, q := n1.Pod("p1"), n2.Pod("p2"), n2.Pod("q")
	c, d := l.Client("c"), l.Client("d")
	for _, vip := range []string{"203.0.113.5/32", "2001:db8:203:113::5/128"} {
		if err := l.Announce(netip.MustParsePrefix(vip), n1, n2); err != nil {
			t.Fatal(err)
		}
	}
	vip := &lab.Sandbox{Name: "vip", Addr4: netip.MustParseAddr("203.0.113.5"), Addr6: netip.MustParseAddr("2001:db8:203:113::5")}
	steps := []struct {
		name           string
		set            func(mtu int) error
		small, regular []flow
	}{
		{
			"pod", p1.SetMTU,
			[]flow{{c.Sandbox, p1.Sandbox, n1.Sandbox}, {p2.Sandbox, p1.Sandbox, n1.Sandbox}},
			[]flow{{c.Sandbox, n1.Sandbox, nil}, {c.Sandbox, p2.Sandbox, nil}},
		},
		{
			"node", n1.SetMTU,
			[]flow{
				{c.Sandbox, n1.Sandbox, l.Fabric()}, {c.Sandbox, p1.Sandbox, l.Fabric()}, {c.Sandbox, vip, l.Fabric()},
				{p2.Sandbox, n1.Sandbox, n2.Sandbox}, {p2.Sandbox, p1.Sandbox, n2.Sandbox},
				{p1.Sandbox, c.Sandbox, n1.Sandbox}, {p1.Sandbox, p2.Sandbox, n1.Sandbox},
			},
			[]flow{{c.Sandbox, p2.Sandbox, nil}, {p2.Sandbox, c.Sandbox, nil}, {p2.Sandbox, q.Sandbox, nil}},
		},
		{
			"client", c.SetMTU,
			[]flow{{p1.Sandbox, c.Sandbox, l.Fabric()}},
			[]flow{{p1.Sandbox, d.Sandbox, nil}, {d.Sandbox, p1.Sandbox, nil}},
		},
	}
	for _, s := range []*lab.Sandbox{n1.Sandbox, p1.Sandbox, p2.Sandbox, q.Sandbox, c.Sandbox, d.Sandbox} {
		mustServe(t, s, 80)
	}
	for _, step := range steps {
		if err := step.set(low); err != nil {
			t.Fatal(err)
		}
		for _, f := range step.small {
			f.tooBig(t, step.name, low)
		}
		for _, f := range step.regular {
			f.fits(t, step.name)
		}
		if err := step.set(1500); err != nil {
			t.Fatal(err)
		}
		for _, f := range slices.Concat(step.small, step.regular) {
			if f.to != vip {
				f.fits(t, step.name+" again")
			}
		}
	}
}

type flow struct{ from, to, router *lab.Sandbox }

// datagrams are 1500 bytes long and must not be fragmented.
func (f flow) datagrams() []packet.Packet {
	var list []packet.Packet
	for _, a := range families(f.from, f.to) {
		p := packet.NewUDP(port(a[0], 40000), port(a[1], 80), nil)
		p.Payload = make([]byte, 1500-len(p.Build()))
		if p.IPv4 != nil {
			p.IPv4.DontFragment = true
		}
		list = append(list, p)
	}
	return list
}

func (f flow) tooBig(t *testing.T, name string, mtu uint32) {
	t.Helper()
	errors := capture(t, f.from, lab.Uplink, func(p lab.Captured) bool { return p.ICMP != nil && p.ICMP.Quoted != nil })
	for _, p := range f.datagrams() {
		send(t, f.from, p)
		got := expect(t, errors, func(lab.Captured) bool { return true })
		if !got.ICMP.Is(packet.FragNeeded) && !got.ICMP.Is(packet.PacketTooBig6) || got.ICMP.Rest != mtu {
			t.Errorf("%s: %s to %s: got\n%s", name, f.from.Name, f.to.Name, got)
		}
		if q := got.ICMP.Quoted; q.Destination() != p.Destination() {
			t.Errorf("%s: it is about\n%s", name, q)
		}
	}
}

func (f flow) fits(t *testing.T, name string) {
	t.Helper()
	answers := capture(t, f.from, lab.Uplink, func(p lab.Captured) bool { return !p.Outgoing && p.UDP != nil })
	for _, p := range f.datagrams() {
		send(t, f.from, p)
		if got, err := answers.Expect(bg, from(p.Destination())); err != nil {
			t.Errorf("%s: %s to %s: %v", name, f.from.Name, f.to.Name, err)
		} else if err := got.Verify(); err != nil {
			t.Error(err)
		}
	}
}

// shape lists addresses and routes of a sandbox, without the numbers of devices.
func shape(tb testing.TB, s *lab.Sandbox) []string {
	tb.Helper()
	var all []string
	for _, args := range [][]string{
		{"-o", "addr"}, {"-o", "-4", "route", "show", "table", "all"}, {"-o", "-6", "route", "show", "table", "all"},
	} {
		for line := range strings.Lines(ip(tb, s, args...)) {
			f := strings.Fields(line)
			if strings.HasSuffix(f[0], ":") {
				f = f[1:] // number of the device
			}
			if f[0] != "anycast" { // comes a little later
				all = append(all, strings.Join(f, " "))
			}
		}
	}
	slices.Sort(all)
	return all
}

func TestDownAndUnplug(t *testing.T) {
	l := lab.NewT(t)
	n1, n2 := l.Node("node1"), l.Node("node2")
	p, q, c := n1.Pod("p"), n2.Pod("q"), l.Client("outside")
	mustServe(t, p.Sandbox, 80)
	if err := n1.SetMTU(1400); err != nil {
		t.Fatal(err)
	}
	// Routes that a CNI might add.
	ip(t, n1.Sandbox, "route", "add", "192.0.2.0/24", "via", n2.Addr4.String())
	ip(t, n1.Sandbox, "route", "add", "2001:db8:1::/64", "via", n2.Addr6.String(), "metric", "77")

	down := func(s *lab.Sandbox, device string) func() (func() error, error) {
		return func() (func() error, error) { return s.Down(device) }
	}
	for _, tc := range []struct {
		name    string
		sandbox *lab.Sandbox
		cut     func() (func() error, error)
	}{
		{"node down", n1.Sandbox, down(n1.Sandbox, lab.Uplink)},
		{"node unplugged", n1.Sandbox, n1.Unplug},
		{"pod down", p.Sandbox, down(p.Sandbox, lab.Uplink)},
		{"pod down at the node", n1.Sandbox, down(n1.Sandbox, p.HostLink)},
		{"port down", l.Fabric(), down(l.Fabric(), n1.FabricLink)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before, index := shape(t, tc.sandbox), device(t, n1.Sandbox, lab.Uplink)
			repair, err := tc.cut()
			if err != nil {
				t.Fatal(err)
			}
			for _, a := range families(c.Sandbox, p.Sandbox) {
				ctx, cancel := context.WithTimeout(bg, 50*time.Millisecond)
				if err := c.Ping(ctx, a[1]); err == nil {
					t.Errorf("%s answers", a[1])
				}
				cancel()
			}
			for _, a := range families(c.Sandbox, q.Sandbox) {
				if err := c.Ping(bg, a[1]); err != nil {
					t.Errorf("other sandboxes are unreachable as well: %v", err)
				}
			}
			if err := repair(); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(before, shape(t, tc.sandbox)); d != "" {
				t.Errorf("addresses and routes (-before +after):\n%s", d)
			}
			if changed := device(t, n1.Sandbox, lab.Uplink) != index; changed != (tc.name == "node unplugged") {
				t.Errorf("the uplink is another device: %v", changed)
			}
			for _, from := range []*lab.Sandbox{c.Sandbox, q.Sandbox, n2.Sandbox, n1.Sandbox} {
				for _, a := range families(from, p.Sandbox) {
					if _, err := from.Ask(bg, "tcp", port(a[1], 80)); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
}

// device is the index of a device.
func device(tb testing.TB, s *lab.Sandbox, name string) int {
	tb.Helper()
	link, err := s.Netlink().LinkByName(name)
	if err != nil {
		tb.Fatal(err)
	}
	return link.Attrs().Index
}
