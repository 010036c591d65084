// SPDX-License-Identifier: Apache-2.0

package netfilter

import "net/netip"

// Branch is one possible result for a packet.
type Branch struct {
	Result
	Probability float64
}

// Branches returns all possible results for a packet, with their probabilities: at random
// matches, both branches are followed. The lists of -m recent are read, but not
// written.
//
// The kernel has 31 bits for a probability, so 1/3 is accurate to nine digits.
func (t *Tables) Branches(p Packet) []Branch {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []Branch
	var path []turn
	for {
		at, probability := 0, 1.0
		result := t.trace(&p, func(p float64) bool {
			if at == len(path) {
				path = append(path, turn{taken: true, probability: p})
			}
			turn := path[at]
			at++
			probability *= turn.probability
			return turn.taken
		}, true)
		all = append(all, Branch{result, probability})
		for len(path) > 0 && !path[len(path)-1].taken {
			path = path[:len(path)-1]
		}
		if len(path) == 0 {
			return all
		}
		last := &path[len(path)-1]
		last.taken, last.probability = false, 1-last.probability
	}
}

// turn is the decision of a random match.
type turn struct {
	taken       bool    // the rule matched
	probability float64 // of this branch
}

// Targets returns the possible destinations of a packet, with their probabilities. The sum is
// one unless the packet can be dropped or rejected.
func (t *Tables) Targets(p Packet) map[netip.AddrPort]float64 {
	targets := map[netip.AddrPort]float64{}
	for _, b := range t.Branches(p) {
		if b.Verdict == Accept {
			targets[b.To] += b.Probability
		}
	}
	return targets
}
