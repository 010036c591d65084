// SPDX-License-Identifier: Apache-2.0

package placement

import "github.com/tandem-proxy/tandem/proxier"

// Candidate is an entry of the ordered list of those that may serve a frontend:
// usually a tier, the fastest first. Another proxy on this node is an entry like any
// other.
type Candidate struct {
	// Refuses says why it does not serve a frontend; nil if it does. Nil refuses
	// nothing.
	Refuses func(*proxier.Decision, *proxier.Frontend) error
	// Also says that it serves a frontend beside the candidate that was chosen:
	// for clients that one does not see. Nil says so of none.
	Also func(*proxier.Decision, *proxier.Frontend) bool
}

func (c *Candidate) refuses(d *proxier.Decision, f *proxier.Frontend) error {
	if c.Refuses == nil {
		return nil
	}
	return c.Refuses(d, f)
}

// Choose returns the first candidate that does not refuse a frontend, and why those
// before it do. It returns len(list) if all refuse.
func Choose(list []Candidate, d *proxier.Decision, f *proxier.Frontend) (chosen int, reasons []error) {
	for i := range list {
		why := list[i].refuses(d, f)
		if why == nil {
			return i, reasons
		}
		reasons = append(reasons, why)
	}
	return len(list), reasons
}

// Assign gives each frontend of a decision to the first candidate that does not
// refuse it, and to those that serve it also. It stores the part of each candidate:
// the decision itself where that is all of it, nil for none.
func Assign(list []Candidate, d *proxier.Decision, parts []*proxier.Decision) {
	var space [8]uint8
	chosen := space[:0]
	same := true // usually one candidate has it all
	for i := range d.Frontends {
		by, f := 0, &d.Frontends[i]
		for by < len(list) && list[by].refuses(d, f) != nil {
			by++
		}
		chosen = append(chosen, uint8(by))
		same = same && by == int(chosen[0])
	}
	for c := range list {
		also := list[c].Also
		if same && also == nil {
			parts[c] = nil
			if len(chosen) > 0 && int(chosen[0]) == c {
				parts[c] = d
			}
			continue
		}
		i := -1
		parts[c] = d.Only(func(f *proxier.Frontend) bool {
			i++ // Only asks of each, in order
			return int(chosen[i]) == c || also != nil && also(d, f)
		})
	}
}
