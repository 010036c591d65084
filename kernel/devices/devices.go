// SPDX-License-Identifier: Apache-2.0

// Package devices finds the uplinks of a node and watches for changes. An uplink is a
// network device that node traffic uses: one that
//
//   - has an address of the node,
//   - has a default route,
//   - has a route through a gateway, such as routes to pods of other nodes,
//   - is a tunnel with a route, or
//   - is a network card, bond, VLAN or veth with an address in a network, where clients may be
//     although no route leads beyond it.
//
// Routes of all tables count, except those without a device and the kernel's routes to
// its own addresses. The name and type of a device do not count: on a node that is a
// container, eth0 is a veth.
//
// Devices of pods are not uplinks. They have routes without a gateway, to the pod or,
// for a bridge, to its subnet. If pods of other nodes are reached through a bridge with
// a tunnel as one of its ports, the bridge looks the same. Such devices must be
// configured by name.
//
// Ports of a bridge and members of a bond pass their packets to it, so the bridge or
// bond is the uplink. Devices in a VRF keep their packets and are uplinks themselves.
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
	"golang.org/x/sys/unix"
)

// Device is an uplink. A device that was deleted and recreated under its old name has
// another index.
type Device struct {
	Index int
	Name  string
	// L3 means that frames have no Ethernet header, as on most tunnels.
	L3 bool
	// MAC is its link-layer address, if it has Ethernet headers.
	MAC [6]byte
	// Type is the kernel's name of it: device, bond, veth and so on.
	Type string
	// VLANs says that VLAN devices are on top of it.
	VLANs bool
	// Members are the devices on which an XDP program of this one runs, and whose packets are its own: the members of a bond
	// that are in use, or the virtual function below a device of hv_netvsc. Sorted.
	Members []int
	// MTU is there for comparison alone: a driver that refused an XDP program for it may take the program after a change.
	MTU int
	// Source4 and Source6 are the source addresses of packets that the node sends by the
	// device; invalid if no route or address of the device says so.
	Source4, Source6 netip.Addr
	// Why is the first reason for which it was selected.
	Why string
}

func (d Device) String() string {
	layer := ""
	if d.L3 {
		layer = ", no Ethernet"
	}
	return fmt.Sprintf("%s (%d%s): %s", d.Name, d.Index, layer, d.Why)
}

// tunnels are the device types that encapsulate packets.
var tunnels = []string{
	"bareudp", "erspan", "geneve", "gre", "gretap", "ip6erspan", "ip6gre", "ip6gretap", "ip6tnl", "ipip", "sit",
	"tuntap", "vti", "vti6", "vxlan", "wireguard", "xfrm",
}

// Find returns the uplinks of a node with these addresses, sorted by index.
func Find(links []netlink.Link, addrs []netlink.Addr, routes Routes, nodeIPs []netip.Addr) []Device {
	byIndex := map[int]netlink.Link{}
	for _, l := range links {
		byIndex[l.Attrs().Index] = l
	}
	chosen := map[int]Device{}
	choose := func(index int, why string) {
		l := topmost(byIndex, index)
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
			choose(index, "routes through a gateway")
		}
	}
	for _, a := range addrs {
		if l := byIndex[a.LinkIndex]; l != nil && isNetwork(l) && routes[a.LinkIndex].wide {
			choose(a.LinkIndex, "address "+a.IPNet.String())
		}
	}
	return withSources(sorted(chosen), addrs, routes)
}

// withSources sets the source addresses of devices.
func withSources(list []Device, addrs []netlink.Addr, routes Routes) []Device {
	for i := range list {
		d := &list[i]
		d.Source4, d.Source6 = routes[d.Index].source4, routes[d.Index].source6
		for _, a := range addrs {
			ip, ok := netip.AddrFromSlice(a.IP)
			if !ok || a.LinkIndex != d.Index || a.Scope != unix.RT_SCOPE_UNIVERSE || a.Flags&(unix.IFA_F_SECONDARY|unix.IFA_F_TENTATIVE|unix.IFA_F_DEPRECATED) != 0 {
				continue
			}
			if own := sourceOf(d, ip.Unmap()); !own.IsValid() {
				*own = ip.Unmap()
			}
		}
	}
	return list
}

// withOthers says what other devices have to do with these.
func withOthers(list []Device, links []netlink.Link) []Device {
	for i := range list {
		d := &list[i]
		for _, l := range links {
			switch a := l.Attrs(); {
			case l.Type() == "vlan" && a.ParentIndex == d.Index:
				d.VLANs = true
			case a.MasterIndex == d.Index && isMember(l, d.Type):
				d.Members = append(d.Members, a.Index)
			}
		}
		slices.Sort(d.Members)
	}
	return list
}

// isMember reports whether the packets of a device become those of its master. Those of a bond's spare members are dropped: a
// network may bring them copies.
func isMember(l netlink.Link, master string) bool {
	if bonded, ok := l.Attrs().Slave.(*netlink.BondSlave); ok {
		return bonded.State == netlink.BondStateActive
	}
	return master == "device"
}

// sourceOf is the source address of a device for the family of an address.
func sourceOf(d *Device, ip netip.Addr) *netip.Addr {
	if ip.Is4() {
		return &d.Source4
	}
	return &d.Source6
}

// topmost returns the device that handles the packets of a device: its bridge or bond,
// or the device itself. A VRF is a routing table rather than a device.
func topmost(byIndex map[int]netlink.Link, index int) netlink.Link {
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

// leadsToPod reports whether a device has an address of the node only because it is the
// peer of a pod's device: its routes have single addresses only.
func leadsToPod(l netlink.Link, routes Routes) bool {
	return (l.Type() == "veth" || l.Type() == "netkit") && !routes[l.Attrs().Index].wide
}

// isTunnel excludes tap devices, which have Ethernet frames and belong to virtual
// machines.
func isTunnel(l netlink.Link) bool {
	return slices.Contains(tunnels, l.Type()) && (l.Type() != "tuntap" || isL3(l))
}

// networks are the types of devices that lead to a network rather than to a pod, if their
// addresses are in one. "device" is a network card, or its virtual function; a node that is a
// container has veths. The node's end of a pod's link has no address, or a single one.
var networks = []string{"device", "bond", "team", "vlan", "veth"}

func isNetwork(l netlink.Link) bool { return slices.Contains(networks, l.Type()) }

func isL3(l netlink.Link) bool { return l.Attrs().EncapType != "ether" }

func device(l netlink.Link, why string) Device {
	d := Device{Index: l.Attrs().Index, Name: l.Attrs().Name, L3: isL3(l), Type: l.Type(), MTU: l.Attrs().MTU, Why: why}
	copy(d.MAC[:], l.Attrs().HardwareAddr)
	return d
}

func sorted(chosen map[int]Device) []Device {
	return slices.SortedFunc(maps.Values(chosen), func(a, b Device) int { return cmp.Compare(a.Index, b.Index) })
}

// Named returns the devices that match the patterns, sorted by index, and the patterns
// without a match. A pattern is a name, or a prefix if it ends in "+", as in iptables.
// A named device may be down or part of a bridge or bond, but not a loopback device.
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
