// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"net/netip"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/synthetic"
)

// benchCluster returns the objects of a cluster, as sources deliver them.
func benchCluster(services, endpoints int) ([]*v1.Service, []*discoveryv1.EndpointSlice) {
	ss := make([]*v1.Service, services)
	es := make([]*discoveryv1.EndpointSlice, services)
	for i := range services {
		ss[i], es[i] = synthetic.Service(i), synthetic.Slice(i, 0, i*8, endpoints)
	}
	return ss, es
}

// benchFacts returns the facts of a node in such a cluster.
func benchFacts() proxier.Facts {
	return proxier.Facts{Zone: "z1", Pods: proxier.Detector{CIDRs: []netip.Prefix{netip.MustParsePrefix("172.16.0.0/12")}}}
}

// benchNode opens the tier on its own cgroup, with maps of the given sizes.
func benchNode(b *testing.B, s lbmap.Sizes) *node {
	b.Helper()
	l := lab.NewT(b)
	n := newNode(b, l.Node("node1"), l, Options{Sizes: s})
	n.UpdateFacts(func(f *proxier.Facts) { *f = benchFacts() })
	return n
}

var benchSizes = lbmap.Sizes{Frontends: 1 << 17, Services: 1 << 16, Backends: 1 << 19, Slots: 1 << 20, Affinity: 1 << 10, UDPPeers: 1 << 10, OptOuts: 16}

// BenchmarkControlPlane measures the path from Kubernetes objects to real BPF maps: 50,000
// Services of every kind with one endpoint each are inserted and deleted.
func BenchmarkControlPlane(b *testing.B) {
	const services = 50000
	ss, es := benchCluster(services, 1)
	ctx := context.Background()
	var insert, remove time.Duration
	var mallocs, bytes uint64
	for range b.N {
		n := benchNode(b, benchSizes)
		n.sync(b)
		runtime.GC()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		start := time.Now()
		for i := range ss {
			n.OnServiceAdd(ss[i])
		}
		for i := range es {
			n.OnEndpointSliceAdd(es[i])
		}
		if err := n.Sync(ctx); err != nil {
			b.Fatal(err)
		}
		insert += time.Since(start)
		runtime.ReadMemStats(&after)
		mallocs += after.Mallocs - before.Mallocs
		bytes += after.TotalAlloc - before.TotalAlloc
		if used := n.tier.Usage()["frontends"].Used; used < services {
			b.Fatalf("%d frontends", used)
		}

		start = time.Now()
		for i := range es {
			n.OnEndpointSliceDelete(es[i])
		}
		for i := range ss {
			n.OnServiceDelete(ss[i])
		}
		if err := n.Sync(ctx); err != nil {
			b.Fatal(err)
		}
		remove += time.Since(start)
		writertest.Check(b, tablesOf(n.tier), n.tier.Usage())
		n.close()
	}
	count := float64(services * b.N)
	b.ReportMetric(count/insert.Seconds(), "services/s")
	b.ReportMetric(count/remove.Seconds(), "deletes/s")
	b.ReportMetric(float64(mallocs)/count, "objs/service")
	b.ReportMetric(float64(bytes)/count, "B/service")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkEndpointChange measures the latency of one changed endpoint among 50,000 Services
// and 250,000 endpoints: from the call of the event handler to the map write that the next
// connection sees.
func BenchmarkEndpointChange(b *testing.B) {
	benchEndpointChange(b, benchSizes, 50000, 5, func(*v1.Service) {})
}

// BenchmarkMaglevEndpointChange is BenchmarkEndpointChange of 10,000 Services with Maglev and 10 endpoints each.
func BenchmarkMaglevEndpointChange(b *testing.B) {
	sizes := benchSizes
	sizes.Slots = 1 << 24
	benchEndpointChange(b, sizes, 10000, 10, func(s *v1.Service) {
		s.Annotations = map[string]string{proxier.AnnotationAlgorithm: "maglev"}
	})
}

func benchEndpointChange(b *testing.B, sizes lbmap.Sizes, services, endpoints int, change func(*v1.Service)) {
	n := benchNode(b, sizes)
	ss, es := benchCluster(services, endpoints)
	for i := range ss {
		change(ss[i])
		n.OnServiceAdd(ss[i])
		n.OnEndpointSliceAdd(es[i])
	}
	n.sync(b)
	runtime.GC()
	opts := proxier.DefaultRunnerOptions()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { n.Run(ctx); close(done) }()
	defer func() { stop(); <-done }()

	words := n.words()
	took := make([]time.Duration, 0, b.N)
	for i := range b.N {
		service := i * 7919 % services
		word := words[ss[service].Name]
		before := *word
		idle(b, opts.MinInterval+2*time.Millisecond) // the next change follows a quiet period
		// Decoding the event is not measured.
		slice := synthetic.Slice(service, 0, service*8+1+i/services%2, endpoints)
		start := time.Now()
		n.OnEndpointSliceUpdate(nil, slice)
		for atomic.LoadUint64(word) == before {
			runtime.Gosched()
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-µs")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkColdStart measures how long 50,000 Services with 250,000 endpoints take from memory
// into empty maps, and how long a restarted process takes that finds them in the maps.
func BenchmarkColdStart(b *testing.B) {
	const services, endpoints = 50000, 5
	ss, es := benchCluster(services, endpoints)
	var cold, restart time.Duration
	for range b.N {
		n := benchNode(b, benchSizes)
		feed := func() {
			for i := range ss {
				n.OnServiceAdd(ss[i])
			}
			for i := range es {
				n.OnEndpointSliceAdd(es[i])
			}
			n.sync(b)
		}
		start := time.Now()
		feed()
		cold += time.Since(start)
		changed := tablesOf(n.tier).Meta.ChangedUnixNs
		n.close()
		runtime.GC()

		start = time.Now()
		n.start(b, Options{Sizes: benchSizes})
		n.UpdateFacts(func(f *proxier.Facts) { *f = benchFacts() })
		feed()
		restart += time.Since(start)
		if now := tablesOf(n.tier).Meta.ChangedUnixNs; now != changed {
			b.Fatalf("the restart wrote to the tables")
		}
		n.close()
	}
	b.ReportMetric(cold.Seconds()*1e3/float64(b.N), "cold-ms")
	b.ReportMetric(restart.Seconds()*1e3/float64(b.N), "restart-ms")
	b.ReportMetric(0, "ns/op")
}

// words returns, by Service, the word of the backend set that pods are routed to.
func (n *node) words() map[string]*uint64 {
	tables := tablesOf(n.tier)
	ids := map[string]uint32{}
	for id := range tables.Services {
		if service := &tables.Services[id]; service.State != lbmap.ServiceFree {
			_, name, _ := service.SplitName()
			ids[name] = uint32(id)
		}
	}
	words := map[string]*uint64{}
	for _, c := range n.Table().All() {
		set := c.New.Frontends[0].Routes[proxier.FromPod].Set
		words[c.New.Name.Name] = &tables.Sets[ids[c.New.Name.Name]*lbmap.SetsPerService+uint32(set)]
	}
	return words
}
