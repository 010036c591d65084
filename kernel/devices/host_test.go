// SPDX-License-Identifier: Apache-2.0

//go:build linux

package devices

import (
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// host is the state that the kernel reports, written almost as ip(8) shows it.
type host struct {
	// links: "<index> <name> <kind> [down] [master <name>] [encap <type>]". lo always exists.
	links string
	// addrs: "<device> <prefix>"
	addrs string
	// routes: "[<type>] <prefix> [via <gateway>] [dev <device>] [table <n>]", or
	// "nexthop" before each "via" if there are several.
	routes string
}

func lines(s string) (all [][]string) {
	for line := range strings.Lines(s) {
		if words := strings.Fields(line); len(words) > 0 {
			all = append(all, words)
		}
	}
	return all
}

func (h host) parse(t *testing.T) (links []netlink.Link, addrs []netlink.Addr, routes Routes) {
	t.Helper()
	lo := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1, Name: "lo", EncapType: "loopback", Flags: net.FlagUp | net.FlagLoopback}}
	links = append(links, lo)
	index := map[string]int{"lo": 1}
	for _, words := range lines(h.links) {
		l := netlink.LinkAttrs{Index: number(t, words[0]), Name: words[1], EncapType: "ether", Flags: net.FlagUp}
		for i, word := range words {
			switch word {
			case "down":
				l.Flags = 0
			case "master":
				l.MasterIndex = index[words[i+1]]
			case "encap":
				l.EncapType = words[i+1]
			case "active":
				l.Slave = &netlink.BondSlave{State: netlink.BondStateActive}
			case "spare":
				l.Slave = &netlink.BondSlave{State: netlink.BondStateBackup}
			}
		}
		index[l.Name] = l.Index
		links = append(links, &netlink.GenericLink{LinkAttrs: l, LinkType: words[2]})
	}
	for _, words := range lines(h.addrs) {
		a, err := netlink.ParseAddr(words[1])
		if err != nil {
			t.Fatal(err)
		}
		a.LinkIndex = index[words[0]]
		addrs = append(addrs, *a)
	}
	routes = Routes{}
	for _, words := range lines(h.routes) {
		routes.Add(parseRoute(t, index, words))
	}
	return links, addrs, routes
}

func number(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func parseRoute(t *testing.T, index map[string]int, words []string) netlink.Route {
	t.Helper()
	r := netlink.Route{Type: unix.RTN_UNICAST, Table: unix.RT_TABLE_MAIN}
	types := map[string]int{
		"blackhole": unix.RTN_BLACKHOLE, "unreachable": unix.RTN_UNREACHABLE, "prohibit": unix.RTN_PROHIBIT,
		"local": unix.RTN_LOCAL, "multicast": unix.RTN_MULTICAST,
	}
	if kind, ok := types[words[0]]; ok {
		r.Type, words = kind, words[1:]
	}
	if words[0] != "default" {
		_, dst, err := net.ParseCIDR(words[0])
		if err != nil {
			t.Fatal(err)
		}
		r.Dst = dst
	}
	for i := 1; i+1 < len(words); i++ {
		switch words[i] {
		case "nexthop":
			r.MultiPath = append(r.MultiPath, &netlink.NexthopInfo{})
		case "via":
			gw := net.ParseIP(words[i+1])
			if n := len(r.MultiPath); n > 0 {
				r.MultiPath[n-1].Gw = gw
			} else if r.Gw = gw; r.Dst != nil && r.Dst.IP.To4() != nil && gw.To4() == nil {
				r.Gw, r.Via = nil, &netlink.Via{AddrFamily: unix.AF_INET6, Addr: gw}
			}
		case "dev":
			if n := len(r.MultiPath); n > 0 {
				r.MultiPath[n-1].LinkIndex = index[words[i+1]]
			} else {
				r.LinkIndex = index[words[i+1]]
			}
		case "table":
			r.Table = number(t, words[i+1])
		}
	}
	return r
}
