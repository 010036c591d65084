// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"flag"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"context"

	"github.com/tandem-proxy/tandem/test/lab"
)

var kills = flag.Int("kills", 100, "how often TestKill kills the process")

// I3, I4: the process is killed again and again, at any moment of its life,
// and started again, which replaces the programs each time. No new connection
// fails meanwhile, and no old one breaks.
func TestKill(t *testing.T) {
	l := lab.NewT(t)
	node := l.Node("node1")
	a, b, client := serve(t, node.Pod("a")), serve(t, node.Pod("b")), node.Pod("client")
	dir := t.TempDir()
	writeManifests(t, dir, a, b)
	p := start(t, node, dir)
	defer func() {
		p.kill()
		cleanup(t, node)
	}()
	p.synced(t)
	long := openFlows(t, client)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var asked, failed atomic.Int64
	var wg sync.WaitGroup
	for network, to := range targets() {
		wg.Go(func() {
			for ctx.Err() == nil {
				asked.Add(1)
				if _, err := client.Ask(t.Context(), network[:3], to); err != nil {
					failed.Add(1)
					t.Errorf("%s: %v", network, err)
					return
				}
			}
		})
	}
	random := rand.New(rand.NewPCG(1, 2))
	for i := range *kills {
		p.kill()
		p = start(t, node, dir)
		if i%2 == 0 {
			p.synced(t)
		} else {
			// Wherever it is by then: loading, adopting, replacing, syncing.
			<-time.After(time.Duration(random.IntN(150)) * time.Millisecond)
		}
		long.check(t)
		if t.Failed() {
			break
		}
	}
	p.synced(t)
	long.check(t)
	stop()
	wg.Wait()
	t.Logf("%d requests while the process was killed %d times, %d failed", asked.Load(), *kills, failed.Load())
}

// cleanup runs kube-proxy --cleanup on the node.
func cleanup(t testing.TB, n *lab.Node) {
	t.Helper()
	p := command(n, "--cleanup")
	if err := p.Run(); err != nil {
		t.Errorf("--cleanup: %v\n%s", err, p.log)
	}
}

// What changed while no process ran is applied by the next.
func TestChangesWhileDown(t *testing.T) {
	l := lab.NewT(t)
	node := l.Node("node1")
	a, b, client := serve(t, node.Pod("a")), serve(t, node.Pod("b")), node.Pod("client")
	dir := t.TempDir()
	writeManifests(t, dir, a)
	p := start(t, node, dir)
	defer func() {
		p.kill()
		cleanup(t, node)
	}()
	p.synced(t)
	p.kill()
	if r, err := client.Ask(t.Context(), "tcp", vip4); err != nil || r.Server != "a" {
		t.Fatalf("with no process: %v %v", r, err)
	}
	writeManifests(t, dir, b)
	p = start(t, node, dir)
	waitFor(t, "the new endpoint", 30*time.Second, func() bool {
		r, err := client.Ask(t.Context(), "tcp", vip4)
		if err != nil {
			t.Fatal(err)
		}
		return r.Server == "b"
	})
}
