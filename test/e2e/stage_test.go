// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// stage has a Service with an endpoint on this node and one on another node, a client in a pod
// of this node and one outside the cluster, and the process of this node.
type stage struct {
	*process
	t                   testing.TB
	lab                 *lab.Lab
	node                *lab.Node
	here, there, client *lab.Pod
	far                 *lab.Client
	dir                 string // of the manifests
}

// newStage makes a stage without a process.
func newStage(t testing.TB, opts ...lab.Options) *stage {
	t.Helper()
	l := lab.NewT(t, opts...)
	n := l.Node("node1")
	s := &stage{
		t: t, lab: l, node: n, here: serve(t, n.Pod("here")), there: serve(t, l.Node("node2").Pod("there")),
		client: n.Pod("client"), far: l.Client("client"), dir: t.TempDir(),
	}
	announce(t, l, n, outside(n))
	writeManifests(t, s.dir, loadBalancer, s.here, s.there)
	return s
}

// start replaces the current process by one with these flags.
func (s *stage) start(flags ...string) {
	s.t.Helper()
	if s.process != nil {
		s.Terminate(s.t)
	}
	s.process = start(s.t, s.node, s.dir, flags...)
	s.synced(s.t)
}

// end removes everything from the kernel.
func (s *stage) end() {
	if s.process != nil {
		_ = s.Close()
	}
	cleanup(s.t, s.node)
}

// open opens flows to all targets from the pod, from the node itself and from outside.
func (s *stage) open() []flow {
	s.t.Helper()
	return slices.Concat(
		openFlows(s.t, s.client.Sandbox, targets(), s.here, s.there),
		openFlows(s.t, s.node.Sandbox, targets(), s.here, s.there),
		openFlows(s.t, s.far.Sandbox, outside(s.node), s.here, s.there))
}

// gently limits the rate, and repeats a request once. For some seconds after a change of mode,
// both modes use source ports of this node without knowing those of the other, and a port can
// have only one connection to an endpoint. few limits how often such collisions may happen.
var gently = lab.Pace{Every: 10 * time.Millisecond, Tries: 2, Reconnect: true}

// strictly repeats no connection.
var strictly = lab.Pace{Every: 10 * time.Millisecond, Tries: 2}

// slowly is for emulated machines.
var slowly = lab.Pace{Every: 200 * time.Millisecond, Tries: 2, Reconnect: true}

// few fails if many requests had to be repeated.
func few(t testing.TB, w *lab.Load) {
	t.Helper()
	asked, again := w.Asked.Load(), w.Again.Load()
	if again > 1+asked/1000 {
		t.Errorf("%d of %d requests had to be repeated, the first ones:\n%s", again, asked, strings.Join(w.Repeated(), "\n"))
	}
	t.Logf("%d requests, %d each second, %d of them repeated, %d more as their sockets were destroyed", asked, w.PerSecond(), again, w.Told.Load())
}

// ask adds both clients, with all targets, to a load.
func (s *stage) ask(w *lab.Load, p lab.Pace) {
	w.Use(s.client.Sandbox, targets(), p)
	w.Use(s.far.Sandbox, outside(s.node), p)
}

func checkAll(t testing.TB, flows []flow) {
	t.Helper()
	for _, f := range flows {
		f.check(t)
	}
}
