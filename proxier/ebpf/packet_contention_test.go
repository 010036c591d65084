// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"sync"
	"testing"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// TestPacketContention: many threads create the same flows, evict those of each other and free their
// ids, in a table that has room for few. No id and no entry is lost, no flow has two entries for a
// key, and every packet gets a flow.
func TestPacketContention(t *testing.T) {
	const threads, clients = 16, 1 << 10
	packets := 100_000
	if testing.Short() {
		packets = 10_000
	}
	sizes := pathSizes
	sizes.YoungFlows = 256
	p := newPath(t, Options{Sizes: sizes})
	p.use(t, "lo") // the device of test runs that name none
	to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 100, 0, 0}), 80)
	p.addBenchService(0, to.Addr())
	if err := p.sync(); err != nil {
		t.Fatal(err)
	}
	var all []datapath.Tuple
	for i := range clients {
		all = append(all, datapath.Tuple{Src: netip.AddrPortFrom(netip.AddrFrom4([4]byte{8, 0, byte(i >> 8), byte(i)}), 1000), Dst: to})
	}
	table := p.tier.flowTable
	frame := p.frame(tcp(all[0].Src, to, packet.SYN))
	var flooding sync.WaitGroup
	for range threads {
		d, err := newDriver(all)
		if err != nil {
			t.Fatal(err)
		}
		defer d.close()
		if err := d.next.Put(uint32(0), p.programs[in]); err != nil {
			t.Fatal(err)
		}
		flooding.Go(func() {
			if err := p.at.Do(func() error { _, _, err := d.program.Benchmark(frame, packets, nil); return err }); err != nil {
				t.Error(err)
			}
		})
	}
	flooding.Wait()
	audit(t, p.tier)
	idle, err := table.Unfinished()
	if err != nil || len(idle.Flows)+len(idle.Entries) > 0 {
		t.Errorf("neither free nor in use: %+v %v", idle, err)
	}
	got, err := p.counts()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d flows; packets: %v", table.Count(lbmap.FlowBorn), got)
	// Of two threads that create a flow, both may give way.
	if lost := got["DROP_RACED"]; got["FORWARD_LOCAL"]+lost != threads*uint64(packets) || lost*1000 > threads*uint64(packets) {
		t.Errorf("packets: %v, want %d", got, threads*packets)
	}
}
