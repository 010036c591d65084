// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
)

// rangesOf are the source ranges of a service port, sorted: what all its
// filtered frontends let in, but for each frontend's own address, which a flag
// of the frontend stands for.
func rangesOf(d *proxier.Decision, service uint32) []rangeKey {
	var list []rangeKey
	for i := range d.Frontends {
		f := &d.Frontends[i]
		if !served(f) || !f.Filtered {
			continue
		}
		for _, p := range f.Ranges {
			if p == ownPrefix(f) {
				continue
			}
			bits := p.Bits()
			if p.Addr().Is4() {
				bits += 96
			}
			list = append(list, rangeKey{PrefixLen: uint32(32 + bits), Service: service, Addr: bpfAddr(p.Addr())})
		}
	}
	slices.SortFunc(list, compareRanges)
	return slices.Compact(list)
}

func compareRanges(a, b rangeKey) int {
	return cmp.Or(cmp.Compare(a.Service, b.Service), slices.Compare(a.Addr[:], b.Addr[:]), cmp.Compare(a.PrefixLen, b.PrefixLen))
}

func hasRange(list []rangeKey, key rangeKey) bool {
	_, found := slices.BinarySearchFunc(list, key, compareRanges)
	return found
}

// freshRanges counts what is in want and not in have.
func (w *writer) freshRanges(have, want []rangeKey) (n int) {
	for _, key := range want {
		if !hasRange(have, key) {
			n++
		}
	}
	return n
}

// addRanges writes what is new in want. p has both until removeRanges.
func (w *writer) addRanges(p *port, want []rangeKey) error {
	var added []rangeKey
	defer func() {
		if len(added) > 0 {
			p.ranges = slices.SortedFunc(slices.Values(slices.Concat(p.ranges, added)), compareRanges)
		}
	}()
	for _, key := range want {
		if hasRange(p.ranges, key) {
			continue
		}
		if err := w.tables.ranges.Put(key, 1); err != nil {
			return fmt.Errorf("write source range %s of %s: %w", key.String(), p.want.Name, err)
		}
		added = append(added, key)
		w.usedRanges++
		w.writes++
	}
	return nil
}

// removeRanges deletes what p has and is not in want.
func (w *writer) removeRanges(p *port, want []rangeKey) error {
	for len(p.ranges) > len(want) {
		i := slices.IndexFunc(p.ranges, func(key rangeKey) bool { return !hasRange(want, key) })
		if err := w.tables.ranges.Delete(p.ranges[i]); err != nil {
			return fmt.Errorf("delete source range %s: %w", p.ranges[i].String(), err)
		}
		p.ranges = slices.Delete(slices.Clone(p.ranges), i, i+1)
		w.usedRanges--
		w.writes++
		w.room = true
	}
	return nil
}

// loadRanges reads what a previous process wrote. What belongs to nobody goes.
func (w *writer) loadRanges(left []adoptedService) error {
	var lost []rangeKey
	err := w.tables.ranges.Dump(func(key rangeKey, _ uint8) {
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
	for i := range left {
		slices.SortFunc(left[i].ranges, compareRanges)
	}
	for _, key := range lost {
		if err := w.tables.ranges.Delete(key); err != nil {
			return fmt.Errorf("delete source range %s: %w", key.String(), err)
		}
	}
	return nil
}

// guarded says that packets have to be asked for their source, see guardHook.
func guarded(f frontendEntry) bool { return f.value.Flags&FrontendSomePods != 0 }

// guarded says whether any frontend in the tables is.
func (w *writer) guarded() bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return slices.ContainsFunc(w.ports, func(p port) bool { return slices.ContainsFunc(p.frontends, guarded) })
}
