// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	ebpfdatapath "github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable/flowtabletest"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// TestMigration: flows move to maps of any size. Established ones stay so, also beyond the limit; young
// ones evict each other, as if the maps had always had the new size.
func TestMigration(t *testing.T) {
	const established, opening, over = 20, 12, 3
	sizes := pathSizes
	sizes.TCPFlows, sizes.YoungFlows = 64, 64
	p := newPath(t, Options{Sizes: sizes})
	p.endsCluster(t)
	e := endsOf(proxier.IPv4)
	client := func(i int) netip.AddrPort { return netip.AddrPortFrom(e.client.Addr(), uint16(2000+i)) }
	for i := range established + opening + over {
		request := datapath.Tuple{Src: client(i), Dst: e.local}
		switch {
		case i < established:
			p.establish(t, request)
		case i < established+opening:
			p.send(t, in, tcp(request.Src, request.Dst, packet.SYN))
		default:
			p.establish(t, request)
			p.send(t, in, tcp(request.Src, request.Dst, packet.RST))
		}
	}
	created := map[lbmap.FlowKey][3]uint8{}
	for id := range p.flows {
		if f := &p.flows[id]; lbmap.FlowStage(f.Life) >= lbmap.FlowYoung {
			f.Created = [3]uint8{uint8(id), 1, 2}
			created[f.Request] = f.Created
		}
	}
	for _, tt := range []struct {
		name              string
		tcp, young        uint32
		kept, fresh, lost int
	}{
		{name: "room for all", tcp: 128, young: 128, kept: established, fresh: opening + over},
		{name: "as much", tcp: 64, young: 64, kept: established, fresh: opening + over + 1},
		{name: "fewer may be established", tcp: 8, young: 64, kept: established, fresh: opening + over + 2},
		{name: "fewer of both", tcp: 8, young: 8, kept: established, fresh: 8 + over, lost: opening + 3 - 8},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sizes := sizes
			sizes.TCPFlows, sizes.YoungFlows = tt.tcp, tt.young
			to := flowMapsOf(t, sizes)
			c, err := flowtable.NewCopier(p.maps, to)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			table, own := openFlows(t, to)
			if err := c.CopyAll(); err != nil {
				t.Fatal(err)
			}
			if c.Lost != tt.lost {
				t.Errorf("%d flows were lost, want %d", c.Lost, tt.lost)
			}
			var kept, fresh int
			for id := range own {
				switch f := &own[id]; lbmap.FlowStage(f.Life) {
				case lbmap.FlowKept:
					kept++
				case lbmap.FlowYoung:
					fresh++
				default:
					continue
				}
				if want, ok := created[own[id].Request]; ok && own[id].Created != want {
					t.Errorf("a copy has begun at %v, its flow at %v", own[id].Created, want)
				}
			}
			if err := checkEntries(indexOf(t, to), flowtabletest.OpenIndex(t, to), own); err != nil {
				t.Error(err)
			}
			if kept != tt.kept || fresh != tt.fresh {
				t.Errorf("%d flows are kept and %d young, want %d and %d", kept, fresh, tt.kept, tt.fresh)
			}
			if n := table.Used(); n != kept+fresh {
				t.Errorf("%d ids are in use, want %d, the number of flows", n, kept+fresh)
			}
			if n := int(table.Count(lbmap.FlowKeptTCP)); n != kept {
				t.Errorf("%d flows are counted as kept", n)
			}
			lost, err := table.Unfinished()
			if err != nil || len(lost.Flows)+len(lost.Entries) > 0 {
				t.Errorf("ids that are neither free nor in use: %v %v", lost, err)
			}
			if tt.lost > 0 {
				return // lost flows would be copied again
			}
			// Another copy leaves existing flows alone, and adds flows that were created since.
			carried := c.Copied
			p.send(t, in, tcp(client(1000+int(tt.tcp)), e.local, packet.SYN))
			if err := c.CopyNew(); err != nil {
				t.Fatal(err)
			}
			if c.Copied != carried+1 {
				t.Errorf("%d new flows were copied, want 1", c.Copied-carried)
			}
			if err := c.CopyAll(); err != nil {
				t.Fatal(err)
			}
			if c.Copied != carried+1 {
				t.Errorf("%d flows were copied twice", c.Copied-carried-1)
			}
		})
	}
	if c, err := flowtable.NewCopier(p.maps, p.maps); c != nil || err != nil {
		t.Errorf("a copier between the same maps was made: %v", err)
	}
}

