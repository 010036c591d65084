// SPDX-License-Identifier: Apache-2.0

package devices

import (
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
		r[index] = use{wide: u.wide || ones < bits, all: u.all || ones == 0, gateway: u.gateway || gateway}
	}
	if len(route.MultiPath) == 0 {
		add(route.LinkIndex, route.Gw != nil || route.Via != nil)
	}
	for _, hop := range route.MultiPath {
		add(hop.LinkIndex, hop.Gw != nil || hop.Via != nil)
	}
}
