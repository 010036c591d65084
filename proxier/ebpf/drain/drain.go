// SPDX-License-Identifier: Apache-2.0

// Package drain has programs accept no new connections, while they translate established ones until
// those have ended.
package drain

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
)

// Options of a Drain.
type Options struct {
	// Cgroup is where the programs are attached.
	Cgroup *os.File
	// Maps have the layout that the flows of all programs must have.
	Maps lbmap.Maps
	// Devices are the options of the draining programs.
	Devices  datapath.DeviceOptions
	Timeouts flowtable.Timeouts
}

// Drain has attached programs accept no new connections, and follows those that they have.
type Drain struct {
	opts    Options
	devices []*datapath.Devices // one for each set of maps of programs on devices
	tables  []*flowtable.Table  // of attached programs

	// Unreadable are the names of programs whose flows have another layout, so that nothing tells when they end.
	Unreadable []string
}

// Begin removes the frontends, and finds the flows. It runs in the network namespace of the devices.
func Begin(opts Options) (*Drain, error) {
	opts.Devices.Draining = true
	d := &Drain{opts: opts}
	if err := removal.Frontends(opts.Cgroup); err != nil {
		return nil, fmt.Errorf("remove the frontends: %w", err)
	}
	// Programs on devices have other maps than those on the cgroup if a process died
	// while it replaced them.
	if err := removal.EachInUse(opts.Cgroup, d.findFlows); err != nil {
		d.Close()
		return nil, fmt.Errorf("find the flows: %w", err)
	}
	return d, nil
}

// Switch replaces the programs on all devices by draining ones. It runs in the network namespace of the devices.
func (d *Drain) Switch(ctx context.Context) error {
	return datapath.EachServedDevice(func(device *netlink.LinkAttrs, found []tc.Attachment) error {
		return d.switchPrograms(ctx, device, found)
	})
}

// switchPrograms replaces a device's programs by draining ones on the same maps. Programs of
// another layout stay: the new ones could not use their maps.
func (d *Drain) switchPrograms(ctx context.Context, device *netlink.LinkAttrs, found []tc.Attachment) error {
	maps, err := lbmap.MapsOf(found[0].Program)
	if err != nil {
		return err
	}
	p, err := d.devicesOn(maps)
	if p == nil || err != nil {
		return err
	}
	v, err := datapath.InheritedVariant(device, found[0].Program)
	if err != nil {
		return err
	}
	if err := p.Attach(ctx, device.Index, v); err != nil {
		return fmt.Errorf("device %s: %w", device.Name, err)
	}
	return nil
}

// devicesOn has the programs on these maps, and closes the maps with them; nil if the maps
// have another layout.
func (d *Drain) devicesOn(maps lbmap.Maps) (*datapath.Devices, error) {
	for _, p := range d.devices {
		if same, err := lbmap.SameMap(p.Maps["tdm_meta"], maps["tdm_meta"]); same || err != nil {
			maps.Close()
			return p, err
		}
	}
	var meta lbmap.Meta
	if err := maps["tdm_meta"].Lookup(uint32(0), &meta); err != nil || meta.Magic != lbmap.LayoutMagic || meta.Layout != lbmap.LayoutVersion {
		maps.Close()
		return nil, nil
	}
	p := datapath.NewDevices(maps, d.opts.Devices)
	d.devices = append(d.devices, p)
	return p, nil
}

// findFlows opens the flows of a program, unless they are known.
func (d *Drain) findFlows(program *ciliumebpf.Program) error {
	maps, err := lbmap.MapsOf(program)
	if err != nil {
		return err
	}
	defer maps.Close()
	for _, name := range flowtable.MapNames {
		own := d.opts.Maps[name]
		if m := maps[name]; m == nil || m.KeySize() != own.KeySize() || m.ValueSize() != own.ValueSize() {
			info, err := program.Info()
			if err == nil && !slices.Contains(d.Unreadable, info.Name) {
				d.Unreadable = append(d.Unreadable, info.Name)
			}
			return err
		}
	}
	for _, t := range d.tables {
		if same, err := lbmap.SameMap(t.Flows, maps["tdm_flow"]); same || err != nil {
			return err
		}
	}
	t, err := flowtable.OpenClone(maps)
	if err != nil {
		return err
	}
	d.tables = append(d.tables, t)
	return t.Recover(datapath.WaitForPrograms)
}

// Sweep removes flows that timed out, and returns how many are left.
func (d *Drain) Sweep(ctx context.Context) (left int, err error) {
	for _, t := range d.tables {
		if t.Used() == 0 {
			continue
		}
		_, sweepErr := t.Sweep(ctx, &d.opts.Timeouts, flowtable.MonotonicSeconds())
		left, err = left+t.Used(), errors.Join(err, sweepErr)
	}
	return left, err
}

// Close releases the programs and maps, which stay attached.
func (d *Drain) Close() {
	for _, p := range d.devices {
		p.Close()
		p.Maps.Close()
	}
	for _, t := range d.tables {
		t.Release()
	}
}
