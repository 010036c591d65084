// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"testing"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// perEntry is a cost of one byte for each entry of any table.
func perEntry(s lbmap.Sizes) (sum uint64) {
	for _, size := range s.All() {
		sum += uint64(*size.At)
	}
	return sum
}

func TestStart(t *testing.T) {
	most := lbmap.DefaultSizes()
	plenty := Start(most, 1<<40, 2, perEntry)
	little := Start(most, 1, 2, perEntry)
	for i, size := range plenty.All() {
		if small := *little.All()[i].At; small > *size.At || *size.At > *most.All()[i].At {
			t.Errorf("%s: %d with little memory, %d with plenty, %d at most", size.Name, small, *size.At, *most.All()[i].At)
		}
	}
	if level, ok := Level(little, most); !ok || little.TCPFlows != leastFlows {
		t.Errorf("flows of a small node: level %d, %v, %d of TCP; want %d", level, ok, little.TCPFlows, leastFlows)
	}
	if many := Start(most, 1, 64, perEntry); many.Affinity < 64*entriesPerCPU || many.UDPPeers < 64*entriesPerCPU {
		t.Errorf("LRU maps of 64 CPUs have %d and %d entries", many.Affinity, many.UDPPeers)
	}
	tiny := lbmap.Sizes{Frontends: 16, Services: 16, Backends: 16, Slots: 16, Affinity: 16, UDPPeers: 16, TCPFlows: 16, UDPFlows: 8, YoungFlows: 8}
	if got := Start(tiny, 1<<40, 2, perEntry); got.Services != 16 || got.TCPFlows != 16 {
		t.Errorf("sizes below those that maps start with: %+v", got)
	}
}

func TestNext(t *testing.T) {
	most := lbmap.DefaultSizes()
	l := Limits{Start: Start(most, 1<<40, 2, perEntry), Most: most}
	start := l.Start
	for _, tc := range []struct {
		name  string
		holds lbmap.Sizes
		want  func(*lbmap.Sizes)
	}{
		{"nothing", lbmap.Sizes{}, func(*lbmap.Sizes) {}},
		{"four fifths", lbmap.Sizes{Services: start.Services / 5 * 4}, func(*lbmap.Sizes) {}},
		{"more than that", lbmap.Sizes{Services: start.Services/5*4 + 5}, func(s *lbmap.Sizes) { s.Services = 2 * start.Services }},
		{"more than fits", lbmap.Sizes{Frontends: 10 * start.Frontends}, func(s *lbmap.Sizes) { s.Frontends = 32 * start.Frontends }},
		{"more than there may be", lbmap.Sizes{Slots: 1 << 31}, func(s *lbmap.Sizes) { s.Slots = most.Slots }},
		{"a quarter of the flows", lbmap.Sizes{TCPFlows: start.TCPFlows / 4}, func(*lbmap.Sizes) {}},
		{"more flows", lbmap.Sizes{TCPFlows: start.TCPFlows/4 + 1}, func(s *lbmap.Sizes) { *s = Flows(*s, most, startLevel-2) }},
		{"young flows", lbmap.Sizes{YoungFlows: start.YoungFlows}, func(s *lbmap.Sizes) { *s = Flows(*s, most, startLevel-2) }},
		{"all flows", lbmap.Sizes{UDPFlows: most.UDPFlows}, func(s *lbmap.Sizes) { *s = Flows(*s, most, 0) }},
	} {
		want := start
		tc.want(&want)
		if got := l.Next(start, tc.holds, perEntry); got != want {
			t.Errorf("%s: %+v, want %+v", tc.name, got, want)
		}
	}
}

// TestNextWithinMemory grows tables as far as there is memory, and no further.
func TestNextWithinMemory(t *testing.T) {
	most := lbmap.DefaultSizes()
	start := Start(most, 1<<40, 2, perEntry)
	everything := most
	for extra := uint64(0); extra < perEntry(most); extra += 1000 {
		l := Limits{Start: start, Most: most, Memory: perEntry(start) + extra}
		next := l.Next(start, everything, perEntry)
		if perEntry(next) > l.Memory {
			t.Fatalf("%d entries, with room for %d", perEntry(next), l.Memory)
		}
		if extra >= uint64(start.Services) && next == start {
			t.Fatalf("nothing grew with room for %d more", extra)
		}
	}
	l := Limits{Start: start, Most: most, Memory: 1}
	if next := l.Next(start, everything, perEntry); next != start {
		t.Errorf("without any room: %+v", next)
	}
}

func TestAdopt(t *testing.T) {
	most := lbmap.DefaultSizes()
	l := Limits{Start: Start(most, 1<<40, 2, perEntry), Most: most}
	grown := l.Next(l.Start, most, perEntry)
	level, _ := Level(grown, most)
	if got := l.Adopt(grown, level); got != grown {
		t.Errorf("grown maps: %+v, want %+v", got, grown)
	}
	large := grown
	large.Services = 2 * most.Services
	if got := l.Adopt(large, level); got.Services != l.Start.Services {
		t.Errorf("maps larger than they may be: %d services", got.Services)
	}
	fixed := Fixed(most)
	if got := fixed.Adopt(l.Start, 3); got != most {
		t.Errorf("maps that do not grow: %+v", got)
	}
	if got := l.LevelFor(0); got != startLevel {
		t.Errorf("level for no flows: %d", got)
	}
	if got := l.LevelFor(int(most.TCPFlows)); got != 0 {
		t.Errorf("level for all flows: %d", got)
	}
}
