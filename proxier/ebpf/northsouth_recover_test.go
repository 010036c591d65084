// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// TestRecoverFlows: a process that starts frees the records that an earlier process was ending
// when it was killed, and no others, even while programs allocate and free records at a high rate.
func TestRecoverFlows(t *testing.T) {
	const kept, young = 200, 1 << 10
	e := newEdge(t, Options{Sizes: lbmap.Sizes{Frontends: 64, Services: 64, Backends: 64, Slots: 64, Affinity: 64, UDPPeers: 16, OptOuts: 16,
		TCPFlows: kept + 1, UDPFlows: 16, YoungFlows: young}})
	e.use(t, serve(t, e.here), serve(t, e.there))
	table, entries := e.tier.flowTable, e.entries("tcp")

	var open []*visit
	for i := range kept {
		open = append(open, e.visit(t, entries[i%len(entries)]))
	}

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	pace := newPace(func() uint64 { return table.Count(lbmap.FlowBorn) })
	var flooding sync.WaitGroup
	for i, to := range []netip.AddrPort{netip.AddrPortFrom(e.at.Addr4, nodePort), netip.AddrPortFrom(lb6, lbPort)} {
		f := newFlooder(t, e.client, to, uint64(i), pace, syn)
		flooding.Go(func() {
			for ctx.Err() == nil {
				if err := f.send(100); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	born := table.Count(lbmap.FlowBorn)
	waitFor(t, "young flows to evict each other", func() bool { return table.Count(lbmap.FlowBorn)-born > 2*young })
	// The records of these connections are freed. In the stack of free records they are below those
	// that the flood uses.
	for _, v := range open {
		if err := v.conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
	timeouts := flowtable.DefaultTimeouts()
	waitFor(t, "free flows", func() bool {
		if _, err := table.Sweep(t.Context(), &timeouts, flowtable.MonotonicSeconds()+uint32(2*timeouts.Closed/time.Second)); err != nil {
			t.Fatal(err)
		}
		return table.Used() <= young
	})
	for range 50 {
		if err := table.Recover(datapath.WaitForPrograms); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	flooding.Wait()
	datapath.WaitForPrograms()
	e.audit(t)

	var claimed int
	err := table.Each(func(_ int, list []lbmap.Flow) error {
		for i := range list {
			life := &list[i].Life
			if lbmap.FlowStage(*life) == lbmap.FlowYoung && claimed < 10 {
				atomic.StoreUint64(life, lbmap.FlowLife(uint32(*life>>32), lbmap.FlowClaimed))
				claimed++
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	used := table.Used()
	if err := table.Recover(datapath.WaitForPrograms); err != nil {
		t.Fatal(err)
	}
	if got := used - table.Used(); claimed != 10 || got != claimed {
		t.Errorf("%d of %d records were freed", got, claimed)
	}
	e.audit(t)
}
