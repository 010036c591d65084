// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"slices"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/direct"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/sockets"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer"
)

// specs are the collections of programs that are not loaded yet.
type specs struct{ sockets, packets *ciliumebpf.CollectionSpec }

func (t *Tier) loadSpecs(hostNetNSCookie uint64) (s specs, err error) {
	s.sockets, err = datapath.LoadSocketSpec(t.opts.Sizes, datapath.SocketConstants{
		HostNetNSCookie: hostNetNSCookie, Left: t.opts.Left,
		ProtectNodePorts:  t.opts.ProtectNodePorts,
		TCPPeerIsEndpoint: t.opts.TCPPeerIsEndpoint,
		HaveSetRetval:     !t.opts.NoSetRetval,
	})
	if err != nil {
		return s, err
	}
	if t.opts.NoGetpeername {
		delete(s.sockets.Programs, "tdm_getpeer4")
		delete(s.sockets.Programs, "tdm_getpeer6")
	}
	if s.packets, err = lbmap.PacketSpec(); err != nil {
		return s, err
	}
	for name, size := range flowtable.MapSizes(t.opts.Sizes) {
		s.packets.Maps[name].MaxEntries = size
	}
	return s, nil
}

// load loads the socket programs and those maps that are not given. Packet programs are
// loaded when a device needs them.
func (t *Tier) load(ctx context.Context, s specs, given lbmap.Maps) (err error) {
	defer func() {
		if err != nil {
			t.unload()
		}
	}()
	if err := t.loadSockets(ctx, s.sockets, given); err != nil {
		return err
	}
	if err := t.openPacketMaps(s, given); err != nil {
		return err
	}
	if err := t.hooks.Bind(t.maps); err != nil {
		return err
	}
	if t.opts.detectsPods() {
		if t.arrivals, err = datapath.LoadArrivalFilter(ctx, t.maps, t.opts.NodePortRange); err != nil {
			return err
		}
	}
	if err := t.own(ctx); err != nil {
		return err
	}
	tables, err := lbmap.OpenTables(t.maps)
	if err != nil {
		return err
	}
	t.writer = writer.New(tables, writer.Options{
		Sizes: t.opts.Sizes, Clock: clock.RealClock{}, Wait: datapath.WaitForPrograms, Guard: t.hooks.Guard, Report: t.report, Disrupted: t.opts.Disrupted,
	})
	t.flowTable.CountFor(tables)
	if t.opts.packets() {
		t.direct = direct.New(direct.Options{Netns: t.netns, Peers: t.writer.DirectPeers, Ready: t.writer.SetDirect})
	}
	t.sockets = sockets.New(sockets.Options{
		Storage: t.maps["tdm_sock"], OptOuts: t.maps["tdm_optout"], Stale: t.writer.StaleSockets,
		Cgroup: t.cgroup, Host: t.netns, Left: t.opts.Left, ProcRoot: t.opts.ProcRoot, Report: t.report, KernelTypes: t.opts.KernelTypes,
	})
	opts, err := t.deviceOptions()
	if err != nil {
		return err
	}
	opts.Flows = flowtable.NewMigration(t.maps, datapath.WaitForPrograms)
	t.devices = datapath.NewDevices(t.maps, opts)
	return nil
}

func (t *Tier) loadSockets(ctx context.Context, spec *ciliumebpf.CollectionSpec, given lbmap.Maps) error {
	replacements := lbmap.Maps{}
	for name, m := range given {
		if spec.Maps[name] != nil {
			replacements[name] = m
		}
	}
	collection, err := datapath.Load(ctx, "socket programs", spec, ciliumebpf.CollectionOptions{MapReplacements: replacements, Cache: t.opts.KernelTypes})
	if err != nil {
		return err
	}
	defer collection.Close()
	t.maps = lbmap.Maps{}
	for name := range spec.Maps {
		if lbmap.HasOwnName(name) {
			t.maps[name] = collection.DetachMap(name)
		}
	}
	t.hooks = datapath.TakeCgroupHooks(t.cgroup, collection)
	return nil
}

// openPacketMaps takes over the maps that only packet programs use, or makes them.
func (t *Tier) openPacketMaps(s specs, given lbmap.Maps) error {
	spec := s.packets
	// The maps of flows are kept together or not at all.
	keep := !slices.ContainsFunc(flowtable.MapNames, func(name string) bool {
		return given[name] == nil || spec.Maps[name].Compatible(given[name]) != nil
	})
	for name, m := range spec.Maps {
		if !lbmap.HasOwnName(name) || s.sockets.Maps[name] != nil {
			continue
		}
		isFlow := slices.Contains(flowtable.MapNames, name)
		var err error
		if g := given[name]; g != nil && (isFlow && keep || !isFlow && m.Compatible(g) == nil) {
			t.maps[name], err = g.Clone()
		} else {
			t.maps[name], err = ciliumebpf.NewMap(m)
		}
		if err != nil {
			return fmt.Errorf("make map %s: %w", name, err)
		}
	}
	var err error
	if t.flowTable, err = flowtable.Open(t.maps); err != nil {
		return err
	}
	return t.flowTable.Recover(datapath.WaitForPrograms)
}

// deviceOptions are the options of programs on devices.
func (t *Tier) deviceOptions() (datapath.DeviceOptions, error) {
	var ephemeral datapath.PortRange
	if err := t.netns.Do(func() (err error) { ephemeral, err = datapath.EphemeralPorts(); return err }); err != nil {
		return datapath.DeviceOptions{}, err
	}
	o := &t.opts
	return datapath.DeviceOptions{
		Sizes: o.Sizes, TC: o.TC, SNAT: datapath.NewSNATPool(o.NodePortRange, ephemeral), ResetRemoved: o.ResetRemoved, Draining: !o.packets(), FlowsLeft: t.flowTable.Used,
		Acceleration: o.Acceleration, NoFIBSource: o.NoFIBSource, NoLoop: o.NoLoop, NoConntrack: o.NoConntrack, KernelTypes: o.KernelTypes,
	}, nil
}

// unload closes what load opened.
func (t *Tier) unload() {
	if t.sockets != nil {
		t.sockets.Close()
	}
	t.stopHold()
	if t.hooks != nil {
		t.hooks.Close()
	}
	t.arrivals.Close()
	if t.devices != nil {
		t.devices.Close()
	}
	if t.flowTable != nil {
		t.flowTable.Close()
	}
	if t.writer != nil {
		t.writer.Close()
	}
	if t.successor != nil {
		_ = t.successor.Close() // unmaps memory that is mapped
	}
	t.maps.Close()
	t.successor = nil
	t.arrivals, t.hooks, t.maps, t.writer, t.sockets, t.devices, t.flowTable = nil, nil, nil, nil, nil, nil, nil
}
