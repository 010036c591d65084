// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// Flows move to maps of any size: what does not fit goes as if it had never fitted.
func TestCarry(t *testing.T) {
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
	for _, tt := range []struct {
		name              string
		tcp, young        uint32
		kept, fresh, lost int
	}{
		{name: "room for all", tcp: 128, young: 128, kept: established, fresh: opening + over},
		{name: "as much", tcp: 64, young: 64, kept: established, fresh: opening + over + 1},
		{name: "fewer are kept", tcp: 8, young: 64, kept: 8, fresh: established - 8 + opening + over + 2},
		{name: "fewer of both", tcp: 8, young: 8, kept: 8, fresh: 8 + over, lost: established - 8 + opening + 3 - 8},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sizes := sizes
			sizes.TCPFlows, sizes.YoungFlows = tt.tcp, tt.young
			to := flowMapsOf(t, sizes)
			c, err := newCarrier(p.maps, to, &sizes)
			if err != nil {
				t.Fatal(err)
			}
			defer c.close()
			if err := c.all(); err != nil {
				t.Fatal(err)
			}
			if c.lost != tt.lost {
				t.Errorf("%d flows did not fit, want %d", c.lost, tt.lost)
			}
			var kept, fresh int
			for id := range c.own {
				f := &c.own[id]
				switch stageOf(f.Life) {
				case flowKept:
					kept++
				case flowYoung:
					fresh++
				default:
					continue
				}
				for _, key := range []flowKey{f.Request, f.Reply} {
					var word uint64
					if err := c.to.keys.Lookup(&key, &word); err != nil || uint32(word) != uint32(id) || word>>32 != f.Life>>32 {
						t.Errorf("flow %d: its key leads to %#x: %v", id, word, err)
					}
				}
			}
			if kept != tt.kept || fresh != tt.fresh {
				t.Errorf("%d are kept and %d others are there, want %d and %d", kept, fresh, tt.kept, tt.fresh)
			}
			if n := int(c.to.count(flowUsed)); n != kept+fresh {
				t.Errorf("%d ids are in use by %d flows", n, kept+fresh)
			}
			if n := int(c.to.count(flowKeptTCP)); n != kept {
				t.Errorf("%d are counted as kept", n)
			}
			if keys := keysIn(t, c.to.keys); keys != 2*(kept+fresh) {
				t.Errorf("%d keys lead to %d flows", keys, kept+fresh)
			}
			lost, err := c.to.lost()
			if err != nil || len(lost) > 0 {
				t.Errorf("ids that are neither free nor in use: %v %v", lost, err)
			}
			if tt.lost > 0 {
				return // they would come again
			}
			// What is there already stays; what begins meanwhile follows.
			carried := c.carried
			p.send(t, in, tcp(client(1000+int(tt.tcp)), e.local, packet.SYN))
			if err := c.fresh(); err != nil {
				t.Fatal(err)
			}
			if c.carried != carried+1 {
				t.Errorf("%d flows came later, want 1", c.carried-carried)
			}
			if err := c.all(); err != nil {
				t.Fatal(err)
			}
			if c.carried != carried+1 {
				t.Errorf("%d flows came twice", c.carried-carried-1)
			}
		})
	}
	if c, err := newCarrier(p.maps, p.maps, &sizes); c != nil || err != nil {
		t.Errorf("flows are to be carried to where they are: %v", err)
	}
}

// flowMapsOf are empty maps of these sizes.
func flowMapsOf(t *testing.T, s Sizes) map[string]*ciliumebpf.Map {
	t.Helper()
	spec, err := packetSpec()
	if err != nil {
		t.Fatal(err)
	}
	maps := map[string]*ciliumebpf.Map{}
	t.Cleanup(func() { closeMaps(maps) })
	for _, name := range flowMapNames {
		if n, ok := s.flowMaps()[name]; ok {
			spec.Maps[name].MaxEntries = n
		}
		if maps[name], err = ciliumebpf.NewMap(spec.Maps[name]); err != nil {
			t.Fatal(err)
		}
	}
	return maps
}

// send has a program run on the node.
func (p *path) send(t *testing.T, h datapath.Hook, q packet.Packet) {
	t.Helper()
	if _, err := p.ask(h, q); err != nil {
		t.Fatal(err)
	}
}

func keysIn(t *testing.T, m *ciliumebpf.Map) (n int) {
	t.Helper()
	var key flowKey
	var word uint64
	entries := m.Iterate()
	for entries.Next(&key, &word) {
		n++
	}
	if err := entries.Err(); err != nil {
		t.Fatal(err)
	}
	return n
}

