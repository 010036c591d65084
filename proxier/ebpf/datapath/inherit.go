// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// takeOver takes over what an earlier process left on devices: the flows, and devices that are
// no longer wanted, whose programs may serve from maps that are no longer written.
func (p *Devices) takeOver(ctx context.Context, want map[int]Variant) error {
	inherited := map[int]Variant{}
	err := EachServedDevice(func(device *netlink.LinkAttrs, found []tc.Attachment) error {
		var errs []error
		for _, f := range found {
			errs = append(errs, p.addFlows(f.Program))
		}
		if _, wanted := want[device.Index]; !wanted {
			v, err := InheritedVariant(device, found[0].Program)
			if err != nil {
				return errors.Join(append(errs, err)...)
			}
			inherited[device.Index] = v
		}
		return errors.Join(errs...)
	})
	// Load all programs before flows are copied: loading takes long, and flows should be in two
	// places only briefly. An error is returned again when the programs are needed.
	for _, devices := range []map[int]Variant{want, inherited} {
		for _, v := range devices {
			_, _ = p.Programs(ctx, v)
		}
	}
	errs := []error{err, p.flows.CopyAll()}
	for index, v := range inherited {
		if v.Role == lbmap.RolePod {
			p.InheritedPods = append(p.InheritedPods, index)
		}
		errs = append(errs, p.startServing(ctx, index, v))
	}
	return errors.Join(errs...)
}

// InheritedVariant is the variant of a program that an earlier process attached to a device.
// FromPod is left out: it matters to new connections alone.
func InheritedVariant(device *netlink.LinkAttrs, program *ciliumebpf.Program) (Variant, error) {
	v := Variant{Role: lbmap.RoleUplink, L3: device.EncapType != "ether"}
	maps, err := lbmap.MapsOf(program)
	if err != nil {
		return v, err
	}
	defer maps.Close()
	known := maps["tdm_uplink"]
	if known == nil {
		return v, nil // of another version
	}
	// Its size depends on the version.
	switch value, err := known.LookupBytes(uint32(device.Index)); {
	case err != nil:
		return v, fmt.Errorf("look for uplink %s: %w", device.Name, err)
	case value == nil:
		v.Role = lbmap.RolePod
	}
	return v, nil
}
