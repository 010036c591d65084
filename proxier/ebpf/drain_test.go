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

	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// drainSizes are those of the process that served.
var drainSizes = lbmap.Sizes{Frontends: 64, Services: 64, Backends: 64, Slots: 64, Affinity: 64, UDPPeers: 16, OptOuts: 16,
	TCPFlows: 1 << 8, UDPFlows: 1 << 8, YoungFlows: 1 << 8}

// drainOptions are those of tests that wait for the end of flows.
func drainOptions() Options {
	return Options{Sizes: drainSizes, Timeouts: flowtable.Timeouts{Closed: time.Second, UDP: time.Second, UDPStream: time.Second}}
}

// drainer is a process that drains.
type drainer struct {
	tier  *Tier
	stop  func()
	ended chan error
}

// drain has a process take over from the one that serves, which drains at once.
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
		if err := tier.Close(); err != nil { // ends it
			t.Error(err)
		}
	})
	return d
}

// wait waits for the end.
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
		inner := e.at.Do(func() error { removed, err = Detach(e.at.CgroupPath()); return nil })
		return removed, errors.Join(inner, err)
	}
	if removed, err := detach(); !errors.Is(err, ErrServing) || len(removed) > 0 {
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
	if there, err := Attached(e.at.CgroupPath()); there || err != nil {
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

// Whatever tables the draining process has: no new connection is served, established ones from
// outside go on, and then all kernel state of the proxy is removed.
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
				t.Fatalf("the maps were taken over: %v", !tt.adopts)
			}

			// Connections to unallocated ClusterIPs are not rejected.
			for _, unserved := range []netip.AddrPort{netip.AddrPortFrom(vip4, 80), netip.MustParseAddrPort("10.96.7.7:80"), netip.MustParseAddrPort("[fd00:10:96::7777]:80")} {
				waitFor(t, "a pod's connection to "+unserved.String()+" to go out as it is", func() bool {
					ctx := shortly(t)
					_, err := inside.Ask(ctx, "tcp", unserved)
					return err != nil && ctx.Err() != nil
				})
			}
			for _, n := range e.entries() {
				if r, err := e.client.Ask(shortly(t), n.network, n.to); err == nil {
					t.Errorf("new connection %s was answered by %s", n, r.Server)
				}
			}
			for _, v := range open {
				v.want(t, v.server)
			}
			select {
			case err := <-d.ended:
				t.Fatalf("ended while there are connections: %v", err)
			default:
			}
			for _, v := range open {
				if err := v.conn.Close(); err != nil {
					t.Fatal(err)
				}
			}
			d.wait(t)
			if there, err := Attached(e.at.CgroupPath()); there || err != nil {
				t.Errorf("programs are on the cgroup: %v %v", there, err)
			}
			if left := e.onDevices(t); len(left) > 0 {
				t.Errorf("on devices are %v", left)
			}
		})
	}
}

// A device that takes no other programs holds up nothing: what is open by it goes on, ends,
// and is forgotten. It gets them when it takes them again.
func TestDrainBesideFailures(t *testing.T) {
	kernel.Needs(t, capabilities.TCX) // what is there already leaves room for that qdisc
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
	// It has no place for filters on egress.
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
	waitFor(t, "what has ended to be forgotten", func() bool { return d.tier.flowTable.Used() == 1 })
	open[0].want(t, open[0].server)

	on := func(what string) bool {
		return slices.ContainsFunc(e.onDevices(t), func(s string) bool { return strings.HasPrefix(s, lab.Uplink+" "+what) })
	}
	if on("filter") {
		t.Fatal("the device took other programs")
	}
	if err := e.at.Netlink().QdiscDel(foreign); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the device to get other programs", func() bool { return on("filter ingress") && on("filter egress") && !on("tcx") })
	open[0].want(t, open[0].server)
	if err := open[0].conn.Close(); err != nil {
		t.Fatal(err)
	}
	d.wait(t)
	if left := e.onDevices(t); len(left) > 0 {
		t.Errorf("on devices are %v", left)
	}
}

// A process that cannot open the tier can silence it: no new connection is served, and
// established ones go on.
func TestSilence(t *testing.T) {
	e := newEdge(t, drainOptions())
	e.use(t, serve(t, e.here), serve(t, e.there))
	var open []*visit
	for _, n := range e.entries("tcp") {
		open = append(open, e.visit(t, n))
	}
	silence := func() error { return e.at.Do(func() error { return Silence(e.at.CgroupPath()) }) }
	if err := silence(); err == nil {
		t.Error("a process that serves was silenced")
	}
	e.close()
	if err := silence(); err != nil {
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
	if there, err := Attached(e.at.CgroupPath()); !there || err != nil {
		t.Errorf("no process would find the programs: %v", err)
	}
}