// What flows see in the maps they came from, after they were copied, is known of their
// copies in the end.
func TestCarrySettles(t *testing.T) {
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
		// again is what the copy has seen by then.
		again uint32
		stage int // flowFree: there is none
		flags uint32
		kept  int
	}{
		{
			name: "nothing happens", before: open, after: func() {},
			stage: flowKept, flags: flowReplied | flowEstablished, kept: 1,
		},
		{
			name: "a reset", before: open, after: func() { request(RST) },
			stage: flowYoung, flags: flowReplied | flowEstablished | flowClosed,
		},
		{
			name: "one FIN", before: open, after: func() { request(FIN | ACK) },
			stage: flowKept, flags: flowReplied | flowEstablished | flowFinRequest, kept: 1,
		},
		{
			name: "one FIN here and one there", before: open, after: func() { request(FIN | ACK) }, again: flowFinReply,
			stage: flowYoung, flags: flowReplied | flowEstablished | flowFinRequest | flowFinReply | flowClosed,
		},
		{
			name: "it is answered", before: func() { request(SYN) }, after: func() { reply(SYN | ACK) },
			stage: flowYoung, flags: flowReplied,
		},
		{
			name: "it is established", before: func() { request(SYN) }, after: func() { reply(SYN | ACK); request(ACK) },
			stage: flowKept, flags: flowReplied | flowEstablished, kept: 1,
		},
		{
			name: "it is forgotten", before: func() { request(SYN) },
			after: func() {
				if err := p.expire(2 * time.Minute); err != nil {
					t.Fatal(err)
				}
			},
			stage: flowFree,
		},
		{
			name: "it begins anew", before: open, after: func() { request(RST); request(SYN) },
			stage: flowYoung,
		},
		{
			name: "it begins anew, and is established", before: open, after: func() { request(RST); open() },
			stage: flowKept, flags: flowReplied | flowEstablished, kept: 1,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := p.reset(); err != nil {
				t.Fatal(err)
			}
			tt.before()
			c, err := newCarrier(p.maps, flowMapsOf(t, sizes), &sizes)
			if err != nil {
				t.Fatal(err)
			}
			defer c.close()
			if err := c.all(); err != nil {
				t.Fatal(err)
			}
			for id := range c.own {
				if stageOf(c.own[id].Life) >= flowYoung {
					c.own[id].Flags |= tt.again
				}
			}
			tt.after()
			for range 2 {
				if err := errors.Join(c.fresh(), c.settle()); err != nil {
					t.Fatal(err)
				}
			}
			var there []flowEntry
			for id := range c.own {
				if stageOf(c.own[id].Life) != flowFree {
					there = append(there, c.own[id])
				}
			}
			used, kept := int(c.to.count(flowUsed)), int(c.to.count(flowKeptTCP))
			if tt.stage == flowFree {
				if len(there)+used+kept+keysIn(t, c.to.keys) > 0 {
					t.Errorf("there are %+v, %d in use, %d kept", there, used, kept)
				}
				return
			}
			if len(there) != 1 || used != 1 || keysIn(t, c.to.keys) != 2 {
				t.Fatalf("there are %+v, %d in use", there, used)
			}
			f := there[0]
			if stageOf(f.Life) != tt.stage || f.Flags != tt.flags|flowIndexed || kept != tt.kept {
				t.Errorf("it is in stage %d, with flags %#x, and %d are kept; want %d, %#x, %d", stageOf(f.Life), f.Flags, kept, tt.stage, tt.flags|flowIndexed, tt.kept)
			}
		})
	}
}

// All programs are loaded before the first flow is copied: while flows are in two places,
// packets may meet the wrong one.
func TestCarriesWithLoadedPrograms(t *testing.T) {
	e := newEdge(t, Options{Sizes: drainSizes, PodDevices: []string{"pod+"}})
	e.use(t, serve(t, e.here), serve(t, e.there))
	if err := e.tier.syncPodDevices(t.Context()); err != nil {
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
	p := tier.packets
	// The uplink is wanted still, the device of the pod is not.
	want := map[int]variant{uplinksOf(t, e.at)[0].Index: {}}
	if err := tier.netns.Do(func() error { return p.takeOver(t.Context(), want) }); err != nil {
		t.Fatal(err)
	}
	defer p.endCarrying()
	if len(p.carriers) != 1 || p.carriers[0].carried == 0 {
		t.Fatalf("nothing was copied for %v", v.entry)
	}
	for _, v := range []variant{{role: roleUplink}, {role: rolePod}} {
		if p.loaded[v] == nil {
			t.Errorf("programs of %+v are to be loaded yet", v)
		}
	}
}
