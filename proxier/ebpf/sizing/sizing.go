// SPDX-License-Identifier: Apache-2.0

// Package sizing decides how large the maps of the programs are: they start small, and grow before they are full.
package sizing

import (
	"fmt"
	"math/bits"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Limits are what maps start with, and what they may become.
type Limits struct {
	Start, Most lbmap.Sizes
	// Memory is how many bytes all maps together may take; 0 for any number. While maps grow, those that they replace exist
	// too.
	Memory uint64
}

// Fixed are maps that have one size.
func Fixed(sizes lbmap.Sizes) Limits { return Limits{Start: sizes, Most: sizes} }

// Cost is the memory that maps of these sizes take, in bytes.
type Cost func(lbmap.Sizes) uint64

// What a table starts with, unless it may not become so large. The first entry of a pair is for nodes with little memory.
var starts = []struct {
	of          func(*lbmap.Sizes) *uint32
	least, most uint32
}{
	{func(s *lbmap.Sizes) *uint32 { return &s.Services }, 128, 2048},
	{func(s *lbmap.Sizes) *uint32 { return &s.Frontends }, 256, 4096},
	{func(s *lbmap.Sizes) *uint32 { return &s.Backends }, 512, 8192},
	{func(s *lbmap.Sizes) *uint32 { return &s.Slots }, 1024, 16384},
	{func(s *lbmap.Sizes) *uint32 { return &s.UDPPeers }, 512, 4096},
	{func(s *lbmap.Sizes) *uint32 { return &s.Affinity }, 512, 4096},
}

const (
	// entriesPerCPU is the least number of entries of an LRU map for each CPU: the kernel sets 128 aside for a CPU at a time.
	entriesPerCPU = 256
	// startLevel is the level of flows to start with, and leastFlows the number of established TCP connections below which
	// there is no level.
	startLevel, leastFlows = 3, 256
)

// Flows returns sizes whose flows are those of most, halved so many times. Flows grow together, as they share maps.
func Flows(s, most lbmap.Sizes, level int) lbmap.Sizes {
	s.TCPFlows, s.UDPFlows, s.YoungFlows = max(2, most.TCPFlows>>level), max(2, most.UDPFlows>>level), max(2, most.YoungFlows>>level)
	return s
}

// Levels is the number of levels of flows, beginning with most.
func Levels(most lbmap.Sizes) int {
	return max(1, bits.Len32(most.TCPFlows/leastFlows))
}

// Level is the level of flows in these sizes; ok is false if there is none.
func Level(s, most lbmap.Sizes) (level int, ok bool) {
	for level := range Levels(most) {
		if Flows(s, most, level) == s {
			return level, true
		}
	}
	return 0, false
}

// Start returns what maps start with that shall take so much memory, as far as that is possible, on a machine with so many
// CPUs.
func Start(most lbmap.Sizes, memory uint64, cpus int, cost Cost) lbmap.Sizes {
	s := Flows(most, most, min(startLevel, Levels(most)-1))
	for _, t := range starts {
		*t.of(&s) = min(t.most, *t.of(&most))
	}
	atLeastLRU := func() {
		for _, lru := range []struct{ at, most *uint32 }{{&s.Affinity, &most.Affinity}, {&s.UDPPeers, &most.UDPPeers}} {
			for *lru.at < *lru.most && *lru.at < uint32(cpus*entriesPerCPU) {
				*lru.at = min(2**lru.at, *lru.most)
			}
		}
	}
	atLeastLRU()
	for before := (lbmap.Sizes{}); s != before && cost(s) > memory; {
		before = s
		for _, t := range starts {
			if half := *t.of(&s) / 2; half >= t.least {
				*t.of(&s) = half
			}
		}
		if level, _ := Level(s, most); level+1 < Levels(most) {
			s = Flows(s, most, level+1)
		}
		atLeastLRU()
	}
	return s
}

// Next returns the sizes that maps should have that hold so much, or are to hold it; those they have if they are large enough,
// or if there is no memory for more. A table grows when four fifths of it are in use, and then at least half of it is free.
// Flows grow when a quarter of the established ones are there, or half as many as may be young begin within a second, to four times
// their number: connections can come faster than larger maps are made. Of young flows, holds has those that begin in a second.
func (l *Limits) Next(now, holds lbmap.Sizes, cost Cost) lbmap.Sizes {
	fits := func(s lbmap.Sizes) bool { return l.Memory == 0 || cost(s) <= l.Memory }
	next := now
	for _, t := range starts {
		most := *t.of(&l.Most)
		size, holds := *t.of(&now), *t.of(&holds)
		if size >= most || uint64(holds)*5 <= uint64(size)*4 {
			continue
		}
		target := size
		for target < most && holds > target/2 {
			target = min(2*target, most)
		}
		for ; target > size; target = max(size, target/2) {
			larger := next
			*t.of(&larger) = target
			if fits(larger) {
				next = larger
				break
			}
		}
	}
	level, ok := Level(now, l.Most)
	busy := func(s lbmap.Sizes) bool {
		return holds.TCPFlows > s.TCPFlows/4 || holds.UDPFlows > s.UDPFlows/4 || holds.YoungFlows > s.YoungFlows/2
	}
	if !ok || level == 0 || !busy(now) {
		return next
	}
	target := max(0, level-2)
	for target > 0 && busy(Flows(next, l.Most, target)) {
		target--
	}
	for ; target < level; target++ {
		if larger := Flows(next, l.Most, target); fits(larger) {
			return larger
		}
	}
	return next
}

// Adopt returns the sizes of maps that an earlier process left and that can be kept, and for the others those to start with. Of
// flows, level is that of the earlier maps, or else one that has room for them.
func (l *Limits) Adopt(have lbmap.Sizes, level int) lbmap.Sizes {
	s := l.Start
	if l.Start == l.Most { // maps that do not grow
		return s
	}
	for _, t := range starts {
		if size := *t.of(&have); size > 0 && size <= *t.of(&l.Most) {
			*t.of(&s) = size
		}
	}
	return Flows(s, l.Most, level)
}

// LevelFor is a level with room for so many flows, of those from which flows may start.
func (l *Limits) LevelFor(flows int) int {
	level, ok := Level(l.Start, l.Most)
	for ok && level > 0 && uint64(flows)*4 > uint64(l.Most.TCPFlows>>level) {
		level--
	}
	return level
}

// Changes lists the sizes that differ, for people.
func Changes(before, after lbmap.Sizes) (list []string) {
	now := after.All()
	for i, was := range before.All() {
		if *was.At != *now[i].At {
			list = append(list, fmt.Sprintf("%s %d -> %d", was.Name, *was.At, *now[i].At))
		}
	}
	return list
}
