// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// rangesOf returns the source ranges of a service port, sorted: those of all its filtered frontends,
// except for each frontend's own address, which is a flag of the frontend.
func rangesOf(d *proxier.Decision, service uint32) []lbmap.RangeKey {
	var list []lbmap.RangeKey
	for i := range d.Frontends {
		f := &d.Frontends[i]
		if !served(f) || !f.Filtered {
			continue
		}
		for _, p := range f.Ranges {
			if p == lbmap.OwnPrefix(f) {
				continue
			}
			for _, part := range lbmap.SplitRange(p) {
				list = append(list, lbmap.NewRangeKey(service, part))
			}
		}
	}
	slices.SortFunc(list, compareRanges)
	return slices.Compact(list)
}

func compareRanges(a, b lbmap.RangeKey) int {
	return cmp.Or(cmp.Compare(a.Service, b.Service), slices.Compare(a.Addr[:], b.Addr[:]), cmp.Compare(a.PrefixLen, b.PrefixLen))
}

func hasRange(list []lbmap.RangeKey, key lbmap.RangeKey) bool {
	_, found := slices.BinarySearchFunc(list, key, compareRanges)
	return found
}

// freshRanges counts what is in want and not in have.
func (w *Writer) freshRanges(have, want []lbmap.RangeKey) (n int) {
	for _, key := range want {
		if !hasRange(have, key) {
			n++
		}
	}
	return n
}

// addRanges writes what is new in want. p has both until removeRanges.
func (w *Writer) addRanges(p *port, want []lbmap.RangeKey) error {
	var fresh []lbmap.RangeKey
	for _, key := range want {
		if !hasRange(p.ranges, key) {
			fresh = append(fresh, key)
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	values := make([]uint8, len(fresh))
	for i := range values {
		values[i] = 1
	}
	n, err := w.tables.Ranges.PutAll(fresh, values)
	w.usedRanges += n
	w.writes += uint64(n)
	if n > 0 {
		p.ranges = slices.SortedFunc(slices.Values(slices.Concat(p.ranges, fresh[:n])), compareRanges)
	}
	if err != nil {
		return fmt.Errorf("write source range %s: %w", fresh[n].String(), err)
	}
	return nil
}

// removeRanges deletes what p has and is not in want.
func (w *Writer) removeRanges(p *port, want []lbmap.RangeKey) error {
	if len(p.ranges) == len(want) { // it has all of want
		return nil
	}
	lost := slices.DeleteFunc(slices.Clone(p.ranges), func(key lbmap.RangeKey) bool { return hasRange(want, key) })
	n, err := w.deleteRanges(lost)
	p.ranges = slices.DeleteFunc(slices.Clone(p.ranges), func(key lbmap.RangeKey) bool { return hasRange(lost[:n], key) })
	return err
}

// deleteRanges deletes all or, with an error, the first n.
func (w *Writer) deleteRanges(list []lbmap.RangeKey) (n int, err error) {
	if len(list) == 0 {
		return 0, nil
	}
	n, err = w.tables.Ranges.DeleteAll(list)
	w.usedRanges -= n
	w.writes += uint64(n)
	w.room = w.room || n > 0
	if err != nil {
		err = fmt.Errorf("delete source range %s: %w", list[n].String(), err)
	}
	return n, err
}

// removeRangesOf deletes the ranges of many ports at once, as far as that goes: remove tries again for each.
func (w *Writer) removeRangesOf(ports []port) {
	var all []lbmap.RangeKey
	for i := range ports {
		all = append(all, ports[i].ranges...)
	}
	n, _ := w.deleteRanges(all)
	for i := range ports {
		gone := min(n, len(ports[i].ranges))
		ports[i].ranges = ports[i].ranges[gone:]
		n -= gone
	}
}

// loadRanges reads what a previous process wrote. Ranges without a service port are deleted.
func (w *Writer) loadRanges(left []port) error {
	var lost []lbmap.RangeKey
	err := w.tables.Ranges.Dump(func(key lbmap.RangeKey, _ uint8) {
		if key.Service == lbmap.TargetNode {
			w.direct.clients = append(w.direct.clients, key)
			w.usedRanges++
			return
		}
		if int(key.Service) >= len(left) || left[key.Service].id == 0 {
			lost = append(lost, key)
			return
		}
		s := &left[key.Service]
		s.ranges = append(s.ranges, key)
		w.usedRanges++
	})
	if err != nil {
		return fmt.Errorf("read the source ranges: %w", err)
	}
	slices.SortFunc(w.direct.clients, compareRanges)
	for i := range left {
		slices.SortFunc(left[i].ranges, compareRanges)
	}
	for _, key := range lost {
		if err := w.tables.Ranges.Delete(key); err != nil {
			return fmt.Errorf("delete source range %s: %w", key.String(), err)
		}
	}
	return nil
}

// needsGuard reports whether the sources of packets must be checked, see GuardHook.
func needsGuard(f lbmap.FrontendEntry) bool { return f.Value.Flags&lbmap.FrontendFiltered != 0 }

// NeedsGuard reports whether any frontend in the tables needs that check.
func (w *Writer) NeedsGuard() bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	for _, item := range w.ports.All() {
		if slices.ContainsFunc(item.Applied.frontends, needsGuard) {
			return true
		}
	}
	return false
}