// flowMapsOf creates empty maps of these sizes.
func flowMapsOf(t *testing.T, s lbmap.Sizes) lbmap.Maps {
	t.Helper()
	spec, err := lbmap.PacketSpec()
	if err != nil {
		t.Fatal(err)
	}
	maps := lbmap.Maps{}
	t.Cleanup(func() { maps.Close() })
	for _, name := range flowtable.MapNames {
		if n, ok := flowtable.MapSizes(s)[name]; ok {
			spec.Maps[name].MaxEntries = n
		}
		if maps[name], err = ciliumebpf.NewMap(spec.Maps[name]); err != nil {
			t.Fatal(err)
		}
	}
	return maps
}

// send runs a program on a packet, in the namespace of the node.
func (p *path) send(t *testing.T, h datapath.Hook, q packet.Packet) {
	t.Helper()
	if _, err := p.ask(h, q); err != nil {
		t.Fatal(err)
	}
}

// openFlows opens a flow table, and maps its records into memory.
func openFlows(t *testing.T, maps lbmap.Maps) (*flowtable.Table, []lbmap.Flow) {
	t.Helper()
	table, err := flowtable.Open(maps)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(table.Close)
	list, memory, err := lbmap.Memory[lbmap.Flow](maps["tdm_flow"])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(memory) })
	return table, list
}

// indexOf maps the entries of a flow table into memory.
func indexOf(t *testing.T, maps lbmap.Maps) *flowtable.Index {
	t.Helper()
	index, err := flowtable.OpenIndex(maps)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(index.Close)
	return index
}

func entriesIn(t *testing.T, maps lbmap.Maps) (n int) {
	flowtabletest.OpenIndex(t, maps).Each(func(uint32, *lbmap.FlowEntry) { n++ })
	return n
}

// TestMigrationFinishes: state that programs still write to the old maps after the copy is
// merged into the new records at the end.
func TestMigrationFinishes(t *testing.T) {
	const SYN, ACK, FIN, RST = packet.SYN, packet.ACK, packet.FIN, packet.RST
	sizes := pathSizes
	sizes.TCPFlows, sizes.YoungFlows = 64, 64
	p := newPath(t, Options{Sizes: sizes})
	p.endsCluster(t)
	e := endsOf(proxier.IPv4)
	client := netip.AddrPortFrom(e.client.Addr(), 2000)
	request := func(flags packet.Flags) { p.send(t, in, tcp(client, e.local, flags)) }
	reply := func(flags packet.Flags) { p.send(t, out, tcp(e.here, client, flags)) }
	open := func() { request(SYN); reply(SYN | ACK); request(ACK) }
	for _, tt := range []struct {
		name          string
		before, after func()
		// again are flags that the copy has got by then.
		again uint32
		stage int // flowFree: the flow is gone
		flags uint32
		kept  int
	}{
		{
			name: "nothing happens", before: open, after: func() {},
			stage: lbmap.FlowKept, flags: lbmap.FlowReplied | lbmap.FlowEstablished, kept: 1,
		},
		{
			name: "a reset", before: open, after: func() { request(RST) },
			stage: lbmap.FlowYoung, flags: lbmap.FlowReplied | lbmap.FlowEstablished | lbmap.FlowClosed | lbmap.FlowResetRequest,
		},
		{
			name: "one FIN", before: open, after: func() { request(FIN | ACK) },
			stage: lbmap.FlowKept, flags: lbmap.FlowReplied | lbmap.FlowEstablished | lbmap.FlowFINRequest, kept: 1,
		},
		{
			name: "one FIN here and one there", before: open, after: func() { request(FIN | ACK) }, again: lbmap.FlowFINReply,
			stage: lbmap.FlowYoung, flags: lbmap.FlowReplied | lbmap.FlowEstablished | lbmap.FlowFINRequest | lbmap.FlowFINReply | lbmap.FlowClosed,
		},
		{
			name: "it is answered", before: func() { request(SYN) }, after: func() { reply(SYN | ACK) },
			stage: lbmap.FlowYoung, flags: lbmap.FlowReplied,
		},
		{
			name: "it is established", before: func() { request(SYN) }, after: func() { reply(SYN | ACK); request(ACK) },
			stage: lbmap.FlowKept, flags: lbmap.FlowReplied | lbmap.FlowEstablished, kept: 1,
		},
		{
			name: "it is forgotten", before: func() { request(SYN) },
			after: func() {
				if err := p.expire(2 * time.Minute); err != nil {
					t.Fatal(err)
				}
			},
			stage: lbmap.FlowFree,
		},
		{
			name: "it begins anew", before: open, after: func() { request(RST); request(SYN) },
			stage: lbmap.FlowYoung,
		},
		{
			name: "it begins anew, and is established", before: open, after: func() { request(RST); open() },
			stage: lbmap.FlowKept, flags: lbmap.FlowReplied | lbmap.FlowEstablished, kept: 1,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := p.reset(); err != nil {
				t.Fatal(err)
			}
			tt.before()
			to := flowMapsOf(t, sizes)
			c, err := flowtable.NewCopier(p.maps, to)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			table, own := openFlows(t, to)
			if err := c.CopyAll(); err != nil {
				t.Fatal(err)
			}
			for id := range own {
				if lbmap.FlowStage(own[id].Life) >= lbmap.FlowYoung {
					own[id].Flags |= uint64(tt.again)
				}
			}
			tt.after()
			for range 2 {
				if err := errors.Join(c.CopyNew(), c.Finish()); err != nil {
					t.Fatal(err)
				}
			}
			var there []lbmap.Flow
			for id := range own {
				if lbmap.FlowStage(own[id].Life) != lbmap.FlowFree {
					there = append(there, own[id])
				}
			}
			used, kept := table.Used(), int(table.Count(lbmap.FlowKeptTCP))
			if tt.stage == lbmap.FlowFree {
				if len(there)+used+kept+entriesIn(t, to) > 0 {
					t.Errorf("flows %+v, %d in use, %d kept; want none", there, used, kept)
				}
				return
			}
			if len(there) != 1 || used != 1 || entriesIn(t, to) != 2 {
				t.Fatalf("flows %+v, %d in use; want one", there, used)
			}
			f := there[0]
			if lbmap.FlowStage(f.Life) != tt.stage || uint32(f.Flags) != tt.flags|lbmap.FlowIndexed || kept != tt.kept {
				t.Errorf("stage %d, flags %#x, %d kept; want %d, %#x, %d", lbmap.FlowStage(f.Life), f.Flags, kept, tt.stage, tt.flags|lbmap.FlowIndexed, tt.kept)
			}
		})
	}
}

