// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
)

// TestConnectionsSurvive (I3): established connections from outside continue, and new ones are
// served, through restarts, new maps and other attach methods. When the device itself is removed
// and comes back, established connections continue.
func TestConnectionsSurvive(t *testing.T) {
	// In a small ring, young flows whose packet was lost would be evicted before the packet is
	// retransmitted.
	sizes := lbmap.Sizes{Frontends: 64, Services: 64, Backends: 64, Slots: 64, Affinity: 64, UDPPeers: 16, OptOuts: 16,
		TCPFlows: 1 << 10, UDPFlows: 1 << 10, YoungFlows: 1 << 14}
	e := newEdge(t, Options{Sizes: sizes}, lab.Options{Nodes: live.Guarded})
	pods := []*lab.Pod{serve(t, e.here), serve(t, e.there)}
	e.use(t, pods...)
	load := newLoad(t, e, 16)
	recreation := []use{newTCP, newUDP}
	if e.tier.hold == nil {
		recreation = append(recreation, open)
	}

	again := func(opts Options, adopted bool) {
		t.Helper()
		e.close()
		opts.Sizes = sizes
		e.begin(t, opts, nil)
		if e.tier.Adopted() != adopted {
			t.Fatalf("the maps were adopted: %v", !adopted)
		}
		e.use(t, pods...)
	}
	for _, step := range []struct {
		name string
		do   func()
		// rest are the kinds of traffic that pause during the step, because they cannot bear it.
		rest []use
	}{
		{"restarts", func() {
			for range 3 {
				again(Options{}, true)
			}
		}, nil},
		{"another layout", func() {
			for range 2 {
				tablesOf(e.tier).Meta.Layout = lbmap.LayoutVersion - 1
				again(Options{}, false)
			}
		}, nil},
		{"other sizes of flows", func() {
			usual := sizes
			sizes.TCPFlows, sizes.YoungFlows = 1<<11, 1<<13
			again(Options{}, true)
			sizes = usual
			again(Options{}, true)
		}, copyingFlows(e.tier)},
		{"no route to a backend", func() { withoutRoute(t, e.at, e.two) }, []use{newTCP, newUDP}},
		// While a clsact qdisc is added or removed, the kernel drops outgoing packets.
		{"another method", func() {
			again(Options{TC: tc.Clsact}, true)
			again(Options{TC: tc.TCX}, true)
		}, []use{newUDP}},
		{"uplink down", func() {
			up, err := e.at.Down(lab.Uplink)
			if err != nil {
				t.Fatal(err)
			}
			if err := up(); err != nil {
				t.Fatal(err)
			}
		}, []use{newTCP, newUDP}},
		{"another uplink", func() {
			told, stop := watchUplinks(t, e)
			defer stop()
			if e.tier.hold == nil {
				// The kernel answers packets that come before the programs with resets.
				allAcknowledged(t, pods...)
			}
			replug(t, e, told)
		}, recreation},
	} {
		start := load.counts()
		func() {
			for _, use := range step.rest {
				load.rests[use].Lock()
				defer load.rests[use].Unlock()
			}
			step.do()
		}()
		load.allAnswered(t, step.name)
		now := load.counts()
		t.Logf("%s: %d requests over open connections, %d over new ones", step.name, now.open-start.open, now.fresh-start.fresh)
	}
	load.stop()
	if n := load.counts(); n.broken > 0 || n.failed > 0 {
		t.Errorf("%d of %d connections broke, %d of %d new ones failed", n.broken, len(load.open), n.failed, n.fresh)
	}
}

