// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// drainSizes are the map sizes of the process before the drain.
var drainSizes = lbmap.Sizes{Frontends: 64, Services: 64, Backends: 64, Slots: 64, Affinity: 64, UDPPeers: 16, OptOuts: 16,
	TCPFlows: 1 << 8, UDPFlows: 1 << 8, YoungFlows: 1 << 8}

// drainOptions are the options of tests that wait until flows have ended.
func drainOptions() Options {
	return Options{Sizes: drainSizes, Timeouts: flowtable.Timeouts{Closed: time.Second, UDP: time.Second, UDPStream: time.Second}}
}

// drainer is a process that drains.
type drainer struct {
	tier  *Tier
	stop  func()
	ended chan error
}

// drain ends the serving process, and starts another one that drains at once.
func (e *edge) drain(t testing.TB, opts Options) *drainer {
	t.Helper()
	e.close()
	tier, err := openOn(t, e.at, opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	d := &drainer{tier: tier, stop: stop, ended: make(chan error, 1)}
	go func() { d.ended <- tier.drain(ctx, 100*time.Millisecond) }()
	t.Cleanup(func() {
		stop()
		if err := tier.Close(); err != nil { // ends the drain
			t.Error(err)
		}
	})
	return d
}

// leavesNew waits until new connections from outside are left alone.
func (e *edge) leavesNew(t testing.TB) {
	t.Helper()
	for _, n := range e.entries() {
		waitFor(t, "a new connection "+n.String()+" to be left alone", func() bool {
			_, err := e.client.Ask(shortly(t), n.network, n.to)
			return err != nil
		})
	}
}

// wait waits until the drain has ended.
func (d *drainer) wait(t testing.TB) {
	t.Helper()
	select {
	case err := <-d.ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("programs are not removed")
	}
}

// TestDetach: programs that serve for a running process stay; those that it drains go, and so do
// those of no process.
func TestDetach(t *testing.T) {
	e := newEdge(t, drainOptions())
	serve(t, e.there)
	e.setPods(e.there)
	e.sync(t)
	detach := func() (removed []string, err error) {
		inner := e.at.Do(func() error { removed, err = removal.Detach(t.Context(), e.at.CgroupPath()); return nil })
		return removed, errors.Join(inner, err)
	}
	if removed, err := detach(); !errors.Is(err, removal.ErrServing) || len(removed) > 0 {
		t.Errorf("beside the process that serves: %v, %v", removed, err)
	}
	c, err := e.client.Dial(t.Context(), "tcp", netip.AddrPortFrom(lb4, lbPort)) // keeps the programs from going
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := lab.AskConn(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	d := e.drain(t, drainOptions())
	lab.Await(t, patience, "detached programs", func() error {
		removed, err := detach()
		if err == nil && len(removed) < 12 {
			t.Errorf("detached %v", removed)
		}
		return err
	})
	if there, err := removal.Attached(e.at.CgroupPath()); there || err != nil {
		t.Errorf("programs are attached: %v, %v", there, err)
	}
	d.stop()
	d.wait(t)
	if err := d.tier.Close(); err != nil {
		t.Fatal(err)
	}
	e.begin(t, drainOptions(), nil)
	e.sync(t)
	e.close()
	if removed, err := detach(); err != nil || len(removed) < 12 {
		t.Errorf("without a process: %v, %v", removed, err)
	}
}

// TestDrain: with every combination of map sizes and layouts, a draining process serves no new
// connections. Established connections from outside continue. When they have ended, all kernel
// state of the proxy is removed.
func TestDrain(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*lbmap.Sizes)
		layout uint32
		adopts bool
	}{
		{name: "the same tables", adopts: true},
		{name: "other sizes of flows", change: func(s *lbmap.Sizes) { s.TCPFlows, s.YoungFlows = 1<<9, 1<<7 }, adopts: true},
		{name: "other sizes", change: func(s *lbmap.Sizes) { s.Frontends, s.Backends = 1<<7, 1<<7 }},
		{name: "other sizes of both", change: func(s *lbmap.Sizes) { s.Frontends, s.UDPFlows = 1<<7, 1<<9 }},
		{name: "another layout", layout: lbmap.LayoutVersion - 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			opts := drainOptions()
			e := newEdge(t, opts)
			inside := e.at.Pod("inside")
			e.UpdateFacts(func(f *proxier.Facts) { f.ServiceCIDRs = []netip.Prefix{lab.ServicePrefix4, lab.ServicePrefix6} })
			e.use(t, serve(t, e.here), serve(t, e.there))
			open := e.visitBoth(t)
			if tt.layout != 0 {
				tablesOf(e.tier).Meta.Layout = tt.layout
			}
			if tt.change != nil {
				tt.change(&opts.Sizes)
			}
			d := e.drain(t, opts)
			if d.tier.Adopted() != tt.adopts {
				t.Fatalf("the maps were adopted: %v", !tt.adopts)
			}

			// Connections to unallocated ClusterIPs are not rejected.
			for _, unserved := range []netip.AddrPort{netip.AddrPortFrom(vip4, 80), netip.MustParseAddrPort("10.96.7.7:80"), netip.MustParseAddrPort("[fd00:10:96::7777]:80")} {
				waitFor(t, "a pod's connection to "+unserved.String()+" to be sent untranslated", func() bool {
					ctx := shortly(t)
					_, err := inside.Ask(ctx, "tcp", unserved)
					return err != nil && ctx.Err() != nil
				})
			}
			e.leavesNew(t)
			for _, v := range open {
				v.want(t, v.server)
			}
			select {
			case err := <-d.ended:
				t.Fatalf("the drain ended while there are connections: %v", err)
			default:
			}
			for _, v := range open {
				if err := v.conn.Close(); err != nil {
					t.Fatal(err)
				}
			}
			d.wait(t)
			if there, err := removal.Attached(e.at.CgroupPath()); there || err != nil {
				t.Errorf("programs are attached to the cgroup: %v %v", there, err)
			}
			if left := e.onDevices(t); len(left) > 0 {
				t.Errorf("still attached to devices: %v", left)
			}
		})
	}
}

