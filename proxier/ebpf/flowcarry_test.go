// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"testing"

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
