// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// ethernetHeader is the length of an Ethernet header, in bytes.
const ethernetHeader = 14

// l2Len is the length of the link-layer header of a device.
func l2Len(l3 bool) uint8 {
	if l3 {
		return 0
	}
	return ethernetHeader
}

// uplinkOf is what the programs have to know of an uplink.
func uplinkOf(d devices.Device) lbmap.Uplink {
	u := lbmap.Uplink{Redirect: uint8(lbmap.RedirectNextHop), Mac: d.MAC, Device: uint32(d.Index), Addr4: addrOrZero(d.Source4), Addr6: addrOrZero(d.Source6)}
	if d.L3 {
		u.Redirect = uint8(lbmap.RedirectRoute)
	}
	return u
}

// uplinksOf are these uplinks and their members, by index.
func uplinksOf(list []devices.Device) map[int]lbmap.Uplink {
	uplinks := map[int]lbmap.Uplink{}
	for _, d := range list {
		for _, member := range d.Members {
			uplinks[member] = uplinkOf(d)
		}
	}
	for _, d := range list { // also those that are members of others
		uplinks[d.Index] = uplinkOf(d)
	}
	return uplinks
}

func addrOrZero(a netip.Addr) (words [4]uint32) {
	if a.IsValid() {
		words = lbmap.FromAddr(a)
	}
	return words
}

// readUplinks notes what an earlier process told the programs.
func (p *Devices) readUplinks() error {
	err := lbmap.Each(p.Maps["tdm_uplink"], func(index uint32, u lbmap.Uplink) { p.uplinks[int(index)] = u })
	if err != nil {
		return fmt.Errorf("read the uplinks of an earlier process: %w", err)
	}
	return nil
}

// setUplink tells the programs about an uplink, before or after they are attached to it.
func (p *Devices) setUplink(index int, u lbmap.Uplink) error {
	if was, ok := p.uplinks[index]; ok && was == u {
		return nil
	}
	if err := p.Maps["tdm_uplink"].Put(uint32(index), u); err != nil {
		return fmt.Errorf("write uplink %d: %w", index, err)
	}
	p.uplinks[index] = u
	return nil
}

// setRole tells the programs whether a device is an uplink. Of one that an earlier process had
// nothing else is known.
func (p *Devices) setRole(index int, v Variant) error {
	if v.Role != lbmap.RoleUplink {
		return p.removeUplink(index)
	}
	if _, known := p.uplinks[index]; known {
		return nil
	}
	return p.setUplink(index, uplinkOf(devices.Device{Index: index, L3: v.L3}))
}

func (p *Devices) removeUplink(index int) error {
	delete(p.uplinks, index)
	if err := p.Maps["tdm_uplink"].Delete(uint32(index)); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete uplink %d: %w", index, err)
	}
	return nil
}
