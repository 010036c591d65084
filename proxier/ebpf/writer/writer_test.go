// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
)

// Addresses in these tests: Services 10.96.0.0/16 and fd00:10:96::/112,
// endpoints 10.244.0.0/16 and fd00:10:244::/48.

// smallSizes are so small that every table overflows at times.
var smallSizes = lbmap.Sizes{Frontends: 40, Services: 24, Backends: 48, Slots: 64, Ranges: 10, Locals: 16, Affinity: 2, UDPPeers: 2, OptOuts: 2}

// harness is a proxier with tables in ordinary memory.
type harness struct {
	*proxier.Proxier
	writer      *Writer
	problems    []proxier.Problem
	disruptions []proxier.Disruption
}

func (h *harness) Cleanup(context.Context) error { return nil }

func (h *harness) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

// harnessTier separates the method names of the tier from those of the proxier.
type harnessTier struct{ *harness }

func (h harnessTier) Sync(_ context.Context, u proxier.Update) error {
	_, err := h.writer.Sync(u)
	return err
}

func newHarness(t testing.TB, tables *lbmap.Tables, s lbmap.Sizes) *harness {
	t.Helper()
	h := &harness{}
	clock := clocktesting.NewFakePassiveClock(time.Unix(1700000000, 0))
	if tables.Meta.Magic == 0 {
		tables.Meta.Magic, tables.Meta.Layout, tables.Meta.Generation = lbmap.LayoutMagic, lbmap.LayoutVersion, 7
	}
	h.writer = New(tables, Options{
		Sizes: s, Clock: clock, Wait: func() {}, Report: func(p proxier.Problem) { h.problems = append(h.problems, p) },
		Disrupted: func(d proxier.Disruption) { h.disruptions = append(h.disruptions, d) },
	})
	if err := h.writer.Load(); err != nil {
		t.Fatalf("load: %v", err)
	}
	p, err := proxier.New(proxier.Options{NodeName: "node1", Tier: harnessTier{h}, Runner: proxier.DefaultRunnerOptions()})
	if err != nil {
		t.Fatal(err)
	}
	h.Proxier = p
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	return h
}

func (h *harness) sync(t testing.TB) {
	t.Helper()
	if err := h.Sync(context.Background()); err != nil {
		t.Fatalf("sync: %v", err)
	}
}

func TestWriterServesAndRemoves(t *testing.T) {
	h := newHarness(t, lbmap.NewFakeTables(smallSizes), smallSizes)
	h.OnServiceAdd(writertest.Service("a", "10.96.0.1"))
	h.OnEndpointSliceAdd(writertest.Slice("a-1", "a", "10.244.0.2", "10.244.0.1"))
	h.sync(t)
	want := "10.96.0.1:80/TCP ns/a:p affinity=0 -> 10.244.0.1:8080 10.244.0.2:8080"
	if got := writertest.Text(h.writer.tables); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	h.OnEndpointSliceDelete(writertest.Slice("a-1", "a"))
	h.sync(t)
	if got, want := writertest.Text(h.writer.tables), "10.96.0.1:80/TCP ns/a:p affinity=0 -> reject"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	h.OnServiceDelete(writertest.Service("a", ""))
	h.sync(t)
	if got := writertest.Text(h.writer.tables); got != "" {
		t.Errorf("still in the tables: %s", got)
	}
	writertest.Check(t, h.writer.tables, h.writer.Usage())
}

// TestWriterOverwritesWhatIsTakenOver: an address that moves from one Service to another in the same
// sync is overwritten, never deleted.
func TestWriterOverwritesWhatIsTakenOver(t *testing.T) {
	tables := lbmap.NewFakeTables(smallSizes)
	h := newHarness(t, tables, smallSizes)
	h.OnServiceAdd(writertest.Service("old", "10.96.0.1"))
	h.sync(t)
	tables.Frontends = noDelete{tables.Frontends.(*lbmap.FakeFrontends), t}
	h.OnServiceDelete(writertest.Service("old", ""))
	h.OnServiceAdd(writertest.Service("new", "10.96.0.1"))
	h.sync(t)
	if got, want := writertest.Text(h.writer.tables), "10.96.0.1:80/TCP ns/new:p affinity=0 -> reject"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	writertest.Check(t, h.writer.tables, h.writer.Usage())
}

