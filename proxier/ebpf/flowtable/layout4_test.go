// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"net/netip"
	"slices"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable/flowtabletest"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/lab"
)

// table4 are maps of layout 4, as programs of that layout would fill them.
type table4 struct {
	t     *testing.T
	maps  lbmap.Maps
	flows []flow4
	ring  []uint64
	count []lbmap.FlowCounter
}

func newTable4(t *testing.T) *table4 {
	t.Helper()
	const records = 64
	o := &table4{t: t, maps: lbmap.Maps{}}
	t.Cleanup(func() { o.maps.Close() })
	var memory [][]byte
	t.Cleanup(func() { unmap(&memory) })
	for name, spec := range map[string]ciliumebpf.MapSpec{
		"tdm_flow":       {Type: ciliumebpf.Array, KeySize: 4, ValueSize: 144, MaxEntries: records, Flags: unix.BPF_F_MMAPABLE},
		"tdm_flow_key":   {Type: ciliumebpf.Hash, KeySize: 40, ValueSize: 8, MaxEntries: 2 * records},
		"tdm_flow_young": {Type: ciliumebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 16 + lbmap.MaxClosed, Flags: unix.BPF_F_MMAPABLE},
		"tdm_flow_count": {Type: ciliumebpf.Array, KeySize: 4, ValueSize: 64, MaxEntries: 7, Flags: unix.BPF_F_MMAPABLE},
	} {
		m, err := ciliumebpf.NewMap(&spec)
		if err != nil {
			t.Fatal(err)
		}
		o.maps[name] = m
	}
	if err := mapTo(&memory, &o.flows, o.maps["tdm_flow"]); err != nil {
		t.Fatal(err)
	}
	if err := mapTo(&memory, &o.ring, o.maps["tdm_flow_young"]); err != nil {
		t.Fatal(err)
	}
	if err := mapTo(&memory, &o.count, o.maps["tdm_flow_count"]); err != nil {
		t.Fatal(err)
	}
	return o
}

// add adds a flow from a client's port.
func (o *table4) add(id uint32, port uint16, stage int, flags uint32) *flow4 {
	o.t.Helper()
	client := lbmap.FromAddr(netip.MustParseAddr("198.51.100.1"))
	const generation = 7
	f := &o.flows[id]
	*f = flow4{
		Life: lbmap.FlowLife(generation, stage), Seen: 1000, Flags: flags | lbmap.FlowIndexed,
		Request: lbmap.FlowKey{Src: client, Dst: lbmap.FromAddr(netip.MustParseAddr("10.96.0.1")), Sport: lbmap.NetworkPort(port), Dport: lbmap.NetworkPort(80), Proto: 6},
		Reply:   lbmap.FlowKey{Src: lbmap.FromAddr(netip.MustParseAddr("10.244.1.1")), Dst: client, Sport: lbmap.NetworkPort(8080), Dport: lbmap.NetworkPort(port), Proto: 6},
		Service: 3, Backend: 4, BackendGeneration: 5, Packets: [2]uint64{10, 20}, Bytes: [2]uint64{100, 200},
	}
	word := uint64(generation)<<32 | uint64(id)
	for _, key := range []*lbmap.FlowKey{&f.Request, &f.Reply} {
		if err := o.maps["tdm_flow_key"].Put(key, word); err != nil {
			o.t.Fatal(err)
		}
	}
	o.ring[o.count[born4].Value&15] = word
	o.count[born4].Value++
	return f
}

