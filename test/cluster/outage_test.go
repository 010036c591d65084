// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// load is clients that make one connection after the other, each of which has to be
// answered.
type load struct {
	tb    testing.TB
	ctx   context.Context
	stop  context.CancelFunc
	all   sync.WaitGroup
	asked atomic.Int64
}

// newLoad has a client for each protocol in each of the sandboxes.
func (c *cluster) newLoad(to netip.AddrPort, from ...*lab.Sandbox) *load {
	l := &load{tb: c.tb}
	l.ctx, l.stop = context.WithCancel(c.tb.Context())
	for _, s := range from {
		for _, network := range []string{"tcp", "udp"} {
			l.all.Go(func() { l.ask(s, network, to) })
		}
	}
	return l
}

func (l *load) ask(from *lab.Sandbox, network string, to netip.AddrPort) {
	for l.ctx.Err() == nil {
		if _, err := from.Ask(l.tb.Context(), network, to); err != nil {
			l.tb.Errorf("%v", err)
			return
		}
		l.asked.Add(1)
		select {
		case <-l.ctx.Done():
		case <-time.After(5 * time.Millisecond): // the machine has more to do
		}
	}
}

// end waits until no client asks any more.
func (l *load) end() {
	l.tb.Helper()
	l.stop()
	l.all.Wait()
	if l.asked.Load() == 0 {
		l.tb.Error("nobody asked")
	}
	l.tb.Logf("%d requests", l.asked.Load())
}

// outage is how long the control plane is away.
const outage = time.Minute

// TestOutage: without an API server everything goes on as it is, for kube-proxies that were
// there before and, from the first packet on, after a restart of one; what changes with
// the API server's return is served soon after.
func TestOutage(t *testing.T) {
	c := newCluster(t, 2, inMode("ebpf"))
	one, two := c.nodes[0], c.nodes[1]
	web1, web2 := c.run(one, "web", "web-1"), c.run(two, "web", "web-2")
	inside := []*lab.Sandbox{one.Sandbox, two.Pod("shell").Sandbox}
	all := c.startAll()
	to := vip(c.expose("web"), 0)
	c.answer("before", to, inside, web1, web2)
	// Not later: an API server refuses everybody until it knows who may do what.
	c.nothingRefused()
	l := c.newLoad(to, inside...)
	defer l.end()

	c.plane.stopServers()
	down := time.NewTimer(outage)
	defer down.Stop()
	_ = all[1].Close() // as kill -9 does
	all[1] = c.restart(two, ourBinary(t))
	before := l.asked.Load()
	select {
	case <-down.C:
	case <-t.Context().Done():
	}
	if l.asked.Load() == before {
		t.Error("nobody asked while the API server was away")
	}
	if _, err := all[0].get(10256, "/healthz"); err != nil {
		t.Errorf("health without an API server: %v", err)
	}

	if err := c.plane.startServers(t.Context()); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	web3 := c.run(one, "web", "web-3")
	c.answer("the API server is back", to, inside, web1, web2, web3)
	c.terminate(web1)
	c.answer("an endpoint goes", to, inside, web2, web3)
	t.Logf("changes were served %v after the API server was back", time.Since(began).Round(time.Millisecond))
}