type noDelete struct {
	*lbmap.FakeFrontends
	t *testing.T
}

func (n noDelete) Delete(keys []lbmap.FrontendKey) error {
	for _, key := range keys {
		n.t.Errorf("%s was deleted", key.String())
	}
	return n.FakeFrontends.Delete(keys)
}

// TestWriterCapacity: a Service that does not fit is reported, affects no others, and is written when
// there is capacity.
func TestWriterCapacity(t *testing.T) {
	for _, test := range []struct {
		table string
		sizes lbmap.Sizes
	}{
		{"frontends", lbmap.Sizes{Frontends: 1, Services: 8, Backends: 8, Slots: 8}},
		{"services", lbmap.Sizes{Frontends: 8, Services: 2, Backends: 8, Slots: 8}},
		{"backends", lbmap.Sizes{Frontends: 8, Services: 8, Backends: 3, Slots: 8}},
		{"slots", lbmap.Sizes{Frontends: 8, Services: 8, Backends: 8, Slots: 2}},
	} {
		t.Run(test.table, func(t *testing.T) {
			h := newHarness(t, lbmap.NewFakeTables(test.sizes), test.sizes)
			h.OnServiceAdd(writertest.Service("a", "10.96.0.1"))
			h.OnEndpointSliceAdd(writertest.Slice("a-1", "a", "10.244.0.1", "10.244.0.2"))
			h.sync(t)
			before := writertest.Text(h.writer.tables)
			h.OnServiceAdd(writertest.Service("b", "10.96.0.2"))
			h.OnEndpointSliceAdd(writertest.Slice("b-1", "b", "10.244.1.1"))
			h.sync(t)
			h.sync(t)
			if got := writertest.Text(h.writer.tables); got != before {
				t.Errorf("existing entries are now:\n%s\nwere:\n%s", got, before)
			}
			if len(h.problems) != 1 || h.problems[0].Reason != proxier.ReasonCapacity || h.problems[0].Object.Name != "b" ||
				!strings.Contains(h.problems[0].Message, test.table) {
				t.Fatalf("problems: %+v", h.problems)
			}
			if h.writer.tables.Meta.Unplaced != 1 {
				t.Errorf("unplaced gauge: %d", h.writer.tables.Meta.Unplaced)
			}
			writertest.Check(t, h.writer.tables, h.writer.Usage())
			h.OnServiceDelete(writertest.Service("a", ""))
			h.OnEndpointSliceDelete(writertest.Slice("a-1", "a"))
			h.sync(t)
			if got, want := writertest.Text(h.writer.tables), "10.96.0.2:80/TCP ns/b:p affinity=0 -> 10.244.1.1:8080"; got != want {
				t.Errorf("with capacity again: %s", got)
			}
			writertest.Check(t, h.writer.tables, h.writer.Usage())
		})
	}
}

// TestDisruptions: each change of a Maglev table is told, with the share of connections that moves.
func TestDisruptions(t *testing.T) {
	sizes := smallSizes
	sizes.Slots = 1 << 15
	h := newHarness(t, lbmap.NewFakeTables(sizes), sizes)
	pods := func(n int) (list []string) {
		for i := range n {
			list = append(list, fmt.Sprintf("10.244.0.%d", i+1))
		}
		return list
	}
	service := func(annotations ...string) {
		s := writertest.Service("a", "10.96.0.1")
		s.Annotations = map[string]string{}
		for i := 0; i < len(annotations); i += 2 {
			s.Annotations[annotations[i]] = annotations[i+1]
		}
		h.OnServiceUpdate(nil, s)
	}
	for _, step := range []struct {
		name      string
		change    func()
		slots     int // 0 if nothing is told
		low, high float64
	}{
		{"new", func() {
			service(proxier.AnnotationAlgorithm, "maglev", proxier.AnnotationTableSize, "4093")
			h.OnEndpointSliceAdd(writertest.Slice("a-1", "a", pods(10)...))
		}, 0, 0, 0},
		{"one of ten backends goes", func() { h.OnEndpointSliceUpdate(nil, writertest.Slice("a-1", "a", pods(9)...)) }, 4093, 0.09, 0.14},
		{"it is back", func() { h.OnEndpointSliceUpdate(nil, writertest.Slice("a-1", "a", pods(10)...)) }, 4093, 0.09, 0.14},
		{"a smaller table", func() {
			service(proxier.AnnotationAlgorithm, "maglev", proxier.AnnotationTableSize, "2039")
		}, 2039, 0.7, 1},
		{"nothing", func() {}, 0, 0, 0},
		{"random", func() { service() }, 0, 0, 0},
	} {
		h.disruptions = nil
		step.change()
		h.sync(t)
		switch d := h.disruptions; {
		case step.slots == 0 && len(d) > 0:
			t.Errorf("%s: told %+v", step.name, d)
		case step.slots == 0:
		case len(d) != 1 || d[0].Slots != step.slots || d[0].Name.Name != "a" || d[0].Set != proxier.V4Cluster || d[0].Moved < step.low || d[0].Moved > step.high:
			t.Errorf("%s: told %+v, want %d slots, %v to %v moved", step.name, d, step.slots, step.low, step.high)
		}
	}
}

