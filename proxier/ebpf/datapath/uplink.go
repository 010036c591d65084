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
	u := lbmap.Uplink{Redirect: uint8(lbmap.RedirectNextHop), Mac: d.MAC, Addr4: addrOrZero(d.Source4), Addr6: addrOrZero(d.Source6)}
	if d.L3 {
		u.Redirect = uint8(lbmap.RedirectRoute)
	}
	return u
}

func addrOrZero(a netip.Addr) (words [4]uint32) {
	if a.IsValid() {
		words = lbmap.FromAddr(a)
	}
	return words
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
