// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"errors"
	"fmt"
	"slices"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
)

// WithPrograms calls fn with all programs of the proxy: on the cgroup, on devices of this network namespace, and
// those that hold packets back. They are closed afterwards.
func (i *Inspector) WithPrograms(fn func([]*ciliumebpf.Program) error) error {
	return withDevicePrograms(func(found []deviceProgram) error {
		hold, err := datapath.FindHold(i.Maps["tdm_meta"])
		if err != nil {
			return err
		}
		defer datapath.CloseHold(hold)
		programs := slices.Clone(hold)
		for _, a := range i.attached {
			programs = append(programs, a.Program)
		}
		for _, p := range found {
			programs = append(programs, p.Program)
		}
		links, err := netlink.LinkList()
		if err != nil {
			return fmt.Errorf("list devices: %w", err)
		}
		for _, l := range links {
			p, err := datapath.FindXDP(l.Attrs().Index)
			if err != nil {
				return fmt.Errorf("device %s: %w", l.Attrs().Name, err)
			}
			if p != nil {
				defer p.Close()
				programs = append(programs, p)
			}
		}
		return fn(programs)
	})
}

// deviceProgram is a program of the proxy on a device.
type deviceProgram struct {
	tc.Attachment
	device    *netlink.LinkAttrs
	direction tc.Direction
}

// withDevicePrograms calls fn with the programs on all devices of this network namespace, and closes them.
func withDevicePrograms(fn func([]deviceProgram) error) error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var programs []deviceProgram
	for _, l := range links {
		for _, h := range datapath.PacketHooks {
			found, err := tc.Find(l.Attrs().Index, h.Direction, datapath.IsOwnProgram)
			if errors.Is(err, tc.ErrNoDevice) {
				continue
			}
			if err != nil {
				return err
			}
			defer tc.Close(found)
			for _, a := range found {
				programs = append(programs, deviceProgram{a, l.Attrs(), h.Direction})
			}
		}
	}
	return fn(programs)
}
