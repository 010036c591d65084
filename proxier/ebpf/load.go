// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"slices"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
)

// specs are the collections of programs that are not loaded yet.
type specs struct{ sockets, packets *ciliumebpf.CollectionSpec }

func (t *Tier) loadSpecs(hostNetNSCookie uint64) (s specs, err error) {
	s.sockets, err = loadSpec(t.opts.Sizes, constants{
		hostNetNSCookie: hostNetNSCookie, hostNamespaceOnly: t.opts.HostNamespaceOnly,
		protectNodePorts: t.opts.ProtectNodePorts,
		haveSetRetval:    !t.opts.NoSetRetval,
	})
	if err != nil {
		return s, err
	}
	if t.opts.NoGetpeername {
		delete(s.sockets.Programs, "tdm_getpeer4")
		delete(s.sockets.Programs, "tdm_getpeer6")
	}
	if s.packets, err = packetSpec(); err != nil {
		return s, err
	}
	for name, size := range flowMaps(t.opts.Sizes) {
		s.packets.Maps[name].MaxEntries = size
	}
	return s, nil
}

// load loads the socket programs and those maps that are not given. Packet programs are
// loaded when a device needs them.
func (t *Tier) load(s specs, given Maps) (err error) {
	defer func() {
		if err != nil {
			t.unload()
		}
	}()
	if err := t.loadSockets(s.sockets, given); err != nil {
		return err
	}
	if err := t.openPacketMaps(s, given); err != nil {
		return err
	}
	if err := t.hooks.Bind(t.maps); err != nil {
		return err
	}
	tables, err := openTables(t.maps)
	if err != nil {
		return err
	}
	report := func(proxier.Problem) {}
	if t.opts.Reporter != nil {
		report = t.opts.Reporter.Report
	}
	t.writer = newWriter(tables, WriterOptions{
		Sizes: t.opts.Sizes, Clock: clock.RealClock{}, Wait: waitForPrograms, Guard: t.hooks.Guard, Report: report,
	})
	t.flowTable.CountFor(tables)
	t.sockets = newFlows(CloserOptions{
		Storage: t.maps["tdm_sock"], OptOuts: t.maps["tdm_optout"], Judge: t.writer.StaleSockets,
		Cgroup: t.cgroup, Host: t.netns, HostOnly: t.opts.HostNamespaceOnly, ProcRoot: t.opts.ProcRoot, Report: report,
	})
	opts, err := t.deviceOptions()
	if err != nil {
		return err
	}
	opts.Flows = NewMigration(t.maps, t.opts.Sizes, waitForPrograms)
	t.devices = newPackets(t.maps, opts)
	return nil
}

func (t *Tier) loadSockets(spec *ciliumebpf.CollectionSpec, given Maps) error {
	replacements := Maps{}
	for name, m := range given {
		if spec.Maps[name] != nil {
			replacements[name] = m
		}
	}
	collection, err := ciliumebpf.NewCollectionWithOptions(spec, ciliumebpf.CollectionOptions{MapReplacements: replacements})
	if err != nil {
		return fmt.Errorf("load the socket programs: %w", err)
	}
	defer collection.Close()
	t.maps = Maps{}
	for name := range spec.Maps {
		if isOurs(name) {
			t.maps[name] = collection.DetachMap(name)
		}
	}
	t.hooks = TakeCgroupHooks(t.cgroup, collection)
	return nil
}

// openPacketMaps takes over the maps that only packet programs use, or makes them.
func (t *Tier) openPacketMaps(s specs, given Maps) error {
	spec := s.packets
	// Flows are of use all together.
	keep := !slices.ContainsFunc(flowMapNames, func(name string) bool {
		return given[name] == nil || spec.Maps[name].Compatible(given[name]) != nil
	})
	for name, m := range spec.Maps {
		if !isOurs(name) || s.sockets.Maps[name] != nil {
			continue
		}
		isFlow := slices.Contains(flowMapNames, name)
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
	if t.flowTable, err = openFlowTable(t.maps); err != nil {
		return err
	}
	return t.flowTable.recover(waitForPrograms)
}

// deviceOptions are those of programs on devices.
func (t *Tier) deviceOptions() (DeviceOptions, error) {
	var ephemeral PortRange
	if err := t.netns.Do(func() (err error) { ephemeral, err = EphemeralPorts(); return err }); err != nil {
		return DeviceOptions{}, err
	}
	o := &t.opts
	return DeviceOptions{
		Sizes: o.Sizes, TC: o.TC, SNAT: newSNATPool(o.NodePortRange, ephemeral), ResetRemoved: o.ResetRemoved,
		NoFIBSource: o.NoFIBSource, NoLoop: o.NoLoop, NoConntrack: o.NoConntrack,
	}, nil
}

func (t *Tier) unload() {
	if t.sockets != nil {
		t.sockets.free()
	}
	if t.hooks != nil {
		t.hooks.Close()
	}
	if t.devices != nil {
		t.devices.close()
	}
	if t.flowTable != nil {
		t.flowTable.unmap()
	}
	if t.writer != nil {
		t.writer.Close()
	}
	t.maps.Close()
	t.hooks, t.maps, t.writer, t.sockets, t.devices, t.flowTable = nil, nil, nil, nil, nil, nil
}