// TestWriterReplacedTables: a Maglev table keeps its size when its endpoints change, also where all tables
// together take as many slots as they may.
func TestWriterReplacedTables(t *testing.T) {
	sizes := lbmap.Sizes{Frontends: 8, Services: 8, Backends: 64, Slots: 1 << 10}
	h := newHarness(t, lbmap.NewFakeTables(sizes), sizes)
	maglev := func(s *v1.Service) {
		s.Annotations = map[string]string{proxier.AnnotationAlgorithm: "maglev", proxier.AnnotationTableSize: "251"}
	}
	for i, name := range []string{"a", "b", "c"} {
		h.OnServiceAdd(writertest.Service(name, fmt.Sprintf("10.96.0.%d", 1+i), maglev))
		h.OnEndpointSliceAdd(writertest.Slice(name+"-1", name, "10.244.0.1", "10.244.0.2"))
	}
	h.sync(t)
	for i := range 4 {
		for _, name := range []string{"a", "b", "c"} {
			h.OnEndpointSliceUpdate(nil, writertest.Slice(name+"-1", name, "10.244.0.1", fmt.Sprintf("10.244.0.%d", 3+i)))
			h.sync(t)
		}
	}
	for id := range uint32(3) {
		if got := h.writer.published(id+1, proxier.V4Cluster); got != 251 {
			t.Errorf("a table has %d slots, want 251", got)
		}
	}
	if len(h.problems) > 0 {
		t.Errorf("problems: %+v", h.problems)
	}
}

// TestWriterSmallerTables: a Maglev table that does not fit becomes smaller, and is reported once. Other sets still fit, and
// the next process finds nothing to write.
func TestWriterSmallerTables(t *testing.T) {
	sizes := lbmap.Sizes{Frontends: 8, Services: 8, Backends: 64, Slots: 1 << 10}
	tables := lbmap.NewFakeTables(sizes)
	feed := func(h *harness) {
		var addresses []string
		for i := range 10 {
			addresses = append(addresses, fmt.Sprintf("10.244.0.%d", i))
		}
		for i, name := range []string{"a", "b", "c"} {
			h.OnServiceAdd(writertest.Service(name, fmt.Sprintf("10.96.0.%d", 1+i), func(s *v1.Service) {
				if name != "c" {
					s.Annotations = map[string]string{proxier.AnnotationAlgorithm: "maglev"}
				}
			}))
			h.OnEndpointSliceAdd(writertest.Slice(name+"-1", name, addresses...))
		}
		h.sync(t)
		h.sync(t)
	}
	h := newHarness(t, tables, sizes)
	feed(h)
	size := func(id uint32) int {
		_, size := lbmap.SplitSetWord(tables.Sets[id*lbmap.SetsPerService])
		return size
	}
	if got := []int{size(1), size(2), size(3)}; !slices.Equal(got, []int{509, 251, 10}) {
		t.Errorf("sets of %v slots", got)
	}
	if len(h.problems) != 2 || !strings.Contains(h.problems[0].Message, "has 509 slots instead of 1021") || h.problems[1].Object.Name != "b" || h.problems[1].Reason != proxier.ReasonCapacity {
		t.Errorf("problems: %+v", h.problems)
	}
	writertest.Check(t, h.writer.tables, h.writer.Usage())
	h = newHarness(t, tables, sizes)
	if feed(h); h.writer.writes != 0 {
		t.Errorf("another process writes %d times", h.writer.writes)
	}
}

