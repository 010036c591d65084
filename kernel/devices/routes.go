// SPDX-License-Identifier: Apache-2.0

package devices

import (
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Routes is what the routes of all tables say of each device, by its index. That
// much is kept of a million routes too.
type Routes map[int]use

// use is what is reached by a device.
type use struct {
	wide    bool // more than single addresses
	all     bool // everything: a default route
	gateway bool // something by way of another machine
}

// Add takes a route into account.
func (r Routes) Add(route netlink.Route) {
	// Blackholes and their like lead nowhere. The table local is about the node's own
	// addresses, and multicast on kernels that have no type for it.
	if route.Type != unix.RTN_UNICAST || route.Table == unix.RT_TABLE_LOCAL {
		return
	}
	ones, bits := 0, 1 // no destination is any destination
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
