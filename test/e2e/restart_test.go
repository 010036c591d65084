// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

var kills = flag.Int("kills", 0, "how often tests kill the process; 0 leaves it to each")

// I3, I4: the process is killed again and again, at any moment of its life,
// and started again, which replaces the programs each time. No new connection
// fails meanwhile, and no old one breaks.
func TestKill(t *testing.T) {
	l := lab.NewT(t)
	node := l.Node("node1")
	a, b, client := serve(t, node.Pod("a")), serve(t, node.Pod("b")), node.Pod("client")
	dir := t.TempDir()
	writeManifests(t, dir, clusterIPs, a, b)
	killAgain(t, 100, node, dir, client.Sandbox, targets(), a, b)
	cleanup(t, node)
}

// killAgain kills the process of a node the given number of times, unless -kills is set, while
// a client uses the Service. In short mode, it kills a tenth of them. The last process is
// killed as well.
func killAgain(t *testing.T, times int, node *lab.Node, dir string, client *lab.Sandbox, ways map[string]netip.AddrPort, pods ...*lab.Pod) {
	t.Helper()
	times = kernel.Rounds(times)
	if *kills > 0 {
		times = *kills
	}
	p := start(t, node, dir)
	defer func() { _ = p.Close() }()
	p.serves(t)
	long := openFlows(t, client, ways, pods...)
	check := func() {
		t.Helper()
		for _, f := range long {
			f.check(t)
		}
	}

	w := lab.NewLoad(t)
	defer w.End()
	w.Use(client, ways, lab.Pace{})
	random := rand.New(rand.NewPCG(1, 2))
	var takes time.Duration
	killed := 0
	for ; killed < times && !t.Failed(); killed++ {
		_ = p.Close()
		began := time.Now()
		p = start(t, node, dir)
		if killed%2 == 0 {
			p.serves(t)
			takes = time.Since(began)
		} else {
			// At any moment: loading, adopting, replacing, syncing.
			<-time.After(time.Duration(random.Int64N(int64(takes))))
		}
		check()
	}
	p.serves(t)
	check()
	w.End()
	t.Logf("%d requests while the process was killed %d times, %d failed", w.Asked.Load(), killed, w.Failed.Load())
}

// cleanup runs kube-proxy --cleanup on the node.
func cleanup(t testing.TB, n *lab.Node) {
	t.Helper()
	p := command(n, "--cleanup")
	if err := p.Run(); err != nil {
		t.Errorf("--cleanup: %v\n%s", err, p.Log)
	}
}

// Changes while no process runs are applied by the next one.
func TestChangesWhileDown(t *testing.T) {
	l := lab.NewT(t)
	node := l.Node("node1")
	a, b, client := serve(t, node.Pod("a")), serve(t, node.Pod("b")), node.Pod("client")
	dir := t.TempDir()
	writeManifests(t, dir, clusterIPs, a)
	p := start(t, node, dir)
	defer func() {
		_ = p.Close()
		cleanup(t, node)
	}()
	p.synced(t)
	_ = p.Close()
	if r, err := client.Ask(t.Context(), "tcp", vip4); err != nil || r.Server != "a" {
		t.Fatalf("with no process: %v %v", r, err)
	}
	writeManifests(t, dir, clusterIPs, b)
	p = start(t, node, dir)
	p.await(t, "the new endpoint", func() error {
		r, err := client.Ask(t.Context(), "tcp", vip4)
		if err != nil {
			t.Fatal(err)
		}
		if r.Server != "b" {
			return fmt.Errorf("%s answers", r.Server)
		}
		return nil
	})
}
