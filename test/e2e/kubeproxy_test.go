// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tandem-proxy/tandem/test/lab"
)

// process is a kube-proxy on a node.
type process struct {
	*lab.Cmd
	log *lab.Log
}

func command(n *lab.Node, args ...string) *process {
	p := &process{n.Command(context.Background(), os.Args[0], append(args, "--ebpf-cgroup-root="+n.CgroupPath())...), &lab.Log{}}
	p.Env = append(os.Environ(), asProxy+"=1")
	p.Stdout, p.Stderr = p.log, p.log
	return p
}

func start(t testing.TB, n *lab.Node, manifests string, more ...string) *process {
	t.Helper()
	return begin(t, command(n, append([]string{"--proxy-mode=ebpf", "--manifests=" + manifests, "--hostname-override=" + n.Name, "-v=2"}, more...)...))
}

// begin has a command run up to the end of the test.
func begin(t testing.TB, p *process) *process {
	t.Helper()
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Close()
		if t.Failed() {
			t.Logf("log of kube-proxy:\n%s", p.log)
		}
	})
	return p
}

// kill ends the process as kill -9 does.
func (p *process) kill() {
	_ = p.Process.Kill()
	_ = p.Wait()
}

// synced waits until the process has programmed everything.
func (p *process) synced(t testing.TB) {
	t.Helper()
	p.await(t, "the first sync", p.says(`"Synced"`))
}

// serves waits until the process also serves clients outside.
func (p *process) serves(t testing.TB) {
	t.Helper()
	p.synced(t)
	p.await(t, "the uplinks", p.says(`"Clients outside come in`))
}

func (p *process) says(text string) func() error {
	return func() error {
		if !strings.Contains(p.log.String(), text) {
			return fmt.Errorf("the log does not say %q", text)
		}
		return nil
	}
}

// terminate sends SIGTERM and expects an orderly end.
func (p *process) terminate(t *testing.T) {
	t.Helper()
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err != nil {
		t.Fatalf("after SIGTERM: %v\n%s", err, p.log)
	}
}

const (
	patience = 30 * time.Second
	interval = 5 * time.Millisecond
)

// errEnded is that of a process that cannot do what is awaited any more.
var errEnded = errors.New("kube-proxy has ended")

// await polls until a condition holds, and says why it does not.
func await(t testing.TB, what string, condition func() error) {
	t.Helper()
	awaitWithin(t, patience, what, condition)
}

func awaitWithin(t testing.TB, limit time.Duration, what string, condition func() error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), interval, limit, true, func(context.Context) (bool, error) {
		last = condition()
		if errors.Is(last, errEnded) {
			return false, last
		}
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("%s: %v", what, last)
	}
}

// await polls as the function does, while the process lives.
func (p *process) await(t testing.TB, what string, condition func() error) {
	t.Helper()
	await(t, what, func() error {
		ended := p.ended()
		err := condition()
		if err != nil && ended {
			return fmt.Errorf("%w: %w", err, errEnded)
		}
		return err
	})
}

// ended says whether the process waits for nothing but being waited for.
func (p *process) ended() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
	_, state, _ := bytes.Cut(stat, []byte(") ")) // after the name, which may hold anything
	return err != nil || bytes.HasPrefix(state, []byte("Z"))
}
