// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/packet"
)

// SendFrame sends an unmodified frame through a device. It bypasses the sandbox's routes
// and netfilter, but not tc programs at the device's egress. Frames arrive in the order in
// which they were sent, even frames of several sandboxes.
func (s *Sandbox) SendFrame(device string, frame []byte) error {
	err := s.Do(func() error { return onFirstCPU(func() error { return s.sendFrame(device, frame) }) })
	return wrap(err, "send frame out of %s of %s", device, s.Name)
}

func (s *Sandbox) sendFrame(device string, frame []byte) error {
	link, err := s.nl.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find link: %w", err)
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	return os.NewSyscallError("sendto", unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: link.Attrs().Index}))
}

// onFirstCPU runs fn, and the kernel's processing of packets that fn sends, on always the
// same CPU. Packets can overtake each other on links and routers only if they are
// processed by different CPUs.
func onFirstCPU(fn func() error) error {
	var was, first unix.CPUSet
	if err := unix.SchedGetaffinity(0, &was); err != nil {
		return os.NewSyscallError("sched_getaffinity", err)
	}
	cpu := 0
	for !was.IsSet(cpu) {
		cpu++
	}
	first.Set(cpu)
	if err := unix.SchedSetaffinity(0, &first); err != nil {
		return os.NewSyscallError("sched_setaffinity", err)
	}
	return errors.Join(fn(), os.NewSyscallError("sched_setaffinity", unix.SchedSetaffinity(0, &was)))
}

// Send sends packets without Ethernet headers according to the sandbox's routes. Otherwise
// it is like SendFrame: the source can be any address, and checksums are not changed.
func (s *Sandbox) Send(ctx context.Context, packets ...packet.Packet) error {
	for _, p := range packets {
		device, header, err := s.nextHop(ctx, p.Destination().Addr())
		if err != nil {
			return fmt.Errorf("send from %s: %w", s.Name, err)
		}
		p.Ethernet = &header
		if err := s.SendFrame(device, p.Build()); err != nil {
			return err
		}
	}
	return nil
}

// nextHop returns the device and the frame header for packets to an address.
func (s *Sandbox) nextHop(ctx context.Context, to netip.Addr) (device string, header packet.Ethernet, err error) {
	routes, err := s.nl.RouteGet(to.AsSlice())
	if err != nil {
		return "", header, fmt.Errorf("find route to %s: %w", to, err)
	}
	link, err := s.nl.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return "", header, fmt.Errorf("find device of route to %s: %w", to, err)
	}
	device = link.Attrs().Name
	if device == "lo" {
		return device, header, nil
	}
	copy(header.Src[:], link.Attrs().HardwareAddr)
	if gateway, ok := netip.AddrFromSlice(routes[0].Gw); ok {
		to = gateway.Unmap()
	}
	header.Dst, err = s.neighbour(ctx, link, to)
	return device, header, wrap(err, "resolve %s on %s", to, device)
}

// neighbour resolves an address by the kernel, if it is not resolved yet.
func (s *Sandbox) neighbour(ctx context.Context, link netlink.Link, addr netip.Addr) (mac packet.MAC, err error) {
	const valid = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT
	ctx, cancel := withDeadline(ctx, dialTimeout)
	defer cancel()
	family := unix.AF_INET
	if addr.Is6() {
		family = unix.AF_INET6
	}
	use := &netlink.Neigh{LinkIndex: link.Attrs().Index, Family: family, IP: addr.AsSlice(), Flags: netlink.NTF_USE}
	if err := s.nl.NeighSet(use); err != nil {
		return mac, err
	}
	for wait := 50 * time.Microsecond; ; wait = min(2*wait, 10*time.Millisecond) {
		known, err := s.nl.NeighList(link.Attrs().Index, family)
		if err != nil {
			return mac, err
		}
		for _, n := range known {
			if n.IP.Equal(use.IP) && n.State&valid != 0 {
				copy(mac[:], n.HardwareAddr)
				return mac, nil
			}
		}
		if err := ctx.Err(); err != nil {
			return mac, err
		}
		time.Sleep(wait)
	}
}
