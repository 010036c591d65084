// SPDX-License-Identifier: Apache-2.0

// Package uplinks finds the network devices that carry the traffic of a node, and
// follows them as they come and go. Such a device is one that
//
//   - has an address of the node,
//   - has a default route,
//   - has any route by a gateway, as those to the pods of other nodes are, or
//   - is a tunnel that a route leads into.
//
// Routes count in whatever table they are, but for those that lead nowhere and
// those of the kernel about its own addresses. What a device is called or made of
// proves nothing: on a node that is a container, eth0 is a veth.
//
// The devices of pods are not among them. They have routes without a gateway, to
// the pod or, for a bridge, to its subnet. A network in which pods of other
// nodes are reached in the same way, by a bridge with a tunnel as one of its
// ports, cannot be told from that: there the devices have to be named.
//
// Ports of a bridge and members of a bond hand their packets to it, so it stands for
// them. Devices in a VRF keep their packets and stand for themselves.
package devices

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
)

// Device is a network device that carries traffic of the node. One that was deleted
// and made again under its old name has another index.
type Device struct {
	Index int
	Name  string
	// L3 says that frames have no Ethernet header, as on most tunnels.
	L3 bool
	// Why it was chosen: the first reason found.
	Why string
}

func (d Device) String() string {
	layer := ""
	if d.L3 {
		layer = ", no Ethernet"
	}
	return fmt.Sprintf("%s (%d%s): %s", d.Name, d.Index, layer, d.Why)
}

// tunnels are kinds of devices that put packets into packets.
var tunnels = []string{
	"bareudp", "erspan", "geneve", "gre", "gretap", "ip6erspan", "ip6gre", "ip6gretap", "ip6tnl", "ipip", "sit",
	"tuntap", "vti", "vti6", "vxlan", "wireguard", "xfrm",
}

// Find returns the devices that carry traffic of a node with these addresses,
// sorted by index.
func Find(links []netlink.Link, addrs []netlink.Addr, routes Routes, nodeIPs []netip.Addr) []Device {
	byIndex := map[int]netlink.Link{}
	for _, l := range links {
		byIndex[l.Attrs().Index] = l
	}
	chosen := map[int]Device{}
	choose := func(index int, why string) {
		l := carrier(byIndex, index)
		if l == nil || l.Attrs().Flags&net.FlagUp == 0 || l.Attrs().Flags&net.FlagLoopback != 0 || l.Type() == "vrf" {
			return
		}
		if _, already := chosen[l.Attrs().Index]; !already {
			chosen[l.Attrs().Index] = device(l, why)
		}
	}

	for _, ip := range nodeIPs {
		for _, a := range addrs {
			l := byIndex[a.LinkIndex]
			own, ok := netip.AddrFromSlice(a.IP)
			if ok && l != nil && own.Unmap() == ip.Unmap() && !leadsToPod(l, routes) {
				choose(a.LinkIndex, "node address "+ip.Unmap().String())
			}
		}
	}
	indexes := slices.Sorted(maps.Keys(routes))
	for _, index := range indexes {
		if routes[index].all {
			choose(index, "default route")
		}
	}
	for _, index := range indexes {
		if l := byIndex[index]; l != nil && isTunnel(l) {
			choose(index, l.Type()+" tunnel with routes")
		} else if routes[index].gateway {
			choose(index, "routes by a gateway")
		}
	}
	return sorted(chosen)
}

// carrier is the device that has the packets of one: itself, or whatever it is a
// part of. A VRF is a table rather than a device.
func carrier(byIndex map[int]netlink.Link, index int) netlink.Link {
	l := byIndex[index]
	for l != nil && l.Attrs().MasterIndex != 0 {
		master := byIndex[l.Attrs().MasterIndex]
		if master != nil && master.Type() == "vrf" {
			break
		}
		l = master
	}
	return l
}

// leadsToPod says that a device has an address of the node only to be the other end
// of a pod's: nothing but single addresses is reached by it.
func leadsToPod(l netlink.Link, routes Routes) bool {
	return (l.Type() == "veth" || l.Type() == "netkit") && !routes[l.Attrs().Index].wide
}

// isTunnel leaves tap devices out, which have Ethernet frames: behind those is a
// virtual machine.
func isTunnel(l netlink.Link) bool {
	return slices.Contains(tunnels, l.Type()) && (l.Type() != "tuntap" || isL3(l))
}

func isL3(l netlink.Link) bool { return l.Attrs().EncapType != "ether" }

func device(l netlink.Link, why string) Device {
	return Device{Index: l.Attrs().Index, Name: l.Attrs().Name, L3: isL3(l), Why: why}
}

func sorted(chosen map[int]Device) []Device {
	return slices.SortedFunc(maps.Values(chosen), func(a, b Device) int { return cmp.Compare(a.Index, b.Index) })
}

// Named returns the devices that patterns name, sorted by index, and the patterns
// that name none. A pattern is a name, or the beginning of names if it ends in "+",
// as in iptables. Who names a device means it: it may be down, or part of another
// one. Only loopback devices are never taken.
func Named(links []netlink.Link, patterns []string) (devices []Device, unmatched []string) {
	chosen := map[int]Device{}
	for _, p := range patterns {
		found := false
		for _, l := range links {
			if a := l.Attrs(); a.Flags&net.FlagLoopback == 0 && matches(p, a.Name) {
				found = true
				chosen[a.Index] = device(l, "named by "+p)
			}
		}
		if !found {
			unmatched = append(unmatched, p)
		}
	}
	return sorted(chosen), unmatched
}

func matches(pattern, name string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "+"); ok {
		return strings.HasPrefix(name, prefix)
	}
	return pattern == name
}
