// SPDX-License-Identifier: Apache-2.0

//go:build linux

package staleudp_test

import (
	"context"
	"fmt"
	"iter"
	"net/netip"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
	"github.com/tandem-proxy/tandem/test/lab"
)

const manyEntries = 100_000

// service has one ClusterIP and 256 backends, but for the first of them: one in 256
// entries of fill is stale.
func service() *proxier.Decision {
	d := udp("dns", "clusterip 10.96.0.1:53")
	for i := 1; i < 256; i++ {
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, byte(i)}), backendPort)
		d.Backends = append(d.Backends, proxier.Backend{Addr: a, Members: proxier.InCluster})
	}
	return d
}

// endless is a table whose entries stay.
type endless []conntrack.Flow

func (e endless) Flows(context.Context, proxier.Family) iter.Seq2[conntrack.Flow, error] {
	return func(yield func(conntrack.Flow, error) bool) {
		for _, f := range e {
			if !yield(f, nil) {
				return
			}
		}
	}
}

func (e endless) Delete(_ context.Context, flows []conntrack.Flow) (int, error) {
	return len(flows), nil
}

// comesAndGoes are updates with a Service, and without it again.
func comesAndGoes() (there, gone *proxier.Update) {
	there = change(nil, udp("gone", "external 203.0.113.9:53"))
	return there, change(there.Changes[0].New, nil)
}

// BenchmarkReconcile goes through 100,000 entries among 10,000 Services, of which one
// in 256 is stale, without the kernel.
func BenchmarkReconcile(b *testing.B) {
	var e endless
	for i := range manyEntries {
		e = append(e, conntrack.Flow{
			Protocol:    proxier.UDP,
			Source:      netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, byte(i >> 16), byte(i >> 8)}), uint16(1024+i&255)),
			Destination: netip.MustParseAddrPort("10.96.0.1:53"),
			Replies:     netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, byte(i)}), backendPort),
		})
	}
	u := full(service())
	for i := range 10_000 {
		u.Changes = append(u.Changes, proxier.PortChange{New: udp(fmt.Sprint(i), fmt.Sprintf("clusterip 10.97.%d.%d:53", i>>8, i&255))})
	}
	r := staleudp.New(staleudp.Options{Table: e})
	r.Observe(u)
	there, gone := comesAndGoes()
	b.ReportAllocs()
	for b.Loop() {
		r.Observe(there)
		r.Observe(gone) // so that there is something to do
		if n, err := r.Reconcile(bg, proxier.IPv4); err != nil || n < manyEntries/256 {
			b.Fatal(n, err)
		}
	}
}

// BenchmarkObserve takes over a change of one Service among 10,000.
func BenchmarkObserve(b *testing.B) {
	u := full()
	for i := range 10_000 {
		u.Changes = append(u.Changes, proxier.PortChange{New: udp(fmt.Sprint(i), fmt.Sprintf("clusterip 10.97.%d.%d:53", i>>8, i&255))})
	}
	r := staleudp.New(staleudp.Options{Table: endless{}})
	r.Observe(u)
	there := change(nil, service())
	back := change(there.Changes[0].New, nil)
	b.ReportAllocs()
	for b.Loop() {
		r.Observe(there)
		r.Observe(back)
	}
}

// BenchmarkKernel is a Reconcile with 100,000 UDP and as many TCP entries in the
// kernel: none=stale of one that has nothing to delete, all of one that deletes all
// UDP entries, once.
func BenchmarkKernel(b *testing.B) {
	s := lab.NewT(b).Client("table").Sandbox
	fill(b, s, manyEntries)
	all := service()
	all.Backends = append([]proxier.Backend{{Addr: netip.MustParseAddrPort("10.244.0.0:5353")}}, all.Backends...)
	run := func(b *testing.B, r *staleudp.Reconciler, want int) {
		err := s.Do(func() error {
			n, err := r.Reconcile(bg, proxier.IPv4)
			if n != want {
				b.Errorf("deleted %d, want %d", n, want)
			}
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	r := staleudp.New(staleudp.Options{Table: conntrack.Kernel{}})
	r.Observe(full(all))
	there, gone := comesAndGoes()
	b.Run("stale=none", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			r.Observe(there)
			r.Observe(gone) // so that there is something to do
			run(b, r, 0)
		}
	})
	b.Run("stale=all", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			fill(b, s, manyEntries)
			r.Observe(full(all))
			r.Observe(full())
			b.StartTimer()
			run(b, r, manyEntries)
		}
	})
}
