// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/test/synthetic"
)

// benchFacts are those of node1 of three, in zone z1 of three.
func benchFacts() Facts {
	f := Facts{
		Zone: "z1", ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.64.0.0/10")},
		LocalAddrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
		Pods:       Detector{CIDRs: []netip.Prefix{netip.MustParsePrefix("172.16.0.0/12")}},
	}
	f.NodeIPs[IPv4] = f.LocalAddrs[0]
	return f
}

// BenchmarkTable measures tracker and table among 50,000 Services of every kind
// with 250,000 endpoints: deciding it all anew, and one changed endpoint.
func BenchmarkTable(b *testing.B) {
	const services, endpoints = 50000, 5
	tracker := NewChangeTracker("node1", time.Time{}, nil)
	table := NewTable(benchFacts(), Policy{})
	for i := range services {
		tracker.UpdateService(synthetic.Service(i))
		tracker.UpdateEndpointSlice(synthetic.Slice(i, 0, i*endpoints, endpoints))
	}
	table.Apply(tracker.Take())

	b.Run("objects", func(b *testing.B) {
		for range b.N {
			b.StopTimer()
			var ss [services]*v1.Service
			var es [services]*discoveryv1.EndpointSlice
			for i := range services {
				ss[i], es[i] = synthetic.Service(i), synthetic.Slice(i, 0, i*endpoints, endpoints)
			}
			b.StartTimer()
			tracker, table := NewChangeTracker("node1", time.Time{}, nil), NewTable(benchFacts(), Policy{})
			for i := range services {
				tracker.UpdateService(ss[i])
				tracker.UpdateEndpointSlice(es[i])
			}
			table.Apply(tracker.Take())
		}
	})
	b.Run("full", func(b *testing.B) {
		for range b.N {
			fresh := NewTable(benchFacts(), Policy{})
			b.StopTimer()
			changes := tracker.TakeAll()
			for i := range changes {
				changes[i].entry.ports = nil
			}
			b.StartTimer()
			if n := len(fresh.Apply(changes)); n < services {
				b.Fatalf("%d service ports", n)
			}
			b.StopTimer()
			table = fresh
			b.StartTimer()
		}
	})
	b.Run("event", func(b *testing.B) {
		b.ReportAllocs()
		b.StopTimer()
		// The event is decoded before its handler is called.
		const batch = 1000
		var events [batch]*discoveryv1.EndpointSlice
		changed := 0
		for at := 0; at < b.N; at += batch {
			for k := range events {
				i := (at + k) * 7919 % services
				events[k] = synthetic.Slice(i, 0, i*endpoints, endpoints)
				// Every endpoint is new in half of the rounds.
				events[k].Endpoints[4].Addresses[0] = fmt.Sprintf("172.31.%d.%d", (at+k)/services&255, 1+(at/batch)%250)
			}
			b.StartTimer()
			for k := range min(batch, b.N-at) {
				tracker.UpdateEndpointSlice(events[k])
				changed += len(table.Apply(tracker.Take()))
			}
			b.StopTimer()
		}
		b.ReportMetric(float64(changed)/float64(b.N), "changes/op")
	})
}

// BenchmarkLargeService measures one changed endpoint of a Service that has
// 100,000 in slices of 100.
func BenchmarkLargeService(b *testing.B) {
	const slices, size = 1000, 100
	tracker := NewChangeTracker("node1", time.Time{}, nil)
	table := NewTable(benchFacts(), Policy{})
	tracker.UpdateService(synthetic.Service(1))
	for i := range slices {
		tracker.UpdateEndpointSlice(synthetic.Slice(1, i, i*size, size))
	}
	table.Apply(tracker.Take())
	b.ReportAllocs()
	b.ResetTimer()
	for k := range b.N {
		b.StopTimer()
		i := k * 7919 % slices
		event := synthetic.Slice(1, i, i*size, size)
		event.Endpoints[size-1].Addresses[0] = fmt.Sprintf("172.31.%d.%d", k>>8&255, k&255)
		b.StartTimer()
		tracker.UpdateEndpointSlice(event)
		if n := len(table.Apply(tracker.Take())); n != 1 {
			b.Fatalf("%d changes", n)
		}
	}
}