// TestCopiesLayout4: flows move from maps of layout 4, whose index is a hash map, with their state,
// their traffic, and what happened to them after the first copy.
func TestCopiesLayout4(t *testing.T) {
	if err := lab.Root(); err != nil {
		lab.SkipOrFail(t, err)
	}
	const established = lbmap.FlowReplied | lbmap.FlowEstablished
	o := newTable4(t)
	kept := o.add(1, 1001, lbmap.FlowKept, established|remote4|ingress4)
	o.add(2, 1002, lbmap.FlowYoung, 0)
	closes := o.add(3, 1003, lbmap.FlowKept, established|lbmap.FlowFINReply)
	ends := o.add(4, 1004, lbmap.FlowYoung, lbmap.FlowReplied)
	sizes := lbmap.Sizes{TCPFlows: 16, UDPFlows: 4, YoungFlows: 16}
	spec, err := lbmap.PacketSpec()
	if err != nil {
		t.Fatal(err)
	}
	to := lbmap.Maps{}
	defer to.Close()
	for _, name := range MapNames {
		if n, ok := MapSizes(sizes)[name]; ok {
			spec.Maps[name].MaxEntries = n
		}
		if to[name], err = ciliumebpf.NewMap(spec.Maps[name]); err != nil {
			t.Fatal(err)
		}
	}
	c, err := NewCopier(o.maps, to)
	if c == nil || err != nil {
		t.Fatalf("no copier: %v", err)
	}
	defer c.Close()
	if err := c.CopyAll(); err != nil {
		t.Fatal(err)
	}
	o.add(5, 1005, lbmap.FlowYoung, 0)
	closes.Flags |= lbmap.FlowFINRequest | lbmap.FlowClosed
	ends.Life = lbmap.FlowLife(7, lbmap.FlowFree)
	if err := c.CopyNew(); err != nil {
		t.Fatal(err)
	}
	if err := c.Finish(); err != nil {
		t.Fatal(err)
	}

	ports := map[uint16]int{} // stages by the client's port
	for id := range c.own {
		f := &c.own[id]
		stage := lbmap.FlowStage(f.Life)
		if stage == lbmap.FlowFree {
			continue
		}
		port := lbmap.ToAddrPort(f.Request.Src, f.Request.Sport).Port()
		ports[port] = stage
		for way, key := range []lbmap.FlowKey{f.Request, f.Reply} {
			e := c.index.Find(&key)
			if e == nil || e.Id != uint32(id) || e.Packets != []uint64{10, 20}[way] || e.Bytes != []uint64{100, 200}[way] || uint32(e.Word)>>8|lbmap.FlowIndexed != uint32(f.Flags) {
				t.Errorf("port %d, way %d: entry %+v of flow %+v", port, way, e, f)
			}
		}
		if action := map[bool]uint8{true: lbmap.ActionSNAT, false: lbmap.ActionLocal}[port == 1001]; f.Action != action {
			t.Errorf("port %d: action %d, want %d", port, f.Action, action)
		}
		if f.Seen != 1000 || f.Service != 3 || f.Backend != 4 || f.BackendGeneration != 5 {
			t.Errorf("port %d: flow %+v", port, f)
		}
		want := map[uint16]uint32{1001: kept.Flags &^ (remote4 | ingress4), 1002: lbmap.FlowIndexed, 1003: closes.Flags, 1005: lbmap.FlowIndexed}[port]
		if uint32(f.Flags) != want || f.Flags>>32 != f.Life>>32 {
			t.Errorf("port %d: flags %#x, want %#x with the generation", port, f.Flags, want)
		}
	}
	want := map[uint16]int{1001: lbmap.FlowKept, 1002: lbmap.FlowYoung, 1003: lbmap.FlowYoung, 1005: lbmap.FlowYoung}
	for port, stage := range want {
		if ports[port] != stage {
			t.Errorf("port %d: stage %d, want %d", port, ports[port], stage)
		}
	}
	if len(ports) != len(want) || c.to.Used() != len(want) || c.to.Count(lbmap.FlowKeptTCP) != 1 || c.Lost != 0 {
		t.Errorf("flows %v; %d in use, %d kept, %d lost", ports, c.to.Used(), c.to.Count(lbmap.FlowKeptTCP), c.Lost)
	}
	var at []uint32
	(&flowtabletest.Index{List: c.index.list}).Each(func(place uint32, _ *lbmap.FlowEntry) { at = append(at, place) })
	if slices.Sort(at); len(at) != 2*len(want) {
		t.Errorf("entries at %v, want two for each flow", at)
	}
}
