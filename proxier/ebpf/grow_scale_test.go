// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/sizing"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestGrowthToScale: from a hundred Services to fifty thousand with five endpoints each, pods open about a thousand connections a
// second. None fails.
func TestGrowthToScale(t *testing.T) {
	const services, endpoints, rate, threads = 50000, 5, 1000, 4
	most := lbmap.DefaultSizes()
	start := sizing.Start(most, 1<<40, 2, sizing.Memory)
	l := lab.NewT(t)
	one := l.Node("node1")
	client, server := one.Pod("client"), serve(t, one.Pod("server"))
	n := newNode(t, one, l, Options{Sizes: most, Start: start})
	n.OnServiceAdd(dualService())
	n.setPods(server)
	add := func(first, last int) {
		for i := first; i < last; i++ {
			name := fmt.Sprintf("fleet-%d", i)
			n.OnServiceAdd(writertest.Service(name, netip.AddrFrom4([4]byte{10, 100, byte(i >> 8), byte(i)}).String()))
			var addrs []string
			for e := range endpoints {
				addrs = append(addrs, netip.AddrFrom4([4]byte{10, byte(110 + e), byte(i >> 8), byte(i)}).String())
			}
			n.OnEndpointSliceAdd(writertest.Slice(name, name, addrs...))
		}
	}
	add(0, 100)
	n.sync(t)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	var asked, failed atomic.Int64
	var longest atomic.Int64
	for range threads {
		wg.Go(func() {
			ticker := time.NewTicker(threads * time.Second / rate)
			defer ticker.Stop()
			for ctx.Err() == nil {
				began := time.Now()
				r, err := client.Ask(context.Background(), "tcp", netip.AddrPortFrom(vip4, 80))
				if asked.Add(1); err != nil || r.Server != server.Name {
					failed.Add(1)
					t.Errorf("a connection: %v %v", r, err)
					return
				}
				for took := int64(time.Since(began)); ; {
					if before := longest.Load(); took <= before || longest.CompareAndSwap(before, took) {
						break
					}
				}
				<-ticker.C
			}
		})
	}
	for first, step := 100, 400; first < services; first, step = first+step, step*3 {
		last := min(first+step, services)
		add(first, last)
		began, steps := time.Now(), n.tier.growth.steps.Load()
		n.sync(t)
		t.Logf("%d Services: %v, %d steps, maps of %.1f MiB", last, time.Since(began).Round(time.Millisecond), n.tier.growth.steps.Load()-steps, float64(n.tier.Growth().Bytes)/(1<<20))
	}
	stop()
	wg.Wait()
	if unplaced := len(n.tier.Unplaced()); unplaced > 0 {
		t.Errorf("%d service ports do not fit", unplaced)
	}
	t.Logf("%d connections, %d failed, the longest took %v", asked.Load(), failed.Load(), time.Duration(longest.Load()))
	checkGeneration(t, n.tier)
}
