// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
)

// benchCluster is a cluster as sources hand it over.
func benchCluster(services, endpoints int) ([]*v1.Service, []*discoveryv1.EndpointSlice) {
	ss := make([]*v1.Service, services)
	es := make([]*discoveryv1.EndpointSlice, services)
	for i := range services {
		name := fmt.Sprintf("service-%d", i)
		ip := fmt.Sprintf("10.%d.%d.%d", 100+i>>16, i>>8&255, i&255)
		ss[i] = &v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: name, UID: "0"},
			Spec:       v1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip}, Ports: []v1.ServicePort{{Name: "http", Port: 80, Protocol: v1.ProtocolTCP}}},
		}
		es[i] = benchSlice(i, name, endpoints, 0)
	}
	return ss, es
}

func benchSlice(i int, service string, endpoints, first int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "bench", Name: service + "-x", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080), Protocol: ptr.To(v1.ProtocolTCP)}},
		Endpoints:   make([]discoveryv1.Endpoint, endpoints),
	}
	for j := range endpoints {
		n := i*8 + first + j
		s.Endpoints[j] = discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("172.%d.%d.%d", 16+n>>16, n>>8&255, n&255)},
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
			NodeName:   ptr.To("node1"),
		}
	}
	return s
}

// benchNode opens the tier on a cgroup of its own with maps of the given sizes.
func benchNode(b *testing.B, s Sizes) *node {
	b.Helper()
	l := lab.NewT(b)
	return newNode(b, l.Node("node1"), l, Options{Sizes: s})
}

var benchSizes = Sizes{Frontends: 1 << 17, Services: 1 << 16, Backends: 1 << 19, Slots: 1 << 20, Affinity: 1 << 10, UDPPeers: 1 << 10, OptOuts: 16}

// BenchmarkControlPlane measures the way from Kubernetes objects to real BPF
// maps: 50,000 Services of one port and one endpoint, inserted and deleted.
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
		if used := n.tier.writer.usedFrontends; used != services {
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
		n.tier.writer.check(b)
		n.close()
	}
	count := float64(services * b.N)
	b.ReportMetric(count/insert.Seconds(), "services/s")
	b.ReportMetric(count/remove.Seconds(), "deletes/s")
	b.ReportMetric(float64(mallocs)/count, "objs/service")
	b.ReportMetric(float64(bytes)/count, "B/service")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkEndpointChange measures one changed endpoint among 50,000 Services
// and 250,000 endpoints: from the handler's call to the store that the next
// connection reads.
func BenchmarkEndpointChange(b *testing.B) {
	const services, endpoints = 50000, 5
	n := benchNode(b, benchSizes)
	ss, es := benchCluster(services, endpoints)
	for i := range ss {
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

	took := make([]time.Duration, 0, b.N)
	for i := range b.N {
		service := i * 7919 % services
		word := n.wordOf(service)
		before := *word
		idle(b, opts.MinInterval+2*time.Millisecond) // a quiet period
		// The event is decoded just before its handler is called.
		slice := benchSlice(service, ss[service].Name, endpoints, 1+i/services%2)
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

// BenchmarkColdStart measures 50,000 Services with 250,000 endpoints from
// memory into empty maps, and the restart of a process that finds them there.
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
		n.close()
		runtime.GC()

		start = time.Now()
		n.start(b, Options{Sizes: benchSizes})
		feed()
		restart += time.Since(start)
		if n.tier.writer.writes != 0 {
			b.Fatalf("the restart wrote %d times", n.tier.writer.writes)
		}
		n.close()
	}
	b.ReportMetric(cold.Seconds()*1e3/float64(b.N), "cold-ms")
	b.ReportMetric(restart.Seconds()*1e3/float64(b.N), "restart-ms")
	b.ReportMetric(0, "ns/op")
}

// wordOf is where the cluster set of the i-th Service's only port is published.
func (n *node) wordOf(i int) *uint64 {
	w := n.tier.writer
	return &w.tables.sets[w.ports[i].id*setsPerService+uint32(proxier.V4Cluster)]
}