// withoutRoute removes a node's routes to the pods of another one, for long enough that clients
// retransmit.
func withoutRoute(t *testing.T, at, to *lab.Node) {
	t.Helper()
	replies, err := at.Capture(lab.Uplink, func(c lab.Captured) bool { return !c.Outgoing && c.TCP != nil })
	if err != nil {
		t.Fatal(err)
	}
	defer replies.Close()
	nl := at.Netlink()
	var usual []netlink.Route
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := nl.RouteList(nil, family)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range routes {
			if r.Gw != nil && (r.Gw.Equal(to.Addr4.AsSlice()) || r.Gw.Equal(to.Addr6.AsSlice())) {
				usual = append(usual, r)
			}
		}
	}
	if len(usual) != 2 {
		t.Fatalf("routes to pods of %s: %v", to.Name, usual)
	}
	for _, r := range usual {
		if err := nl.RouteDel(&r); err != nil {
			t.Fatal(err)
		}
		if err := nl.RouteAdd(&netlink.Route{Dst: r.Dst, Type: unix.RTN_UNREACHABLE}); err != nil {
			t.Fatal(err)
		}
	}
	// Each unanswered segment is retransmitted.
	for range 200 {
		if _, err := replies.Expect(t.Context(), func(lab.Captured) bool { return true }); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range usual {
		if err := nl.RouteDel(&netlink.Route{Dst: r.Dst, Type: unix.RTN_UNREACHABLE}); err != nil {
			t.Fatal(err)
		}
		if err := nl.RouteAdd(&r); err != nil {
			t.Fatal(err)
		}
	}
}

