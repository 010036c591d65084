// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// retrySwitch is the number of looks at the flows before programs that could not be switched
// to draining are tried again.
const retrySwitch = 8

// Drain hands over to a proxy that serves already. The programs accept no new connections, but
// still translate established ones from outside. When the last one has ended, Drain removes all
// kernel state of the proxy and returns. It also returns when ctx is done, and another process
// may continue. Only Adopted may have been called before.
//
// It works on the maps of the attached programs, whether Open adopted those or not.
func (t *Tier) Drain(ctx context.Context) error { return t.drain(ctx, flowtable.CollectInterval) }

func (t *Tier) drain(ctx context.Context, interval time.Duration) error {
	d := &drain{tier: t}
	defer d.close()
	if err := t.netns.Do(d.begin); err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	draining := false
	for tick := 0; ; tick++ {
		// A device that rejects the draining programs may always do so. Its current programs
		// then continue to serve the established connections.
		if !draining && tick%retrySwitch == 0 {
			err := t.netns.Do(func() error {
				return datapath.EachServedDevice(func(device *netlink.LinkAttrs, found []tc.Attachment) error {
					return d.switchPrograms(ctx, device, found)
				})
			})
			if draining = err == nil; !draining {
				logger.Error(err, "Cannot switch all packet programs to draining; trying again")
			}
		}
		left, err := d.sweep(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			logger.Error(err, "Cannot remove flows that timed out; trying again", "interval", interval)
		case left == 0:
			return t.Cleanup(ctx)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.closing:
			return nil
		case <-ticker.C:
		}
	}
}

// drain is the state of a Drain.
type drain struct {
	tier    *Tier
	devices []*datapath.Devices // one for each set of maps of programs on devices
	tables  []*flowtable.Table  // of attached programs
}

func (d *drain) begin() error {
	if err := silence(d.tier.cgroup); err != nil {
		return fmt.Errorf("remove the frontends: %w", err)
	}
	// Programs on devices have other maps than those on the cgroup if a process died
	// while it replaced them.
	if err := eachInUse(d.tier.cgroup, d.findFlows); err != nil {
		return fmt.Errorf("find the flows: %w", err)
	}
	return nil
}

// switchPrograms replaces a device's programs by draining ones on the same maps. Programs of
// another layout stay: the new ones could not use their maps.
func (d *drain) switchPrograms(ctx context.Context, device *netlink.LinkAttrs, found []tc.Attachment) error {
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
func (d *drain) devicesOn(maps lbmap.Maps) (*datapath.Devices, error) {
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
	opts, err := d.tier.deviceOptions()
	if err != nil {
		maps.Close()
		return nil, err
	}
	opts.Draining = true
	p := datapath.NewDevices(maps, opts)
	d.devices = append(d.devices, p)
	return p, nil
}

// findFlows opens the flows of a program, unless they are known.
func (d *drain) findFlows(program *ciliumebpf.Program) error {
	maps, err := lbmap.MapsOf(program)
	if err != nil {
		return err
	}
	defer maps.Close()
	for _, name := range flowtable.MapNames {
		own := d.tier.maps[name]
		if m := maps[name]; m == nil || m.KeySize() != own.KeySize() || m.ValueSize() != own.ValueSize() {
			return fmt.Errorf("%s uses a map %s of another layout: its flows cannot be read", program, name)
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

// sweep removes flows that timed out, and returns how many are left.
func (d *drain) sweep(ctx context.Context) (left int, err error) {
	for _, t := range d.tables {
		if t.Used() == 0 {
			continue
		}
		_, sweepErr := t.Sweep(ctx, &d.tier.opts.Timeouts, flowtable.MonotonicSeconds())
		left, err = left+t.Used(), errors.Join(err, sweepErr)
	}
	return left, err
}

func (d *drain) close() {
	for _, p := range d.devices {
		p.Close()
		p.Maps.Close()
	}
	for _, t := range d.tables {
		t.Release()
	}
}
