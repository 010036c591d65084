// SPDX-License-Identifier: Apache-2.0

package writertest

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// SetID is the id of the backend set of a frontend, for clients of that origin.
func SetID(f lbmap.FrontendEntry, origin proxier.Origin) uint32 {
	return f.Value.Service*lbmap.SetsPerService + uint32(f.Decode().Routes[origin].Set)
}

// Text prints the tables as programs read them, without ids.
func Text(tables *lbmap.Tables) string {
	var lines []string
	err := tables.Frontends.Dump(func(key lbmap.FrontendKey, value lbmap.FrontendValue) {
		e := &tables.Services[value.Service]
		f := lbmap.FrontendEntry{Key: key, Value: value}
		head := fmt.Sprintf("%s/%s %s affinity=%d", lbmap.ToAddrPort(key.Addr, key.Port), proxier.Protocol(key.Proto), e.Name[:e.NameLen], value.Affinity)
		for origin := range proxier.Origins {
			lines = append(lines, head+routeText(value.Flags, origin)+" -> "+setText(tables, SetID(f, origin)))
		}
	})
	err = errors.Join(err, tables.Ranges.Dump(func(key lbmap.RangeKey, _ uint8) {
		e := &tables.Services[key.Service]
		lines = append(lines, fmt.Sprintf("%s/%s from %s", e.Name[:e.NameLen], proxier.Protocol(e.Proto), key.String()))
	}), tables.VIPs.Dump(func(addr [4]uint32, _ uint8) { lines = append(lines, "echo "+lbmap.ToAddr(addr).String()) }),
		tables.Targets.Dump(func(key lbmap.TargetKey, word uint64) {
			if key != (lbmap.TargetKey{Service: lbmap.TargetNode}) { // what is usual: nodes are not known
				lines = append(lines, targetText(tables, key, word))
			}
		}))
	if err != nil {
		return err.Error()
	}
	lines = append(lines, wrongPorts(tables)...)
	slices.Sort(lines)
	return strings.Join(slices.Compact(lines), "\n")
}

func targetText(tables *lbmap.Tables, key lbmap.TargetKey, word uint64) string {
	addr := lbmap.ToAddr(key.Addr).String()
	if key == (lbmap.TargetKey{}) {
		return "frontends take packets in IP packets"
	}
	switch key.Service {
	case lbmap.TargetAnyService:
		return "target " + addr
	case lbmap.TargetNode:
		return "packets in IP packets from " + addr
	}
	id, generation := lbmap.SplitTargetWord(word)
	e, b := &tables.Services[key.Service], &tables.Backends[id]
	text := fmt.Sprintf("target %s of %s/%s", addr, e.Name[:e.NameLen], proxier.Protocol(e.Proto))
	if b.Generation != generation || b.Service != key.Service || b.Addr != key.Addr {
		return text + " is stale"
	}
	return text + " -> " + lbmap.ToAddrPort(b.Addr, b.Port).String()
}

// wrongPorts are the ports of which the tables say wrongly whether they have frontends.
func wrongPorts(tables *lbmap.Tables) (lines []string) {
	used := map[uint32]bool{}
	err := tables.Frontends.Dump(func(key lbmap.FrontendKey, _ lbmap.FrontendValue) {
		port := lbmap.PortBit(&key)
		if used[port] = true; tables.Ports[port/64]>>(port%64)&1 == 0 {
			lines = append(lines, fmt.Sprintf("port %d has frontends, and no bit", port))
		}
	})
	if err != nil {
		return []string{err.Error()}
	}
	for word, set := range tables.Ports {
		for ; set != 0; set &= set - 1 {
			if port := uint32(word*64 + bits.TrailingZeros64(set)); !used[port] {
				lines = append(lines, fmt.Sprintf("port %d has a bit, and no frontends", port))
			}
		}
	}
	return lines
}

// routeText returns a route's flags, or nothing for frontends that serve all origins alike and keep
// the source.
func routeText(flags uint32, origin proxier.Origin) string {
	if flags == uint32(proxier.ClusterIP)<<lbmap.FrontendKindShift {
		return ""
	}
	return fmt.Sprintf(" flags=%x %s", flags, origin)
}

