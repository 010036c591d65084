// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"net/netip"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// outage is how long the control plane is away.
const outage = time.Minute

// TestOutage: without an API server, running kube-proxies continue to serve, and a restarted one
// serves from the first packet on. Changes made after the API server's return are served soon.
func TestOutage(t *testing.T) {
	c := newCluster(t, 2, inMode("ebpf"))
	one, two := c.nodes[0], c.nodes[1]
	web1, web2 := c.run(one, "web", "web-1"), c.run(two, "web", "web-2")
	inside := []*lab.Sandbox{one.Sandbox, two.Pod("shell").Sandbox}
	all := c.startAll()
	to := vip(c.expose("web"), 0)
	c.answer("before", to, inside, web1, web2)
	// Not later: a starting API server refuses all requests until it has loaded its RBAC rules.
	c.nothingRefused()
	l := lab.NewLoad(t)
	defer l.End()
	for _, from := range inside {
		l.Use(from, map[string]netip.AddrPort{"tcp": to, "udp": to}, lab.Pace{Every: 5 * time.Millisecond}) // the machine has more to do
	}

	c.plane.stopServers()
	down := time.NewTimer(outage)
	defer down.Stop()
	_ = all[1].Close() // as kill -9 does
	all[1] = c.restart(two, ourBinary(t))
	before := l.Asked.Load()
	select {
	case <-down.C:
	case <-t.Context().Done():
	}
	if l.Asked.Load() == before {
		t.Error("no requests were sent while the API server was away")
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
	l.End()
	t.Logf("changes were served %v after the API server was back; %d requests", time.Since(began).Round(time.Millisecond), l.Asked.Load())
}
