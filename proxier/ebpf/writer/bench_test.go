// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"context"
	"runtime"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/synthetic"
)

// recorder is a tier that records its updates.
type recorder struct{ updates []proxier.Update }

func (r *recorder) Sync(_ context.Context, u proxier.Update) error {
	r.updates = append(r.updates, u)
	return nil
}

func (*recorder) Cleanup(context.Context) error { return nil }

func (*recorder) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

// noFrontends is a map whose writes cost nothing.
type noFrontends struct{ *lbmap.FakeFrontends }

func (noFrontends) Update(keys []lbmap.FrontendKey, _ []lbmap.FrontendValue) (int, error) {
	return len(keys), nil
}

func (noFrontends) Delete([]lbmap.FrontendKey) error { return nil }

// BenchmarkSync measures the writer alone, without maps of the kernel: 50,000 Services are added,
// their endpoints are changed one at a time and all at once, and the Services are deleted.
func BenchmarkSync(b *testing.B) {
	const services, single = 50000, 2000
	r := &recorder{}
	p, err := proxier.New(proxier.Options{NodeName: "node1", Tier: r, Runner: proxier.DefaultRunnerOptions()})
	if err != nil {
		b.Fatal(err)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	sync := func() {
		if err := p.Sync(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
	for i := range services {
		p.OnServiceAdd(synthetic.Service(i))
		p.OnEndpointSliceAdd(synthetic.Slice(i, 0, i*8, 1))
	}
	sync()
	for i := range single {
		p.OnEndpointSliceUpdate(nil, synthetic.Slice(i*17, 0, i*17*8+1, 1))
		sync()
	}
	for i := range services {
		p.OnEndpointSliceUpdate(nil, synthetic.Slice(i, 0, i*8+2, 1))
	}
	sync()
	for i := range services {
		p.OnEndpointSliceDelete(synthetic.Slice(i, 0, i*8, 1))
		p.OnServiceDelete(synthetic.Service(i))
	}
	sync()

	sizes := lbmap.Sizes{Frontends: 1 << 17, Services: 1 << 16, Backends: 1 << 18, Slots: 1 << 18, Ranges: 1 << 14, Locals: 16}
	var took [4]time.Duration
	var objects, bytes [4]uint64
	var before, after runtime.MemStats
	for range b.N {
		tables := lbmap.NewFakeTables(sizes)
		tables.Frontends = noFrontends{tables.Frontends.(*lbmap.FakeFrontends)}
		clock := clocktesting.NewFakePassiveClock(time.Unix(1700000000, 0))
		w := New(tables, Options{Sizes: sizes, Clock: clock, Wait: func() {}, Report: func(p proxier.Problem) { b.Fatal(p.Message) }})
		w.Format(7)
		runtime.GC()
		for i, u := range r.updates {
			u.Full = false // a full sync would compare the map of frontends, which is empty
			phase := 0
			switch i {
			case 0:
			case len(r.updates) - 2:
				phase = 2
			case len(r.updates) - 1:
				phase = 3
			default:
				phase = 1
			}
			if phase != 1 || i == 1 {
				runtime.ReadMemStats(&before)
			}
			start := time.Now()
			if _, err := w.Sync(u); err != nil {
				b.Fatal(err)
			}
			took[phase] += time.Since(start)
			if phase != 1 || i == single {
				runtime.ReadMemStats(&after)
				objects[phase] += after.Mallocs - before.Mallocs
				bytes[phase] += after.TotalAlloc - before.TotalAlloc
			}
		}
	}
	for i, name := range []string{"insert", "single", "change", "delete"} {
		n := float64(services * b.N)
		if i == 1 {
			n = float64(single * b.N)
		}
		b.ReportMetric(float64(took[i].Nanoseconds())/n, "ns/"+name)
		b.ReportMetric(float64(objects[i])/n, "objs/"+name)
		b.ReportMetric(float64(bytes[i])/n, "B/"+name)
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkSmallerTables is a full sync of a thousand Services that ask for the largest Maglev tables, of which most have
// smaller ones.
func BenchmarkSmallerTables(b *testing.B) {
	const services, endpoints = 1000, 10
	sizes := lbmap.Sizes{Frontends: 1 << 12, Services: 1 << 11, Backends: 1 << 15, Slots: 1 << 20, Ranges: 16, Locals: 16}
	h := newHarness(b, lbmap.NewFakeTables(sizes), sizes)
	for i := range services {
		s := synthetic.Service(i)
		s.Annotations = map[string]string{proxier.AnnotationAlgorithm: "maglev", proxier.AnnotationTableSize: "131071"}
		h.OnServiceAdd(s)
		h.OnEndpointSliceAdd(synthetic.Slice(i, 0, i*endpoints, endpoints))
	}
	h.sync(b)
	full := proxier.Update{Full: true, Changes: h.Table().All()}
	for b.Loop() {
		if _, err := h.writer.Sync(full); err != nil {
			b.Fatal(err)
		}
	}
}
