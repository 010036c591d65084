// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable/flowtabletest"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// TestFlood: clients that send only a first packet evict each other, and no established
// connection. Afterwards all records that they used are free again.
func TestFlood(t *testing.T) {
	const young, established, flood = 1 << 10, 200, 30_000
	e := newEdge(t, Options{Sizes: lbmap.Sizes{Frontends: 64, Services: 64, Backends: 64, Slots: 64, Affinity: 64, UDPPeers: 16, OptOuts: 16,
		TCPFlows: established + 1, UDPFlows: 16, YoungFlows: young}})
	serve(t, e.here)
	serve(t, e.there)
	e.use(t, e.here, e.there)
	table := e.tier.flowTable
	entries := e.entries("tcp")
	var open []*visit
	for i := range established {
		open = append(open, e.visit(t, entries[i%len(entries)]))
	}
	asked := func(when string) {
		t.Helper()
		for _, v := range open {
			if r, err := lab.AskConn(t.Context(), v.conn); err != nil || r.Server != v.server {
				t.Fatalf("%s: %s to %s: %v %v", when, v.entry, v.server, r, err)
			}
		}
	}
	asked("before")
	if kept := table.Count(lbmap.FlowKeptTCP); kept != established {
		t.Errorf("%d flows are kept before the flood", kept)
	}

	born, counts := table.Count(lbmap.FlowBorn), counted{tier: e.tier}
	counts.since(t)
	pace := newPace(func() uint64 { return table.Count(lbmap.FlowBorn) })
	var flooding sync.WaitGroup
	for i, to := range []netip.Addr{e.at.Addr4, lb6} {
		port := []uint16{nodePort, lbPort}[i]
		f := newFlooder(t, e.client, netip.AddrPortFrom(to, port), uint64(i), pace, syn)
		flooding.Go(func() {
			// The kernel may drop packets before any program sees them.
			for enough := time.Now().Add(time.Minute); table.Count(lbmap.FlowBorn)-born < flood && time.Now().Before(enough); {
				if err := f.send(100); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	flooded := make(chan struct{})
	go func() { flooding.Wait(); close(flooded) }()
	for rounds := 0; ; rounds++ {
		select {
		case <-flooded:
		default:
			asked("meanwhile")
			continue
		}
		t.Logf("%d times asked meanwhile", rounds)
		break
	}
	waitFor(t, "the programs to have seen the whole flood", func() bool { return table.Count(lbmap.FlowBorn)-born >= flood })
	asked("after")
	if kept := table.Count(lbmap.FlowKeptTCP); kept != established {
		t.Errorf("%d flows are kept after the flood", kept)
	}
	if used := table.Used(); used < established+young-2 || used > established+young {
		t.Errorf("%d flows are in use", used)
	}
	since := counts.since(t)
	t.Logf("packets: %v", since)
	if since["forwarded_local"]+since["forwarded_remote"] < flood || since["dropped_no_flow"]+since["dropped_raced"] > 0 {
		t.Error("not every packet of the flood got a flow")
	}
	if n := since["pushed_out"]; n < flood-young || n > table.Count(lbmap.FlowBorn)-born {
		t.Errorf("%d flows are counted as evicted", n)
	}
	e.audit(t)

	timeouts := flowtable.DefaultTimeouts()
	sweep := func(after time.Duration, left int) {
		t.Helper()
		// Packets that are still queued could create a flow again that has just been ended.
		e.settle(t)
		waitFor(t, "the flows of the flood to be freed", func() bool { // replies are still queued
			if _, err := table.Sweep(t.Context(), &timeouts, flowtable.MonotonicSeconds()+uint32(after/time.Second)); err != nil {
				t.Fatal(err)
			}
			return table.Used() <= left
		})
		if used, kept := table.Used(), table.Count(lbmap.FlowKeptTCP); used != left || kept != uint64(left) {
			t.Errorf("%d flows are in use and %d kept, want %d", used, kept, left)
		}
		e.audit(t)
	}
	sweep(timeouts.Opening+2*time.Second, established)
	asked("after young flows were ended")
	for _, v := range open {
		if err := v.conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
	sweep(timeouts.Closed+2*time.Second, 0)
}

// settle waits until no queued packet creates or ends a flow.
func (e *edge) settle(t testing.TB) {
	t.Helper()
	table, since := e.tier.flowTable, time.Now()
	var before [3]uint64
	waitFor(t, "flows to stop changing", func() bool {
		_, changes := flowtabletest.Free(t, e.tier.maps)
		now := [...]uint64{table.Count(lbmap.FlowBorn), changes, table.Count(lbmap.FlowOver)}
		if now != before {
			before, since = now, time.Now()
		}
		return time.Since(since) > 100*time.Millisecond
	})
}

// audit checks the flow table when no packet changes it any more.
func (e *edge) audit(t testing.TB) {
	t.Helper()
	e.settle(t)
	audit(t, e.tier)
}

// audit checks the flow table: each id is either free or in use, and each flow has its two entries.
func audit(t testing.TB, tier *Tier) {
	t.Helper()
	table := tier.flowTable
	seen := map[uint32]string{}
	note := func(id uint32, what string) {
		if before := seen[id]; before != "" {
			t.Errorf("flow %d is %s and %s", id, before, what)
		}
		seen[id] = what
	}
	for id := int(table.Count(lbmap.FlowFresh)) + 1; id <= table.Limit(); id++ {
		note(uint32(id), "fresh")
	}
	next := map[uint32]uint32{}
	used := 0
	var flows []lbmap.Flow
	err := table.Each(func(first int, list []lbmap.Flow) error {
		flows = append(flows, list...)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for id := range flows {
		next[uint32(id)] = flows[id].Place[0]
		if lbmap.FlowStage(flows[id].Life) != lbmap.FlowFree {
			note(uint32(id), "in use")
			used++
		}
	}
	index, err := flowtable.OpenIndex(tier.maps)
	if err != nil {
		t.Fatal(err)
	}
	defer index.Close()
	if err := checkEntries(index, flowtabletest.OpenIndex(t, tier.maps), flows); err != nil {
		t.Error(err)
	}
	tops, _ := flowtabletest.Free(t, tier.maps)
	for _, id := range tops {
		for ; id != 0 && seen[id] != "free"; id = next[id] {
			note(id, "free")
		}
	}
	if len(seen) != table.Limit() || seen[0] != "" || used != table.Used() {
		t.Errorf("%d of %d ids are free or in use; %d are in use and %d are counted", len(seen), table.Limit(), used, table.Used())
	}
}

// BenchmarkFlood creates flows as fast as packets arrive, of clients that send nothing else,
// while 200 connections are in use.
func BenchmarkFlood(b *testing.B) {
	const established = 200
	e := newEdge(b, Options{Sizes: lbmap.Sizes{Frontends: 64, Services: 64, Backends: 64, Slots: 64, Affinity: 64, UDPPeers: 16, OptOuts: 16,
		TCPFlows: 1 << 16, UDPFlows: 1 << 10, YoungFlows: 1 << 16}})
	serve(b, e.here)
	serve(b, e.there)
	e.use(b, e.here, e.there)
	entries := e.entries("tcp")
	var open []*visit
	for i := range established {
		open = append(open, e.visit(b, entries[i%len(entries)]))
	}
	// Addresses without a pod, so that only the node's work is measured.
	var unused []netip.Addr
	for i := range byte(4) {
		unused = append(unused, netip.AddrFrom4([4]byte{10, 244, 1, 200 + i}), netip.AddrFrom4([4]byte{10, 244, 2, 200 + i}))
	}
	e.useAddrs(b, unused...)
	table := e.tier.flowTable
	born := table.Count(lbmap.FlowBorn)
	counts := counted{tier: e.tier}
	counts.since(b)
	var flooding sync.WaitGroup
	b.ResetTimer()
	for half := range 2 {
		w := newWire(b, e.client, e.at.Addr4)
		flooding.Go(func() {
			if err := w.flood(netip.AddrPortFrom(e.at.Addr4, nodePort), byte(half), b.N/2); err != nil {
				b.Error(err)
			}
		})
	}
	flooded := make(chan struct{})
	go func() { flooding.Wait(); close(flooded) }()
	var took []time.Duration
	for done := false; !done; {
		for _, v := range open {
			start := time.Now()
			if r, err := lab.AskConn(b.Context(), v.conn); err != nil || r.Server != v.server {
				b.Fatalf("%s to %s: %v %v", v.entry, v.server, r, err)
			}
			took = append(took, time.Since(start))
			select {
			case <-flooded:
				done = true
			default:
			}
		}
	}
	b.StopTimer()
	slices.Sort(took)
	since := counts.since(b)
	b.ReportMetric(float64(table.Count(lbmap.FlowBorn)-born)/b.Elapsed().Seconds(), "flows/s")
	b.ReportMetric(float64(since["dropped_no_flow"]+since["dropped_raced"]), "dropped")
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "median-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
	if kept := table.Count(lbmap.FlowKeptTCP); kept != established {
		b.Errorf("%d flows are kept", kept)
	}
	e.audit(b)
}

// flood sends SYNs of many clients. It adds a number to the address, and subtracts it from the
// port and from the id of the IP header, so that all checksums stay correct.
func (w *wire) flood(to netip.AddrPort, which byte, count int) error {
	const id, address, port = 14 + 4, 14 + 14, 14 + 20 // offsets of the 16-bit words that change
	var templates [128][]byte
	for i := range templates {
		from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{18 + which, byte(i), 0, 0}), 0xffff)
		p := packet.NewTCP(from, to, packet.SYN, nil)
		p.IPv4.ID = 0xffff
		templates[i] = w.frame(p)
	}
	r := rand.New(rand.NewPCG(2, uint64(which)))
	for i := range count {
		frame, n := templates[i%len(templates)], uint16(r.Uint32())
		binary.BigEndian.PutUint16(frame[id:], ^n)
		binary.BigEndian.PutUint16(frame[address:], n)
		binary.BigEndian.PutUint16(frame[port:], ^n)
		if err := w.send(frame); err != nil {
			return err
		}
	}
	return nil
}
