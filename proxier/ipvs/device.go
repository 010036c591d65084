// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

// Device has the addresses of Services, so that packets to them are this node's. It sends
// nothing, and is never up: its addresses are.
const Device = "kube-ipvs0"

// device is it, in a network namespace.
type device struct {
	nl    *netlink.Handle
	index int
}

// ensure makes it.
func (d *device) ensure() error {
	link, err := d.nl.LinkByName(Device)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		if err = d.nl.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: Device}}); err == nil {
			link, err = d.nl.LinkByName(Device)
		}
	}
	if err != nil {
		return fmt.Errorf("create device %s (module dummy): %w", Device, err)
	}
	d.index = link.Attrs().Index
	return nil
}

func (d *device) link() netlink.Link {
	return &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: Device, Index: d.index}}
}

// maxDumps bounds the attempts at a consistent list.
const maxDumps = 5

func (d *device) List() ([]netip.Addr, error) {
	list, err := d.list(d.link())
	if err != nil {
		return nil, fmt.Errorf("list addresses of %s: %w", Device, err)
	}
	var out []netip.Addr
	for _, a := range list {
		addr, ok := netip.AddrFromSlice(a.IP)
		if addr = addr.Unmap(); ok && !addr.IsLinkLocalUnicast() { // the kernel's own
			out = append(out, addr)
		}
	}
	return out, nil
}

// list lists addresses; of all devices without one.
func (d *device) list(of netlink.Link) (list []netlink.Addr, err error) {
	for range maxDumps {
		if list, err = d.nl.AddrList(of, netlink.FAMILY_ALL); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return list, err
}

func (s *kernelSystem) links() (links []netip.Prefix, err error) {
	list, err := s.device.list(nil)
	if err != nil {
		return nil, fmt.Errorf("list addresses of devices: %w", err)
	}
	return linksOf(list), nil
}

// Refuses returns a function that says why virtual servers would not serve a frontend, which rules
// serve then; nil if they would. It reads the addresses of devices in the network namespace of the
// calling thread, and changes nothing.
func Refuses(opts Options, rules *proxier.NodeRules) (func(*proxier.Decision, *proxier.Frontend) error, error) {
	p := &planner{opts: &opts, nodeRules: *rules}
	list, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	p.links = linksOf(list)
	return p.refuses, err
}

// linksOf are the prefixes of addresses, but for single addresses and loopback ones.
func linksOf(list []netlink.Addr) (links []netip.Prefix) {
	for _, a := range list {
		addr, ok := netip.AddrFromSlice(a.IP)
		if bits, size := a.Mask.Size(); ok && bits < size && !addr.IsLoopback() {
			links = append(links, netip.PrefixFrom(addr.Unmap(), bits).Masked())
		}
	}
	return links
}

// address is one for which no other machine on the link answers ARP.
func address(a netip.Addr) *netlink.Addr {
	mask := net.CIDRMask(a.BitLen(), a.BitLen())
	return &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: mask}, Flags: unix.IFA_F_NODAD}
}

func (d *device) Add(a netip.Addr) error {
	return unless(d.nl.AddrAdd(d.link(), address(a)), unix.EEXIST)
}

func (d *device) Delete(a netip.Addr) error {
	return unless(d.nl.AddrDel(d.link(), address(a)), unix.EADDRNOTAVAIL, unix.ENODEV)
}

// remove deletes it, with all addresses.
func (d *device) remove() error {
	link, err := d.nl.LinkByName(Device)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err == nil {
		err = d.nl.LinkDel(link)
	}
	if err != nil {
		return fmt.Errorf("delete device %s: %w", Device, err)
	}
	return nil
}
