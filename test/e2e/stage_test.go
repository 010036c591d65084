// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// stage is a Service with an endpoint on this node and one on another, a client in a pod
// of this node and one outside, and the process of this node.
type stage struct {
	*process
	t                   *testing.T
	node                *lab.Node
	here, there, client *lab.Pod
	far                 *lab.Client
	dir                 string // of the manifests
}

// newStage has no process yet.
func newStage(t *testing.T, opts ...lab.Options) *stage {
	t.Helper()
	l := lab.NewT(t, opts...)
	n := l.Node("node1")
	s := &stage{
		t: t, node: n, here: serve(t, n.Pod("here")), there: serve(t, l.Node("node2").Pod("there")),
		client: n.Pod("client"), far: l.Client("client"), dir: t.TempDir(),
	}
	announce(t, l, n, outside(n))
	writeManifests(t, s.dir, loadBalancer, s.here, s.there)
	return s
}

// start has a process with these flags take the place of the one there is.
func (s *stage) start(flags ...string) {
	s.t.Helper()
	if s.process != nil {
		s.Terminate(s.t)
	}
	s.process = start(s.t, s.node, s.dir, flags...)
	s.synced(s.t)
}

// end leaves nothing in the kernel.
func (s *stage) end() {
	_ = s.Close()
	cleanup(s.t, s.node)
}

// open opens flows by all ways from both clients.
func (s *stage) open() []flow {
	s.t.Helper()
	return append(openFlows(s.t, s.client.Sandbox, targets(), s.here, s.there), openFlows(s.t, s.far.Sandbox, outside(s.node), s.here, s.there)...)
}

// gently is not as fast as one can, and asks twice: for some seconds after a change of
// mode, both have source ports of this node that the other does not know of, and at an
// endpoint there can be but one connection from such a port. few says how often that may
// show.
var gently = lab.Pace{Every: 10 * time.Millisecond, Tries: 2}

// slowly is for machines that are emulated.
var slowly = lab.Pace{Every: 200 * time.Millisecond, Tries: 2}

// few reports requests that had to be made again, if those were many.
func few(t *testing.T, w *lab.Load) {
	t.Helper()
	asked, again := w.Asked.Load(), w.Again.Load()
	if again > 1+asked/1000 {
		t.Errorf("%d of %d requests had to be made again", again, asked)
	}
	t.Logf("%d requests, %d of them made again", asked, again)
}

// ask adds both clients, by all ways, to a load.
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