// TestWriterRefusesSCTP: a service port that programs cannot serve is reported, and affects no
// others.
func TestWriterRefusesSCTP(t *testing.T) {
	h := newHarness(t, lbmap.NewFakeTables(smallSizes), smallSizes)
	h.OnServiceAdd(writertest.Service("a", "10.96.0.1", func(s *v1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "s", Port: 81, Protocol: v1.ProtocolSCTP})
	}))
	h.sync(t)
	h.sync(t)
	if got, want := writertest.Text(h.writer.tables), "10.96.0.1:80/TCP ns/a:p affinity=0 -> reject"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if len(h.problems) != 1 || h.problems[0].Reason != proxier.ReasonUnsupported || !strings.Contains(h.problems[0].Message, "ns/a:s/SCTP") {
		t.Errorf("problems: %+v", h.problems)
	}
	h.OnServiceDelete(writertest.Service("a", ""))
	h.sync(t)
	writertest.Check(t, h.writer.tables, h.writer.Usage())
}

// TestWriterRetreats: if the new set of backends does not fit, removed backends leave the old set all
// the same.
func TestWriterRetreats(t *testing.T) {
	sizes := lbmap.Sizes{Frontends: 8, Services: 8, Backends: 16, Slots: 4}
	h := newHarness(t, lbmap.NewFakeTables(sizes), sizes)
	h.OnServiceAdd(writertest.Service("a", "10.96.0.1"))
	h.OnEndpointSliceAdd(writertest.Slice("a-1", "a", "10.244.0.1", "10.244.0.2", "10.244.0.3"))
	h.sync(t)
	h.OnEndpointSliceUpdate(nil, writertest.Slice("a-1", "a", "10.244.0.2", "10.244.0.3", "10.244.0.4"))
	h.sync(t)
	if got, want := writertest.Text(h.writer.tables), "10.96.0.1:80/TCP ns/a:p affinity=0 -> 10.244.0.2:8080 10.244.0.2:8080 10.244.0.3:8080"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	writertest.Check(t, h.writer.tables, h.writer.Usage())
	h.OnEndpointSliceDelete(writertest.Slice("a-1", "a"))
	h.sync(t)
	if got, want := writertest.Text(h.writer.tables), "10.96.0.1:80/TCP ns/a:p affinity=0 -> reject"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	writertest.Check(t, h.writer.tables, h.writer.Usage())
}

// TestWriterRetries: a failed map operation delays its service port until the next sync, and affects no
// others. Meanwhile no frontend leads to a backend of another Service.
func TestWriterRetries(t *testing.T) {
	tables := lbmap.NewFakeTables(smallSizes)
	h := newHarness(t, tables, smallSizes)
	bad := netip.MustParseAddr("10.96.0.1")
	broken := true
	tables.Frontends.(*lbmap.FakeFrontends).Fail = func(key lbmap.FrontendKey) error {
		if broken && lbmap.ToAddr(key.Addr) == bad {
			return errors.New("injected")
		}
		return nil
	}
	h.OnServiceAdd(writertest.Service("a", "10.96.0.1"))
	h.OnServiceAdd(writertest.Service("b", "10.96.0.2"))
	err := h.Sync(context.Background())
	if err == nil || !strings.Contains(err.Error(), "10.96.0.1:80/TCP of ns/a:p") {
		t.Errorf("error: %v", err)
	}
	if got, want := writertest.Text(h.writer.tables), "10.96.0.2:80/TCP ns/b:p affinity=0 -> reject"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	broken = false
	h.sync(t)
	if !strings.Contains(writertest.Text(h.writer.tables), "10.96.0.1:80") {
		t.Errorf("not retried: %s", writertest.Text(h.writer.tables))
	}
	broken = true
	h.OnServiceDelete(writertest.Service("a", ""))
	if err := h.Sync(context.Background()); err == nil {
		t.Error("a failed delete returned no error")
	}
	h.OnServiceAdd(writertest.Service("c", "10.96.0.3"))
	_ = h.Sync(context.Background())
	if got := writertest.Text(h.writer.tables); !strings.Contains(got, "10.96.0.1:80/TCP ns/a:p") {
		t.Errorf("the address that could not be deleted changed:\n%s", got)
	}
	broken = false
	h.sync(t)
	if got := writertest.Text(h.writer.tables); strings.Contains(got, "10.96.0.1:80") {
		t.Errorf("not deleted: %s", got)
	}
	writertest.Check(t, h.writer.tables, h.writer.Usage())
}