func setText(tables *lbmap.Tables, set uint32) string {
	base, size := lbmap.SplitSetWord(tables.Sets[set])
	to := make([]string, 0, size)
	for i := range size {
		slot := tables.Slots[base+uint32(i)]
		id := lbmap.SlotBackend(slot)
		b := &tables.Backends[id]
		if lbmap.SlotWord(id, b.Generation) != slot || b.Service != set/lbmap.SetsPerService {
			to = append(to, "STALE")
			continue
		}
		if b.Members&(1<<(set%lbmap.SetsPerService)) == 0 {
			to = append(to, "NO-MEMBER")
		}
		to = append(to, lbmap.ToAddrPort(b.Addr, b.Port).String())
	}
	if size == 0 {
		if verdict, ok := lbmap.VerdictOf(base); ok {
			to = append(to, verdict.String())
		} else {
			to = append(to, "UNUSED")
		}
	}
	return strings.Join(to, " ")
}

// Wanted returns the text of tables with these decisions.
func Wanted(all []proxier.PortChange) string {
	var lines []string
	for _, c := range all {
		d := c.New
		ranges := map[string]struct{}{}
		for i := range d.Frontends {
			f := &d.Frontends[i]
			if f.Conflict != nil {
				continue
			}
			if f.Kind.AnswersEcho() {
				lines = append(lines, "echo "+f.Addr.Addr().String())
			}
			for origin, r := range f.Routes {
				var to []string
				for _, i := range d.Slots(r.Set, math.MaxInt) {
					to = append(to, d.Backends[i].Addr.String())
				}
				if to == nil {
					to = append(to, d.Empty[r.Set].String())
				}
				lines = append(lines, fmt.Sprintf("%s/%s %s affinity=%d%s -> %s", f.Addr, d.Name.Protocol, d.Name,
					int(d.Affinity.Seconds()), routeText(lbmap.NewFrontend(d, i, 0).Value.Flags, proxier.Origin(origin)), strings.Join(to, " ")))
			}
			for _, p := range f.Ranges {
				if p.Addr() == f.Addr.Addr() && p.IsSingleIP() {
					continue
				}
				for _, part := range lbmap.SplitRange(p) {
					ranges[fmt.Sprintf("%s/%s from %s", d.Name, d.Name.Protocol, part)] = struct{}{}
				}
			}
		}
		for line := range ranges {
			lines = append(lines, line)
		}
	}
	slices.Sort(lines)
	return strings.Join(slices.Compact(lines), "\n")
}

// Check compares the usage that the writer reports with the tables.
func Check(t testing.TB, tables *lbmap.Tables, usage map[string]lbmap.Usage) {
	t.Helper()
	services, backends, slots := 0, 0, 0
	members := make([]uint8, len(tables.Backends))
	for id := range tables.Services {
		if tables.Services[id].State == lbmap.ServiceFree {
			continue
		}
		services++
		for s := range uint32(lbmap.SetsPerService) {
			base, size := lbmap.SplitSetWord(tables.Sets[uint32(id)*lbmap.SetsPerService+s])
			if size > 0 {
				slots += 1 << bits.Len(uint(size-1)) // rounded up to a power of two
			}
			for i := range size {
				members[lbmap.SlotBackend(tables.Slots[base+uint32(i)])] |= 1 << s
			}
		}
	}
	for id := range tables.Backends {
		b := &tables.Backends[id]
		if b.Service != 0 {
			backends++
		}
		if b.Members != members[id] {
			t.Fatalf("backend %d %s: member of %b, in the sets %b", id, lbmap.ToAddrPort(b.Addr, b.Port), b.Members, members[id])
		}
	}
	frontends := 0
	if err := tables.Frontends.Dump(func(lbmap.FrontendKey, lbmap.FrontendValue) { frontends++ }); err != nil {
		t.Fatal(err)
	}
	got := []int{frontends, services, backends, slots}
	want := []int{usage["frontends"].Used, usage["services"].Used, usage["backends"].Used, usage["slots"].Used}
	if !slices.Equal(got, want) {
		t.Fatalf("frontends, services, backends, slots in the tables: %v, according to the writer: %v", got, want)
	}
}
