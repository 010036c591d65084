// SPDX-License-Identifier: Apache-2.0

package devices

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	rtnl "github.com/tandem-proxy/tandem/kernel/netlink"
)

// maxDumps bounds how often a list is repeated because devices changed meanwhile.
const maxDumps = 5

// events are the netlink groups whose notifications can change the uplinks.
const events = unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR | unix.RTMGRP_IPV4_ROUTE | unix.RTMGRP_IPV6_ROUTE

// Options of a Watcher.
type Options struct {
	// Names are patterns of the devices to use, instead of searching for uplinks. See
	// Named.
	Names []string
	// NodeIPs are the addresses of the node, if they are known already.
	NodeIPs []netip.Addr
	// In runs a function on a thread in the network namespace to watch; nil means that
	// of the process.
	In func(func() error) error
}

// Addr is an address of an uplink.
type Addr struct {
	Addr   netip.Addr
	Device string
}

// Uplinks is a list of the uplinks at one time.
type Uplinks struct {
	// Devices are sorted by index.
	Devices []Device
	// Addrs are the addresses of these devices, sorted by address.
	Addrs []Addr
	// Unmatched are the patterns in Options.Names without a matching device.
	Unmatched []string
}

// Watcher watches the uplinks of a node.
type Watcher struct {
	names []string
	run   func(func() error) error

	mu      sync.Mutex
	nodeIPs []netip.Addr
	moved   chan struct{} // signals that nodeIPs changed
	// were has the indexes of the uplinks that were reported, by name.
	were map[string]int
}

// New makes a watcher.
func New(o Options) *Watcher {
	w := &Watcher{names: o.Names, run: o.In, nodeIPs: slices.Clone(o.NodeIPs), moved: make(chan struct{}, 1), were: map[string]int{}}
	if w.run == nil {
		w.run = func(fn func() error) error { return fn() }
	}
	return w
}

// SetNodeIPs changes the addresses of the node.
func (w *Watcher) SetNodeIPs(list []netip.Addr) {
	w.mu.Lock()
	w.nodeIPs = slices.Clone(list)
	w.mu.Unlock()
	select {
	case w.moved <- struct{}{}:
	default:
	}
}

// List returns the current uplinks.
func (w *Watcher) List() (u Uplinks, err error) {
	for range maxDumps {
		err = w.run(func() error {
			u, err = w.look()
			return err
		})
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return Uplinks{}, fmt.Errorf("list network devices: %w", err)
	}
	return u, nil
}

// look lists links, addresses and routes one after the other. A change in between causes
// a notification, and so another list.
func (w *Watcher) look() (u Uplinks, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return u, err
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return u, fmt.Errorf("addresses: %w", err)
	}
	routes := Routes{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		all := &netlink.Route{Table: unix.RT_TABLE_UNSPEC}
		err := netlink.RouteListFilteredIter(family, all, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
			routes.Add(r)
			return true
		})
		if err != nil {
			return u, fmt.Errorf("routes: %w", err)
		}
	}
	if len(w.names) > 0 {
		u.Devices, u.Unmatched = Named(links, w.names)
		u.Devices = withOthers(withSources(u.Devices, addrs, routes), links)
		u.Addrs = addrsOf(u.Devices, addrs)
		return u, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	u.Devices = withOthers(again(links, Find(links, addrs, routes, w.nodeIPs), w.were), links)
	u.Addrs = addrsOf(u.Devices, addrs)
	return u, nil
}

// addrsOf are the addresses of devices.
func addrsOf(list []Device, addrs []netlink.Addr) (of []Addr) {
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		at := slices.IndexFunc(list, func(d Device) bool { return d.Index == a.LinkIndex })
		if ok && at >= 0 {
			of = append(of, Addr{ip.Unmap(), list[at].Name})
		}
	}
	slices.SortFunc(of, func(a, b Addr) int { return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Device, b.Device)) })
	return of
}

// again adds devices that have the name of a deleted uplink. Such a device was probably
// recreated, for example by reloading a driver, and packets of established connections
// can arrive before it has addresses and routes. If it does not become an uplink, the
// next list omits it.
func again(links []netlink.Link, found []Device, were map[string]int) []Device {
	for _, l := range links {
		a := l.Attrs()
		index, was := were[a.Name]
		if was && index != a.Index && a.MasterIndex == 0 && !slices.ContainsFunc(found, func(d Device) bool { return d.Index == a.Index }) {
			found = append(found, device(l, "recreated uplink"))
		}
	}
	slices.SortFunc(found, func(a, b Device) int { return a.Index - b.Index })
	return found
}

// Watch calls tell with the uplinks, first and after each change, until ctx is done. It
// cannot see that a device left the namespace and returned immediately, or was recreated
// with its old index: callers that attach programs to devices must check now and then
// that they are still attached.
func (w *Watcher) Watch(ctx context.Context, tell func(Uplinks)) {
	var last *Uplinks
	changed := func(u Uplinks) {
		// Unmatched follows from the devices.
		if last == nil || !reflect.DeepEqual(last.Devices, u.Devices) || !slices.Equal(last.Addrs, u.Addrs) {
			last = &u
			w.remember(u.Devices)
			tell(u)
		}
	}
	follower := rtnl.Follower{
		What: "network devices", Groups: events, Run: w.run, Wake: w.moved,
		List: func() error {
			u, err := w.List()
			if err == nil {
				changed(u)
			}
			return err
		},
	}
	follower.Follow(ctx)
}

func (w *Watcher) remember(list []Device) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range list {
		w.were[d.Name] = d.Index
	}
}
