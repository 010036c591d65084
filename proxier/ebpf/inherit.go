// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/kernel/tc"
)

// takeOver takes over what a process before this one left on devices: their
// flows, and devices that are not wanted, as what is there serves from maps that
// may be gone from use.
func (p *packets) takeOver(ctx context.Context, want map[int]variant) error {
	inherited := map[int]variant{}
	err := eachServed(func(device *netlink.LinkAttrs, found []tc.Attachment) error {
		var errs []error
		for _, f := range found {
			errs = append(errs, p.addFlows(f.Program))
		}
		if _, wanted := want[device.Index]; !wanted {
			v, err := inheritedVariant(device, found[0].Program)
			if err != nil {
				return errors.Join(append(errs, err)...)
			}
			inherited[device.Index] = v
		}
		return errors.Join(errs...)
	})
	// While flows are in two places it has to be quick. What fails here does again where
	// it is needed.
	for _, devices := range []map[int]variant{want, inherited} {
		for _, v := range devices {
			_, _ = p.programs(ctx, v)
		}
	}
	errs := []error{err, p.flows.CopyAll()}
	for index, v := range inherited {
		errs = append(errs, p.begin(ctx, index, v))
	}
	return errors.Join(errs...)
}

// inheritedVariant is what a device is to a program that it has from an earlier process.
// Whether that knows pods by their device matters to new connections alone.
func inheritedVariant(device *netlink.LinkAttrs, program *ciliumebpf.Program) (variant, error) {
	v := variant{role: RoleUplink, l3: device.EncapType != "ether"}
	maps, err := mapsOf(program)
	if err != nil {
		return v, err
	}
	defer maps.Close()
	known := maps["tdm_uplink"]
	if known == nil {
		return v, nil // of another version
	}
	var one uint32
	switch err := known.Lookup(uint32(device.Index), &one); {
	case errors.Is(err, ciliumebpf.ErrKeyNotExist):
		v.role = RolePod
	case err != nil:
		return v, fmt.Errorf("look for uplink %s: %w", device.Name, err)
	}
	return v, nil
}
