// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
)

// TestConnect: both kinds of links carry packets between sandboxes, and a capture understands
// their frames.
func TestConnect(t *testing.T) {
	l := NewT(t, Options{Unattached: true})
	a, b := l.Node("a").Pod("a").Sandbox, l.Node("b").Pod("b").Sandbox
	if links, err := a.nl.LinkList(); err != nil || len(links) != 1 {
		t.Fatalf("an unattached pod has devices %v, error %v; want lo alone", links, err)
	}
	for _, tt := range []struct {
		device   string
		make     func() error
		from, to netip.Prefix
	}{
		{"veth", func() error { return Connect(a, "veth", b, "veth", 1400) }, netip.MustParsePrefix("192.0.2.1/30"), netip.MustParsePrefix("192.0.2.2/30")},
		{"tunnel", func() error { return Tunnel(a, "tunnel", b, "tunnel") }, netip.MustParsePrefix("192.0.2.5/30"), netip.MustParsePrefix("192.0.2.6/30")},
	} {
		t.Run(tt.device, func(t *testing.T) {
			if err := tt.make(); err != nil {
				t.Fatal(err)
			}
			for s, addr := range map[*Sandbox]netip.Prefix{a: tt.from, b: tt.to} {
				if err := s.configure(tt.device, addr); err != nil {
					t.Fatal(err)
				}
			}
			seen, err := b.Capture(tt.device, func(c Captured) bool { return c.ICMP != nil })
			if err != nil {
				t.Fatal(err)
			}
			if err := a.Ping(t.Context(), tt.to.Addr()); err != nil {
				t.Error(err)
			}
			if _, err := seen.Expect(t.Context(), func(c Captured) bool { return c.Source().Addr() == tt.from.Addr() }); err != nil {
				t.Error(err)
			}
			link, err := a.nl.LinkByName(tt.device)
			if err != nil {
				t.Fatal(err)
			}
			if _, isTun := link.(*netlink.Tuntap); isTun != (tt.device == "tunnel") {
				t.Errorf("%s is a %s", tt.device, link.Type())
			}
		})
	}
}