// TestWriterKeepsWhatLeadsSomewhere: while an address that moves to another Service cannot be written,
// it keeps its old backends, whose ids are not reused.
func TestWriterKeepsWhatLeadsSomewhere(t *testing.T) {
	tables := lbmap.NewFakeTables(smallSizes)
	h := newHarness(t, tables, smallSizes)
	broken := false
	tables.Frontends.(*lbmap.FakeFrontends).Fail = func(lbmap.FrontendKey) error {
		if broken {
			return errors.New("injected")
		}
		return nil
	}
	h.OnServiceAdd(writertest.Service("old", "10.96.0.1"))
	h.sync(t)
	broken = true
	h.OnServiceDelete(writertest.Service("old", ""))
	h.OnServiceAdd(writertest.Service("new", "10.96.0.1"))
	if err := h.Sync(context.Background()); err == nil {
		t.Error("a failed write returned no error")
	}
	if got, want := writertest.Text(h.writer.tables), "10.96.0.1:80/TCP ns/old:p affinity=0 -> reject"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	broken = false
	h.sync(t)
	if got, want := writertest.Text(h.writer.tables), "10.96.0.1:80/TCP ns/new:p affinity=0 -> reject"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	writertest.Check(t, h.writer.tables, h.writer.Usage())
}

// TestRemovedBackendIsAnotherGeneration: a program that read a slot before its backend was removed can
// notice that.
func TestRemovedBackendIsAnotherGeneration(t *testing.T) {
	h := newHarness(t, lbmap.NewFakeTables(smallSizes), smallSizes)
	h.OnServiceAdd(writertest.Service("a", "10.96.0.1"))
	h.OnEndpointSliceAdd(writertest.Slice("a-1", "a", "10.244.0.1"))
	h.sync(t)
	slot := h.writer.tables.Slots[0]
	id := lbmap.SlotBackend(slot)
	b := &h.writer.tables.Backends[id]
	if lbmap.SlotWord(id, b.Generation) != slot || b.Generation == 0 {
		t.Fatalf("slot %#x, generation %d", slot, b.Generation)
	}
	h.OnEndpointSliceUpdate(nil, writertest.Slice("a-1", "a", "10.244.0.2"))
	h.sync(t)
	if lbmap.SlotWord(id, b.Generation) == slot {
		t.Error("the generation has not changed")
	}
}

// TestAuditRepairs: entries that another process wrote, changed or removed are repaired by the next
// full sync.
func TestAuditRepairs(t *testing.T) {
	tables := lbmap.NewFakeTables(smallSizes)
	h := newHarness(t, tables, smallSizes)
	for i := range 3 {
		h.OnServiceAdd(writertest.Service(fmt.Sprintf("s%d", i), fmt.Sprintf("10.96.0.%d", i)))
	}
	h.sync(t)
	want := writertest.Text(h.writer.tables)
	fake := tables.Frontends.(*lbmap.FakeFrontends)
	entries := fake.Entries
	var changed lbmap.FrontendKey
	n := 0
	for key, value := range entries {
		switch n++; n {
		case 1:
			delete(entries, key)
			key.Port++
			entries[key] = value
		case 2:
			value.Flags ^= lbmap.RouteLocal
			entries[key] = value
			changed = key
		}
	}
	if writertest.Text(h.writer.tables) == want {
		t.Fatal("nothing was changed")
	}
	fake.Fail = func(key lbmap.FrontendKey) error {
		if _, there := entries[key]; !there && key == changed {
			t.Error("an address is missing until it is written again")
		}
		return nil
	}
	if _, err := h.writer.Sync(proxier.Update{Full: true}); err != nil {
		t.Fatal(err)
	}
	if got := writertest.Text(h.writer.tables); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	writertest.Check(t, h.writer.tables, h.writer.Usage())
}

