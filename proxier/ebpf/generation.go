// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"slices"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// generation are maps of certain sizes, and the programs that use them. A program has its maps from when it is loaded, so larger
// maps need programs of their own.
type generation struct {
	sizes lbmap.Sizes
	// maps are those of all programs.
	maps    lbmap.Maps
	hooks   *datapath.CgroupHooks
	devices *datapath.Devices
	// borrowed are maps of another generation, which closes them.
	borrowed lbmap.Maps
	// flowTable has the connections that packet programs translate.
	flowTable *flowtable.Table
}

// loadGeneration loads the socket programs and those maps that are not given. Those that are given stay the caller's; if they are
// borrowed, the same handles are used.
func (t *Tier) loadGeneration(ctx context.Context, sizes lbmap.Sizes, s specs, given lbmap.Maps, borrow bool) (g generation, err error) {
	g.sizes = sizes
	defer func() {
		if err != nil {
			g.close()
			g = generation{sizes: sizes}
		}
	}()
	if err := g.loadSockets(ctx, t, s.sockets, given); err != nil {
		return g, err
	}
	if err := g.openPacketMaps(s, given); err != nil {
		return g, err
	}
	if borrow {
		g.borrow(given)
	}
	if err := g.openFlows(); err != nil {
		return g, err
	}
	if err := g.hooks.Bind(g.maps); err != nil {
		return g, err
	}
	opts, err := t.deviceOptions(sizes, g.flowTable)
	if err != nil {
		return g, err
	}
	var renumber flowtable.Renumber
	if !borrow { // not this process's own flows
		renumber = func() func(*lbmap.Flow) { return t.writer.RenumberFlows() }
	}
	opts.Flows = flowtable.NewMigration(g.maps, datapath.WaitForPrograms, renumber)
	g.devices = datapath.NewDevices(g.maps, opts)
	return g, nil
}

func (g *generation) loadSockets(ctx context.Context, t *Tier, spec *ciliumebpf.CollectionSpec, given lbmap.Maps) error {
	replacements := lbmap.Maps{}
	for name, m := range given {
		if spec.Maps[name] != nil {
			replacements[name] = m
		}
	}
	opts := ciliumebpf.CollectionOptions{MapReplacements: replacements}
	collection, err := datapath.Load(ctx, "socket programs", spec.Copy(), opts)
	if signal := datapath.Hooks[datapath.SignalHook].Program; err != nil && spec.Programs[signal] != nil {
		// Services are served without it.
		without := spec.Copy()
		delete(without.Programs, signal)
		var errWithout error
		if collection, errWithout = datapath.Load(ctx, "socket programs", without, opts); errWithout == nil {
			klog.FromContext(ctx).Error(err, "Cannot watch the connections of sockets; metrics lack what --ebpf-service-signals asks for")
			err = nil
		}
	}
	if err != nil {
		return err
	}
	defer collection.Close()
	g.maps = lbmap.Maps{}
	for name := range spec.Maps {
		if lbmap.HasOwnName(name) {
			g.maps[name] = collection.DetachMap(name)
		}
	}
	g.hooks = datapath.TakeCgroupHooks(t.cgroup, collection)
	return nil
}

// openPacketMaps takes over the maps that only packet programs use, or makes them.
func (g *generation) openPacketMaps(s specs, given lbmap.Maps) error {
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
		if given := given[name]; given != nil && (isFlow && keep || !isFlow && m.Compatible(given) == nil) {
			g.maps[name], err = given.Clone()
		} else {
			g.maps[name], err = ciliumebpf.NewMap(m)
		}
		if err != nil {
			return fmt.Errorf("make map %s: %w", name, err)
		}
	}
	return nil
}

// borrow uses these handles of the generation's maps instead of its own.
func (g *generation) borrow(given lbmap.Maps) {
	for name, m := range given {
		g.maps[name].Close()
		g.maps[name] = m
	}
	g.borrowed = given
}

func (g *generation) openFlows() (err error) {
	if g.flowTable, err = flowtable.Open(g.maps); err != nil {
		return err
	}
	return g.flowTable.Recover(datapath.WaitForPrograms)
}

// close releases the maps and programs; those that are attached stay so.
func (g *generation) close() {
	if g.hooks != nil {
		g.hooks.Close()
	}
	if g.devices != nil {
		g.devices.Close()
	}
	if g.flowTable != nil {
		g.flowTable.Close()
	}
	for name, m := range g.maps {
		if m != g.borrowed[name] {
			m.Close()
		}
	}
}
