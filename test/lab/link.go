// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// SetMTU changes the MTU of the pod's link, at both ends.
func (p *Pod) SetMTU(mtu int) error {
	return errors.Join(p.setMTU(Uplink, mtu), p.Node.setMTU(p.HostLink, mtu))
}

// SetMTU changes the MTU of the client's link, at both ends.
func (c *Client) SetMTU(mtu int) error {
	return errors.Join(c.setMTU(Uplink, mtu), c.lab.fabric.setMTU(c.FabricLink, mtu))
}

// SetMTU lowers the MTU of the node's link, at both ends, and of all routes to the
// node or its pods. Nodes share a subnet, so no router in between could report the lower
// MTU. Below 1280 the kernel disables IPv6 on the link.
func (n *Node) SetMTU(mtu int) error {
	l := n.lab
	l.mu.Lock()
	defer l.mu.Unlock()
	n.mtu = mtu
	f := l.fabric
	// A bridge has the lowest MTU of its ports unless its own is set.
	err := errors.Join(n.setMTU(Uplink, mtu), f.setMTU(n.FabricLink, mtu), f.setMTU("br0", l.opts.MTU), n.limit(f, "br0"))
	for _, other := range l.nodes {
		if other != n {
			err = errors.Join(err, n.limit(other.Sandbox, Uplink))
		}
	}
	for prefix, nodes := range l.announced {
		if slices.Contains(nodes, n) {
			err = errors.Join(err, l.announce(prefix))
		}
	}
	return err
}

// limit sets the MTU of a machine's routes to the node; the machine is on the nodes' subnet.
func (n *Node) limit(s *Sandbox, device string) error {
	link, err := s.nl.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find link %s: %w", device, err)
	}
	for _, addr := range []netip.Addr{n.Addr4, n.Addr6} {
		r := netlink.Route{Dst: ipNet(single(addr)), LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK}
		if err := s.route(n.limited(r)); err != nil {
			return err
		}
	}
	return n.reachableFrom(s)
}

// limited adds the MTU of the node's link to a route over the node, if it is lower than the lab's.
func (n *Node) limited(r netlink.Route) netlink.Route {
	if n.mtu < n.lab.opts.MTU && (r.MTU == 0 || n.mtu < r.MTU) {
		// bpf_fib_lookup looks at locked values only.
		r.MTU, r.MTULock = n.mtu, true
	}
	return r
}

func (s *Sandbox) setMTU(device string, mtu int) error {
	link, err := s.nl.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find link %s: %w", device, err)
	}
	return wrap(s.nl.LinkSetMTU(link, mtu), "set MTU of %s of %s", device, s.Name)
}

// Down sets a device down. The returned function sets it up again, with the addresses
// and routes that it had, and waits until it is operational. Neighbours whose resolution
// failed in the meantime try again up to a second later.
func (s *Sandbox) Down(device string) (up func() error, err error) {
	was, err := s.remember(device)
	if err != nil {
		return nil, err
	}
	if err := s.nl.LinkSetDown(was.link); err != nil {
		return nil, fmt.Errorf("set %s of %s down: %w", device, s.Name, err)
	}
	return func() error { return was.restore(s) }, nil
}

// Unplug removes the device of the node's link. The returned function is like Down's,
// but makes another device of the same name.
func (n *Node) Unplug() (plug func() error, err error) {
	l := n.lab
	l.mu.Lock()
	defer l.mu.Unlock()
	was, err := n.remember(Uplink)
	if err != nil {
		return nil, err
	}
	if err := n.unlink(Uplink); err != nil {
		return nil, err
	}
	return func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if err := n.plug(); err != nil {
			return fmt.Errorf("plug %s: %w", n.Name, err)
		}
		link, err := n.nl.LinkByName(Uplink)
		if err != nil {
			return fmt.Errorf("find link %s: %w", Uplink, err)
		}
		// With another address, neighbours would have stale entries.
		if err := n.nl.LinkSetHardwareAddr(link, was.link.Attrs().HardwareAddr); err != nil {
			return fmt.Errorf("set hardware address of %s: %w", Uplink, err)
		}
		return errors.Join(was.restore(n.Sandbox), n.awaitUplink())
	}, nil
}

// device holds what is lost when a device goes down, and is not restored by the kernel.
type device struct {
	link   netlink.Link
	addrs  []netlink.Addr
	routes []netlink.Route
}

func (s *Sandbox) remember(name string) (d device, err error) {
	if d.link, err = s.nl.LinkByName(name); err != nil {
		return d, fmt.Errorf("find link %s: %w", name, err)
	}
	addrs, err := s.nl.AddrList(d.link, netlink.FAMILY_ALL)
	if err != nil {
		return d, fmt.Errorf("list addresses of %s: %w", name, err)
	}
	routes, err := s.nl.RouteList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return d, fmt.Errorf("list routes of %s: %w", s.Name, err)
	}
	// The kernel makes link-local addresses and the routes to subnets itself.
	for _, a := range addrs {
		if !a.IP.IsLinkLocalUnicast() {
			d.addrs = append(d.addrs, a)
		}
	}
	for _, r := range routes {
		// Routes of other devices are lost together with their source address.
		source := slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.Equal(r.Src) })
		if r.Protocol != unix.RTPROT_KERNEL && (source || r.LinkIndex == d.link.Attrs().Index) {
			d.routes = append(d.routes, r)
		}
	}
	// Gateways have to be reachable before there can be routes over them.
	slices.SortStableFunc(d.routes, func(a, b netlink.Route) int { return len(a.Gw) - len(b.Gw) })
	return d, nil
}

// restore sets the device, or another one of its name, up with all it had.
func (d device) restore(s *Sandbox) error {
	name := d.link.Attrs().Name
	link, err := s.nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find link %s: %w", name, err)
	}
	if err := s.nl.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up: %w", name, err)
	}
	for _, a := range d.addrs {
		if err := s.nl.AddrReplace(link, &a); err != nil {
			return fmt.Errorf("restore address %s of %s: %w", a.IPNet, name, err)
		}
	}
	if err := s.awaitLink(name); err != nil {
		return err
	}
	for _, r := range d.routes {
		if r.Flags = 0; r.LinkIndex == d.link.Attrs().Index {
			r.LinkIndex = link.Attrs().Index
		}
		if err := s.route(r); err != nil {
			return err
		}
	}
	return nil
}

// WithoutOffload turns off checksum offload of a device. This also turns off segmentation
// offload.
func (s *Sandbox) WithoutOffload(device string) error {
	return wrap(s.ethtool(device, unix.ETHTOOL_STXCSUM, 0), "turn offloads of %s of %s off", device, s.Name)
}

// WithGRO merges what a device receives, which has a veth take frames of XDP programs without one of its own.
func (s *Sandbox) WithGRO(device string) error {
	return wrap(s.ethtool(device, unix.ETHTOOL_SGRO, 1), "turn GRO of %s of %s on", device, s.Name)
}

// ethtool sets a value of a device.
func (s *Sandbox) ethtool(device string, command, value uint32) error {
	request := struct {
		name  [unix.IFNAMSIZ]byte
		value *[2]uint32 // command and argument
		_     [16]byte   // struct ifreq is larger
	}{value: &[2]uint32{command, value}}
	copy(request.name[:], device)
	return s.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		defer unix.Close(fd)
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
		if errno != 0 {
			return os.NewSyscallError("ioctl", errno)
		}
		return nil
	})
}
