// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"

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

func (t *Tier) loadSpecs(sizes lbmap.Sizes) (s specs, err error) {
	s.sockets, err = datapath.LoadSocketSpec(sizes, datapath.SocketConstants{
		HostNetNSCookie: t.hostCookie, Left: t.opts.Left,
		ProtectNodePorts:  t.opts.ProtectNodePorts,
		TCPPeerIsEndpoint: t.opts.TCPPeerIsEndpoint,
		HaveSetRetval:     !t.opts.NoSetRetval,
		Signals:           t.opts.Signals,
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
	for name, size := range flowtable.MapSizes(sizes) {
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
	if t.generation, err = t.loadGeneration(ctx, t.sizes, s, given, false); err != nil {
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
	t.signals = lbmap.NewSignalMap(t.maps["tdm_signals"])
	forget := t.signals.Forget
	if !t.opts.Signals {
		forget = nil // the removal of a Service costs no system call more
		if err := lbmap.DeleteAll(t.maps["tdm_signals"]); err != nil {
			return err
		}
	}
	t.writer = writer.New(tables, writer.Options{
		Sizes: t.sizes, Clock: clock.RealClock{}, Wait: datapath.WaitForPrograms, Report: t.report, Disrupted: t.opts.Disrupted,
		Guard: func() error { return t.hooks.Guard() }, Forget: forget,
	})
	t.writer.SetReach(t.growth.limits.Most)
	t.flowTable.CountFor(tables)
	if t.opts.packets() {
		t.direct = direct.New(direct.Options{Netns: t.netns, Dispatch: t.opts.Dispatch, Sources: t.opts.DirectSources, Peers: t.writer.DirectPeers, Ready: t.writer.SetDirect})
	}
	t.sockets = sockets.New(sockets.Options{
		Storage: t.maps["tdm_sock"], OptOuts: t.maps["tdm_optout"], Stale: t.writer.StaleSockets,
		Cgroup: t.cgroup, Host: t.netns, Left: t.opts.Left, ProcRoot: t.opts.ProcRoot, Report: t.report,
	})
	return nil
}

// deviceOptions are the options of programs on devices, with flows in this table.
func (t *Tier) deviceOptions(sizes lbmap.Sizes, flows *flowtable.Table) (datapath.DeviceOptions, error) {
	var ephemeral datapath.PortRange
	if err := t.netns.Do(func() (err error) { ephemeral, err = datapath.EphemeralPorts(); return err }); err != nil {
		return datapath.DeviceOptions{}, err
	}
	o := &t.opts
	return datapath.DeviceOptions{
		Sizes: sizes, TC: o.TC, SNAT: datapath.NewSNATPool(o.NodePortRange, ephemeral), ResetRemoved: o.ResetRemoved, Dispatch: o.Dispatch, DirectSources: o.DirectSources, Draining: !o.packets(), FlowsLeft: flows.Used,
		Acceleration: o.Acceleration, NoFIBSource: o.NoFIBSource, NoLoop: o.NoLoop, NoConntrack: o.NoConntrack,
	}, nil
}

// unload closes what load opened.
func (t *Tier) unload() {
	if t.sockets != nil {
		t.sockets.Close()
	}
	t.stopHold()
	t.arrivals.Close()
	if t.writer != nil {
		t.writer.Close()
	}
	if t.successor != nil {
		_ = t.successor.Close() // unmaps memory that is mapped
	}
	t.generation.close()
	t.generation = generation{sizes: t.sizes}
	t.successor, t.arrivals, t.writer, t.sockets = nil, nil, nil, nil
}
