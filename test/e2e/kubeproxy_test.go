// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// process is a kube-proxy on a node.
type process struct{ *lab.Watched }

func command(n *lab.Node, args ...string) *process {
	flags := []string{"--ebpf-cgroup-root=" + n.CgroupPath(), "--ebpf-capability-mask=" + kernel.Mask()}
	c := n.Command(context.Background(), os.Args[0], append(flags, args...)...)
	c.Env = append(os.Environ(), asProxy+"=1")
	return &process{lab.Watch(c)}
}

func start(t testing.TB, n *lab.Node, manifests string, more ...string) *process {
	t.Helper()
	needs(t, more)
	return begin(t, of(n, manifests, more...))
}

// needs skips a test in mode ebpf, the default without flags, if the kernel does not support it.
func needs(t testing.TB, flags []string) {
	t.Helper()
	for _, flag := range flags {
		if mode, ok := strings.CutPrefix(flag, "--proxy-mode="); ok && mode != "ebpf" {
			return
		}
	}
	kernel.NeedsPrograms(t)
}

// of is a command that reads Services from manifests.
func of(n *lab.Node, manifests string, more ...string) *process {
	return command(n, append([]string{"--proxy-mode=ebpf", "--manifests=" + manifests, "--hostname-override=" + n.Name, "-v=2"}, more...)...)
}

// without removes a capability of a command.
func (p *process) without(capability uintptr) *process {
	p.Env = append(p.Env, fmt.Sprintf("%s=%d", lacking, capability))
	return p
}

// begin runs a command until the end of the test.
func begin(t testing.TB, p *process) *process {
	t.Helper()
	p.Begin(t)
	return p
}

// synced waits until the process has programmed everything.
func (p *process) synced(t testing.TB) {
	t.Helper()
	p.await(t, "the first sync", p.Says(`"Synced"`))
}

// serves waits until the process also serves clients outside the cluster.
func (p *process) serves(t testing.TB) {
	t.Helper()
	p.synced(t)
	p.await(t, "the uplinks", p.Says(`"Serving clients outside the node`))
}

var patience = 30 * time.Second * lab.Slower()

func await(t testing.TB, what string, condition func() error) {
	t.Helper()
	lab.Await(t, patience, what, condition)
}

// await is lab.Await, but fails at once when the process has ended.
func (p *process) await(t testing.TB, what string, condition func() error) {
	t.Helper()
	p.Await(t, patience, what, condition)
}