// TestPutName: names that are too long for the table are shortened to distinct ones.
func TestPutName(t *testing.T) {
	long := strings.Repeat("x", 63)
	names := []proxier.ServicePortName{
		{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "a"}},
		{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "a"}, Port: "p"},
		{NamespacedName: types.NamespacedName{Namespace: long, Name: long[:56]}},
		{NamespacedName: types.NamespacedName{Namespace: long, Name: long[:57]}},
		{NamespacedName: types.NamespacedName{Namespace: long, Name: long}, Port: long},
		{NamespacedName: types.NamespacedName{Namespace: long, Name: long}, Port: long[1:] + "y"},
	}
	seen := map[string]bool{}
	for i, n := range names {
		var e lbmap.Service
		e.NameLen = lbmap.PutName(&e.Name, n)
		got := string(e.Name[:e.NameLen])
		if i < 3 && got != n.String() || seen[got] {
			t.Errorf("%s is shortened to %s", n, got)
		}
		seen[got] = true
	}
}

// TestMillionEndpoints: a Service with a million endpoints is refused, and the report says what it
// needs. Others are not affected.
func TestMillionEndpoints(t *testing.T) {
	h := newHarness(t, lbmap.NewFakeTables(smallSizes), smallSizes)
	huge := writertest.Slice("huge-1", "huge")
	huge.Endpoints = make([]discoveryv1.Endpoint, 1_000_000)
	for i := range huge.Endpoints {
		huge.Endpoints[i].Addresses = []string{netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)}).String()}
	}
	h.OnServiceAdd(writertest.Service("huge", "10.96.0.1"))
	h.OnEndpointSliceAdd(huge)
	h.OnServiceAdd(writertest.Service("small", "10.96.0.2"))
	h.OnEndpointSliceAdd(writertest.Slice("small-1", "small", "10.244.0.1"))
	h.sync(t)
	if got, want := writertest.Text(h.writer.tables), "10.96.0.2:80/TCP ns/small:p affinity=0 -> 10.244.0.1:8080"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if len(h.problems) != 1 || !strings.Contains(h.problems[0].Message, "needs 1000000 more backends") {
		t.Errorf("problems: %+v", h.problems)
	}
	writertest.Check(t, h.writer.tables, h.writer.Usage())
}

// watchedFrontends calls a function before frontends change.
type watchedFrontends struct {
	*lbmap.FakeFrontends
	look func()
}

func (f watchedFrontends) Update(keys []lbmap.FrontendKey, values []lbmap.FrontendValue) (int, error) {
	f.look()
	return f.FakeFrontends.Update(keys, values)
}

// TestWriterMovesBetweenSetsWithoutGap: an address that changes its set always has backends, even
// while it cannot be written.
func TestWriterMovesBetweenSetsWithoutGap(t *testing.T) {
	tables := lbmap.NewFakeTables(smallSizes)
	h := newHarness(t, tables, smallSizes)
	fake := tables.Frontends.(*lbmap.FakeFrontends)
	broken, looks := false, 0
	fake.Fail = func(lbmap.FrontendKey) error {
		if broken {
			return errors.New("injected")
		}
		return nil
	}
	served := func() {
		t.Helper()
		looks++
		for _, bad := range []string{"reject", "drop", "STALE", "NO-MEMBER", "UNUSED"} {
			if text := writertest.Text(h.writer.tables); strings.Contains(text, bad) {
				t.Errorf("no backend for a moment: %s", text)
			}
		}
	}
	tables.Frontends = watchedFrontends{fake, func() {
		if looks > 0 {
			served()
		}
	}}
	local := writertest.Service("a", "10.96.0.1", func(s *v1.Service) {
		s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
	})
	slice := writertest.Slice("a-1", "a", "10.244.0.1", "10.244.0.2", "10.244.0.3")
	slice.Endpoints[1].NodeName = ptr.To("node1")
	h.OnServiceAdd(writertest.Service("a", "10.96.0.1"))
	h.OnEndpointSliceAdd(slice)
	h.sync(t)
	served()
	for i := range 6 {
		service := local
		if i%2 != 0 {
			service = writertest.Service("a", "10.96.0.1")
		}
		h.OnServiceUpdate(nil, service)
		if i >= 4 {
			broken = true
			_ = h.Sync(context.Background())
			served()
			broken = false
		}
		h.sync(t)
		served()
		writertest.Check(t, h.writer.tables, h.writer.Usage())
	}
	if want := "10.96.0.1:80/TCP ns/a:p affinity=0 -> 10.244.0.1:8080 10.244.0.2:8080 10.244.0.3:8080"; writertest.Text(h.writer.tables) != want {
		t.Errorf("after all changes: %s", writertest.Text(h.writer.tables))
	}
}
