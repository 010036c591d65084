// SPDX-License-Identifier: Apache-2.0

//go:build linux

package rules

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestPortChanges: the port of an endpoint in the host's network changes back and forth between two processes that listen all the time. No
// connection of the node is refused meanwhile, in either variant.
func TestPortChanges(t *testing.T) {
	const rate, services, changes = 500, 300, 40
	for _, variant := range []xtables.Variant{xtables.NFT, xtables.Legacy} {
		t.Run(variant.String(), func(t *testing.T) {
			g := newGround(t, variant, services, 2)
			ports := [2]int32{7001, 7002}
			accepted := [2]*atomic.Int64{countAccepts(t, g.node, ports[0]), countAccepts(t, g.node, ports[1])}
			at := func(i int) *discoveryv1.EndpointSlice {
				s := slice("shop", "web", g.pods[0])
				s.Endpoints[0].Addresses = []string{g.node.Addr4.String()}
				s.Ports[0].Port = &ports[i]
				return s
			}
			g.objects[len(g.objects)-1] = at(0)
			proxy := ours(t, variant)
			proxy.opts.Args = append(proxy.opts.Args, "--iptables-min-sync-period=50ms")
			p, _, _, err := g.start(t.Context(), t, proxy)
			if err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			load := make(chan lab.Dials, 1)
			go func() { load <- g.node.DialOften(ctx, "tcp", dialled, rate) }()
			for i := 1; i <= changes; i++ {
				to := accepted[i%2]
				before := to.Load()
				p.API.Put(at(i % 2))
				lab.Await(t, 10*time.Second, "connections at the other port", func() error {
					if to.Load() == before {
						return errors.New("there is none")
					}
					return nil
				})
			}
			stop()
			if d := <-load; d.Failed > 0 {
				t.Errorf("%d of %d connections failed: %v", d.Failed, d.All, d.Err)
			} else {
				t.Logf("%d connections, the slowest took %v", d.All, d.Slowest)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// countAccepts accepts and closes connections at a port of a node until the test ends.
func countAccepts(t *testing.T, node *lab.Node, port int32) *atomic.Int64 {
	t.Helper()
	var l net.Listener
	if err := node.Do(func() (err error) {
		l, err = net.Listen("tcp4", net.JoinHostPort(netip.IPv4Unspecified().String(), strconv.Itoa(int(port))))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	count := new(atomic.Int64)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			count.Add(1)
			_ = c.Close()
		}
	}()
	return count
}