// allAcknowledged waits until everything that these pods sent is acknowledged: otherwise clients,
// which delay acknowledgements, would send packets even while their traffic pauses.
func allAcknowledged(t *testing.T, pods ...*lab.Pod) {
	t.Helper()
	waiting := func(p *lab.Pod) (n int) {
		err := p.Do(func() error {
			for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
				sockets, err := netlink.SocketDiagTCPInfo(family)
				if err != nil {
					return err
				}
				for _, s := range sockets {
					if s.TCPInfo != nil && s.InetDiagMsg.State == netlink.TCP_ESTABLISHED {
						n += int(s.TCPInfo.Unacked)
					}
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for deadline := time.Now().Add(patience); slices.ContainsFunc(pods, func(p *lab.Pod) bool { return waiting(p) > 0 }); {
		if time.Now().After(deadline) {
			t.Fatal("clients do not acknowledge all they received")
		}
		lull(t.Context())
	}
}

// watchUplinks has the tier learn of uplinks through the watcher, as in a real process, until the
// returned function is called. It returns once the first ones are known.
func watchUplinks(t *testing.T, e *edge) (told chan []devices.Device, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	told = make(chan []devices.Device, 64)
	w := devices.New(devices.Options{NodeIPs: e.addrs(), In: e.at.Do})
	var watching sync.WaitGroup
	watching.Go(func() {
		w.Watch(ctx, func(u devices.Uplinks) {
			if err := e.tier.SetUplinks(t.Context(), u.Devices); err != nil {
				t.Error(err)
			}
			told <- u.Devices
		})
	})
	<-told
	stop = sync.OnceFunc(func() { cancel(); watching.Wait() })
	t.Cleanup(stop)
	return told, stop
}

// replug gives the node another uplink, and waits until the tier knows it.
func replug(t *testing.T, e *edge, told <-chan []devices.Device) {
	t.Helper()
	before := e.uplink(t)
	plug, err := e.at.Unplug()
	if err != nil {
		t.Fatal(err)
	}
	if err := plug(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.After(10 * time.Second); ; {
		select {
		case now := <-told:
			if len(now) == 1 && now[0].Index != before {
				return
			}
		case <-deadline:
			t.Fatal("the new uplink was not reported")
		}
	}
}

// use is what connections are used for.
type use int

const (
	open use = iota // requests one after another over the same connection
	newTCP
	newUDP
	uses
)

// load is many connections in permanent use, and new ones beside them.
type load struct {
	e    *edge
	open []*connection

	ctx     context.Context
	cancel  context.CancelFunc
	workers sync.WaitGroup
	rests   [uses]sync.RWMutex // locked for writing while that traffic pauses

	openAnswers, freshAnswers, failures atomic.Int64
}

// connection is an established connection of the load.
type connection struct {
	net.Conn
	entry   entry
	server  string // the server that sent the first reply
	answers atomic.Int64
	broken  atomic.Bool
}

// newLoad opens that many connections to each entry, and more until both servers have some.
func newLoad(t *testing.T, e *edge, each int) *load {
	t.Helper()
	l := &load{e: e}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	t.Cleanup(l.stop)
	servers := map[string]int{}
	entries := e.entries("tcp")
	for i := 0; i < each || (len(servers) < 2 && i < 10*each); i++ {
		for _, n := range entries {
			c, err := e.client.Dial(t.Context(), n.network, n.to)
			if err != nil {
				t.Fatal(err)
			}
			r, err := lab.AskConn(t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			servers[r.Server]++
			l.open = append(l.open, &connection{Conn: c, entry: n, server: r.Server})
		}
	}
	if len(servers) < 2 {
		t.Fatalf("all connections lead to %v", servers)
	}
	for _, c := range l.open {
		l.workers.Go(func() { l.use(t, c) })
	}
	for _, n := range e.entries() {
		l.workers.Go(func() { l.dial(t, n) })
	}
	return l
}

// copyingFlows are the kinds of traffic that pause while flows are copied to other maps. With clsact, a packet may miss a flow that
// begins meanwhile. Where such packets are held back, a TCP connection bears that.
func copyingFlows(t *Tier) []use {
	switch {
	case t.opts.TC == tc.TCX:
		return nil
	case t.hold == nil:
		return []use{newTCP, newUDP}
	}
	return []use{newUDP}
}

// patience limits the time of a request: packets that are lost are retransmitted at growing
// intervals.
const patience = 20 * time.Second

func (l *load) use(t *testing.T, c *connection) {
	defer c.Close()
	for l.ctx.Err() == nil {
		l.rests[open].RLock()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		r, err := lab.AskConn(ctx, c)
		cancel()
		l.rests[open].RUnlock()
		if err != nil || r.Server != c.server {
			t.Errorf("connection %s to %s broke: %v %v", c.entry, c.server, r, err)
			c.broken.Store(true)
			return
		}
		c.answers.Add(1)
		l.openAnswers.Add(1)
		lull(l.ctx)
	}
}

// dial opens one connection after another.
func (l *load) dial(t *testing.T, n entry) {
	rest := &l.rests[newTCP]
	if n.network == "udp" {
		rest = &l.rests[newUDP]
	}
	for l.ctx.Err() == nil {
		rest.RLock()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		_, err := l.e.client.Ask(ctx, n.network, n.to)
		cancel()
		rest.RUnlock()
		if err != nil {
			l.failures.Add(1)
			t.Errorf("new connection %s: %v", n, err)
			return
		}
		l.freshAnswers.Add(1)
		lull(l.ctx)
	}
}

// lull pauses, to leave CPU time to others.
func lull(ctx context.Context) {
	timer := time.NewTimer(10 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// allAnswered waits until every connection got two more replies: the first request may have been
// sent before.
func (l *load) allAnswered(t *testing.T, when string) {
	t.Helper()
	want := make([]int64, len(l.open))
	for i, c := range l.open {
		want[i] = c.answers.Load() + 2
	}
	for deadline := time.Now().Add(patience); ; {
		waiting := slices.IndexFunc(l.open, func(c *connection) bool { return !c.broken.Load() && c.answers.Load() < want[slices.Index(l.open, c)] })
		if waiting < 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: connection %s to %s does not get replies any more", when, l.open[waiting].entry, l.open[waiting].server)
		}
		lull(l.ctx)
	}
}

func (l *load) stop() {
	l.cancel()
	l.workers.Wait()
}

// loadCounts are the replies over open and over new connections, and the failures.
type loadCounts struct{ open, fresh, broken, failed int64 }

func (l *load) counts() loadCounts {
	n := loadCounts{open: l.openAnswers.Load(), fresh: l.freshAnswers.Load(), failed: l.failures.Load()}
	for _, c := range l.open {
		if c.broken.Load() {
			n.broken++
		}
	}
	return n
}
