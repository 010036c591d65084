// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"net/netip"
	"slices"
	"sort"
	"strings"
)

// candidate is an endpoint that resolved to an address and port.
type candidate struct {
	addr  netip.AddrPort
	flags endpointFlags
	zones *[]string
	from  *EndpointSlice
}

// backend is the endpoint as a backend of some sets.
func (c *candidate) backend(members Members) Backend {
	return Backend{Addr: c.addr, Members: members, Local: c.is(onNode), Remote: c.is(elsewhere), Terminating: c.is(terminating), Weight: c.from.weight}
}

func (c *candidate) is(f endpointFlags) bool { return c.flags&f == f }

// target is what resolves an endpoint to an address and port.
type target struct {
	name     string
	protocol Protocol
	family   Family
}

// collect appends every endpoint of the target to out, sorted by address and
// then by slice.
func collect(out []candidate, from []*EndpointSlice, to target) []candidate {
	start, sorted := len(out), true
	for _, slice := range from {
		if slice.family != to.family {
			continue
		}
		for _, p := range slice.ports {
			if p.name != to.name || p.protocol != to.protocol {
				continue
			}
			for i := range slice.endpoints {
				e := &slice.endpoints[i]
				c := candidate{addr: netip.AddrPortFrom(e.Addr, p.port), flags: e.flags, zones: e.zones, from: slice}
				if n := len(out); n > start && c.addr.Compare(out[n-1].addr) < 0 {
					sorted = false
				}
				out = append(out, c)
			}
		}
	}
	if !sorted {
		slices.SortStableFunc(out[start:], func(a, b candidate) int { return a.addr.Compare(b.addr) })
	}
	return out
}

// collapse keeps one candidate of each address. An endpoint may stand in two
// slices while it moves between them.
func collapse(list []candidate) []candidate {
	first := 1
	for first < len(list) && list[first].addr != list[first-1].addr {
		first++
	}
	if first >= len(list) {
		return list
	}
	kept := list[:first]
	for _, c := range list[first:] {
		last := &kept[len(kept)-1]
		if last.addr != c.addr {
			kept = append(kept, c)
		} else if c.flags.better(last.flags) {
			*last = c
		}
	}
	return kept
}

// better reports whether a copy of an endpoint counts rather than one in an earlier slice: a pod
// that runs has taken over the address of one that terminates, and a copy that is not ready yet
// may be of an older state.
func (f endpointFlags) better(than endpointFlags) bool {
	switch {
	case f&terminating != than&terminating:
		return f&terminating == 0
	case f&ready != than&ready:
		return f&ready != 0
	}
	return f&serving > than&serving
}

// candidatesOf returns the endpoints of a target, sorted by address, each
// address and port once. The result is good until the next call.
func (t *Table) candidatesOf(from []*EndpointSlice, to target, r *row) []candidate {
	n := 0
	for _, s := range from {
		n += len(s.endpoints)
	}
	if n < mergeFrom {
		r.merged = nil
		t.candidates = collapse(collect(t.candidates[:0], from, to))
		return t.candidates
	}
	if r.merged == nil {
		r.merged = &[Families]merged{}
	}
	m := &r.merged[to.family]
	t.candidates = m.update(from, to, t.candidates[:0])
	if !m.duplicates {
		return m.list
	}
	t.candidates = collapse(append(t.candidates[:0], m.list...))
	return t.candidates
}

// mergeFrom is the number of endpoints from which it pays to keep the sorted
// list instead of sorting anew with every change of one of them.
const mergeFrom = 2048

// mergeSlices is the number of changed slices up to which the list is merged.
const mergeSlices = 16

// merged is the sorted list of a target with many endpoints, duplicates
// included, kept from one change to the next.
type merged struct {
	slices     []*EndpointSlice // that the list was made of, sorted by name
	list       []candidate
	duplicates bool
}

// update updates the list. It swaps its memory with scratch and returns the memory that
// becomes free.
func (m *merged) update(now []*EndpointSlice, to target, scratch []candidate) []candidate {
	gone, fresh := differences(m.slices, now)
	m.slices = now
	if len(gone)+len(fresh) > mergeSlices {
		m.list = collect(m.list[:0], now, to)
		m.duplicates = hasDuplicates(m.list)
		return scratch
	}
	if len(gone)+len(fresh) == 0 {
		return scratch
	}
	removed, added := collect(nil, gone, to), collect(nil, fresh, to)
	out := slices.Grow(scratch[:0], len(m.list)+len(added))
	put := func(run []candidate) { // which has no duplicates of its own
		if len(run) > 0 && len(out) > 0 && out[len(out)-1].addr == run[0].addr {
			m.duplicates = true
		}
		out = append(out, run...)
	}
	had := m.duplicates
	at := 0 // the list up to here is in out, as far as it stays
	for len(removed) > 0 || len(added) > 0 {
		if len(added) == 0 || len(removed) > 0 && !added[0].before(&removed[0]) {
			i := at + lowerBound(m.list[at:], &removed[0])
			put(m.list[at:i])
			at, removed = i+1, removed[1:]
			continue
		}
		i := at + lowerBound(m.list[at:], &added[0])
		put(m.list[at:i])
		put(added[:1])
		at, added = i, added[1:]
	}
	put(m.list[at:])
	old := m.list
	m.list = out
	if had {
		m.duplicates = hasDuplicates(out)
	}
	clear(old) // holds on to slices that are gone
	return old[:0]
}

// lowerBound is where c is in the sorted list, or would be.
func lowerBound(list []candidate, c *candidate) int {
	return sort.Search(len(list), func(i int) bool { return !list[i].before(c) })
}

func (c *candidate) before(o *candidate) bool {
	if d := c.addr.Compare(o.addr); d != 0 {
		return d < 0
	}
	return c.from.Name < o.from.Name
}

func hasDuplicates(list []candidate) bool {
	for i := 1; i < len(list); i++ {
		if list[i].addr == list[i-1].addr {
			return true
		}
	}
	return false
}

// differences of two lists that are sorted by name.
func differences(before, after []*EndpointSlice) (gone, fresh []*EndpointSlice) {
	for len(before) > 0 || len(after) > 0 {
		switch {
		case len(before) > 0 && len(after) > 0 && before[0] == after[0]:
			before, after = before[1:], after[1:]
			continue
		case len(after) == 0 || len(before) > 0 && strings.Compare(before[0].Name, after[0].Name) <= 0:
			gone, before = append(gone, before[0]), before[1:]
		default:
			fresh, after = append(fresh, after[0]), after[1:]
		}
	}
	return gone, fresh
}
