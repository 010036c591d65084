// SPDX-License-Identifier: Apache-2.0

package devices

import (
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Routes summarises the routes of all tables by device index. Its size depends on the
// number of devices, not of routes.
type Routes map[int]use

// use says which destinations are reached through a device.
type use struct {
	wide    bool // more than single addresses
	all     bool // everything: a default route
	gateway bool // at least one destination through a gateway
	// The preferred source addresses of its widest routes that have one.
	source4, source6 netip.Addr
	width            [2]int // of the prefixes of those routes, in bits left out
}

// source notes the preferred source address of a route, unless a wider route has one.
func (u *use) source(ip net.IP, width int) {
	own, ok := netip.AddrFromSlice(ip)
	if !ok {
		return
	}
	at, family := &u.source4, 0
	if own = own.Unmap(); own.Is6() {
		at, family = &u.source6, 1
	}
	if !at.IsValid() || width > u.width[family] {
		*at, u.width[family] = own, width
	}
}

// Add adds a route to the summary.
func (r Routes) Add(route netlink.Route) {
	// Blackhole, unreachable and similar routes use no device. The local table has the
	// node's own addresses, and on some kernels multicast.
	if route.Type != unix.RTN_UNICAST || route.Table == unix.RT_TABLE_LOCAL {
		return
	}
	ones, bits := 0, 1 // a route without destination is a default route
	if route.Dst != nil {
		// Every device that is up has fe80::/64.
		if route.Dst.IP.IsLinkLocalUnicast() {
			return
		}
		ones, bits = route.Dst.Mask.Size()
	}
	add := func(index int, gateway bool) {
		u := r[index]
		u.wide, u.all, u.gateway = u.wide || ones < bits, u.all || ones == 0, u.gateway || gateway
		if width := bits - ones; ones == 0 {
			u.source(route.Src, 128) // of any family
		} else {
			u.source(route.Src, width)
		}
		r[index] = u
	}
	if len(route.MultiPath) == 0 {
		add(route.LinkIndex, route.Gw != nil || route.Via != nil)
	}
	for _, hop := range route.MultiPath {
		add(hop.LinkIndex, hop.Gw != nil || hop.Via != nil)
	}
}