// TestDrainUnreadable: where flows of attached programs cannot be read, established connections continue, and
// the programs stay.
func TestDrainUnreadable(t *testing.T) {
	opts := drainOptions()
	e := newEdge(t, opts)
	e.use(t, serve(t, e.here), serve(t, e.there))
	open := e.visitBoth(t)
	e.close()
	tier, err := openOn(t, e.at, opts)
	if err != nil {
		t.Fatal(err)
	}
	defer tier.Close()
	other, err := ciliumebpf.NewMap(&ciliumebpf.MapSpec{Type: ciliumebpf.Array, KeySize: 4, ValueSize: 4096, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	own := tier.maps["tdm_flow_entry"]
	defer own.Close()
	tier.maps["tdm_flow_entry"] = other
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- tier.drain(ctx, 100*time.Millisecond) }()
	e.leavesNew(t)
	for _, v := range open {
		v.want(t, v.server)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if there, err := removal.Attached(e.at.CgroupPath()); !there || err != nil {
		t.Errorf("programs are attached to the cgroup: %v %v", there, err)
	}
}

// TestDrainBesideFailures: a device that refuses the draining programs does not block the drain.
// Its established connections continue, and their records are freed when they end. It gets the
// programs as soon as it accepts them.
func TestDrainBesideFailures(t *testing.T) {
	kernel.Needs(t, capabilities.TCX) // otherwise the clsact qdisc of the serving programs conflicts with the one below
	opts := drainOptions()
	e := newEdge(t, opts)
	e.use(t, serve(t, e.here), serve(t, e.there))
	var open []*visit
	for _, n := range e.entries("tcp") {
		open = append(open, e.visit(t, n))
	}
	uplink, err := e.at.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	// An ingress qdisc has no hook for filters on egress.
	foreign := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: uplink.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS}}
	if err := e.at.Netlink().QdiscAdd(foreign); err != nil {
		t.Fatal(err)
	}
	opts.TC = tc.Clsact
	d := e.drain(t, opts)
	for _, v := range open[1:] {
		v.want(t, v.server)
		if err := v.conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, "the records of closed connections to be freed", func() bool { return d.tier.flowTable.Used() == 1 })
	open[0].want(t, open[0].server)

	on := func(what string) bool {
		return slices.ContainsFunc(e.onDevices(t), func(s string) bool { return strings.HasPrefix(s, lab.Uplink+" "+what) })
	}
	if on("filter") {
		t.Fatal("the device accepted the draining programs")
	}
	if err := e.at.Netlink().QdiscDel(foreign); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the device to get the draining programs", func() bool { return on("filter ingress") && on("filter egress") && !on("tcx") })
	open[0].want(t, open[0].server)
	if err := open[0].conn.Close(); err != nil {
		t.Fatal(err)
	}
	d.wait(t)
	if left := e.onDevices(t); len(left) > 0 {
		t.Errorf("still attached to devices: %v", left)
	}
}

// TestStopNewConnections: a process that cannot open the tier can stop it. Then new connections are not
// served, and established ones continue.
func TestStopNewConnections(t *testing.T) {
	e := newEdge(t, drainOptions())
	e.use(t, serve(t, e.here), serve(t, e.there))
	var open []*visit
	for _, n := range e.entries("tcp") {
		open = append(open, e.visit(t, n))
	}
	stop := func() error {
		return e.at.Do(func() error { return removal.StopNewConnections(t.Context(), e.at.CgroupPath()) })
	}
	if err := stop(); err == nil {
		t.Error("a running process was stopped")
	}
	e.close()
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	for _, n := range e.entries() {
		if r, err := e.client.Ask(shortly(t), n.network, n.to); err == nil {
			t.Errorf("new connection %s was answered by %s", n, r.Server)
		}
	}
	for _, v := range open {
		v.want(t, v.server)
	}
	if there, err := removal.Attached(e.at.CgroupPath()); !there || err != nil {
		t.Errorf("later processes cannot find the programs: %v", err)
	}
}