// TestMigratesWithLoadedPrograms: all programs are loaded before the first flow is copied. While
// flows are in two sets of maps, programs may see the outdated copy, so that time must be short.
func TestMigratesWithLoadedPrograms(t *testing.T) {
	e := newEdge(t, Options{Sizes: drainSizes, PodDevices: []string{"pod+"}})
	e.use(t, serve(t, e.here), serve(t, e.there))
	if err := e.tier.syncOptOuts(t.Context()); err != nil {
		t.Fatal(err)
	}
	v := e.visit(t, e.entries("tcp")[0])
	sizes := drainSizes
	sizes.TCPFlows *= 2
	e.close()
	tier, err := openOn(t, e.at, Options{Sizes: sizes})
	if err != nil {
		t.Fatal(err)
	}
	e.tier = tier
	opts := deviceOptionsOf(t, tier)
	watched := &watchedMigration{Migration: flowtable.NewMigration(tier.maps, ebpfdatapath.WaitForPrograms, nil), to: tier.maps}
	opts.Flows = watched
	p := ebpfdatapath.NewDevices(tier.maps, opts)
	defer p.Close()
	watched.copying = func() {
		for _, v := range []ebpfdatapath.Variant{{Role: lbmap.RoleUplink}, {Role: lbmap.RolePod}} {
			if p.Loaded[v] == nil {
				t.Errorf("programs of %+v are not loaded yet", v)
			}
		}
	}
	// The uplink is still configured, the pod's device is not.
	if err := tier.netns.Do(func() error { return p.Serve(t.Context(), uplinksOf(t, e.at)[:1], nil) }); err != nil {
		t.Fatal(err)
	}
	if watched.copied == 0 {
		t.Fatalf("no flow was copied; there is one of %v", v.entry)
	}
}

// watchedMigration calls a function before it copies.
type watchedMigration struct {
	*flowtable.Migration
	to      lbmap.Maps
	copying func()
	copied  int // flows in the maps after it
}

func (w *watchedMigration) CopyAll() error {
	w.copying()
	err := w.Migration.CopyAll()
	var countErr error
	w.copied, countErr = flowtable.UsedIn(w.to)
	return errors.Join(err, countErr)
}
