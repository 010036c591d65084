// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	if targets := os.Getenv(asClient); targets != "" {
		fmt.Fprintln(os.Stderr, clientMain(targets))
		os.Exit(1)
	}
	lab.Main()
	os.Exit(m.Run())
}

// TestInstall follows the page in its order. Each part begins and ends with upstream's kube-proxy, and
// consists of steps. None is played after one that fails.
func TestInstall(t *testing.T) {
	p, err := readPage(source + "/docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	preflight, err := readPage(source + "/docs/preflight.md")
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	i := &install{cluster: newCluster(t, directory(t), "node1", "node2"), page: p, preflight: preflight}
	i.serve()
	t.Logf("the cluster took %v", time.Since(began).Round(time.Second))
	i.baseline()
	for _, part := range []struct {
		name string
		play func()
	}{
		{"before", i.before},
		{"patch, upgrade and roll back", i.patchUpgradeRollBack},
		{"carefully", i.carefully},
		{"undo alone", i.undoAlone},
		{"without the grace period", i.withoutGrace},
		{"cleanup", i.cleanup},
		{"ConfigMap", i.configMap},
		{"opt-outs", i.optOuts},
		{"kubeadm upgrade", i.kubeadmUpgrade},
		{"chart", i.chart},
		{"coexistence", i.coexistence},
		{"restart of a node", i.restart},
		{"klipper-lb", i.klipperLB},
	} {
		if !t.Run(part.name, func(t *testing.T) { i.part(t, part.play) }) {
			t.FailNow()
		}
	}
}

// directory is always the same one, as nodes write gigabytes: what a run has left that was killed, the
// next one removes.
func directory(t *testing.T) string {
	dir := filepath.Join(os.TempDir(), "tandem-install")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	lock, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		t.Fatalf("another run uses %s: %v", dir, err)
	}
	empty := func() error {
		files, err := filepath.Glob(dir + "/*")
		for _, file := range files {
			err = errors.Join(err, os.RemoveAll(file))
		}
		return err
	}
	if err := empty(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(empty(), os.Remove(dir), lock.Close()); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// install is an installation by the page.
type install struct {
	*cluster
	page, preflight page
	// rate is the part of attempts that fails with upstream's kube-proxy alone.
	rate float64
}

// part plays a part, with clients of its own.
func (i *install) part(t *testing.T, play func()) {
	outer := i.tb
	i.tb = t
	i.startClients()
	defer func() {
		i.stopClients()
		i.tb = outer
	}()
	play()
}

// baseline is upstream's kube-proxy, of which endpoints change.
func (i *install) baseline() {
	i.startClients()
	defer i.stopClients()
	i.upstream()
	tried, failed := i.count(func() {
		i.follows()
		time.Sleep(baselineTime)
	})
	i.rate = float64(failed) / float64(tried)
	i.tb.Logf("upstream's kube-proxy alone: %d of %d failed", failed, tried)
}

const baselineTime = 15 * time.Second

// step plays a step, in which not more connections may fail than with upstream's kube-proxy alone.
func (i *install) step(name string, play func()) {
	i.tb.Helper()
	began := time.Now()
	tried, failed := i.count(play)
	i.tb.Logf("STEP %s: %d of %d failed in %v", name, failed, tried, time.Since(began).Round(time.Second))
	if float64(failed) > i.rate*float64(tried) {
		i.tb.Fatalf("%s: %d of %d failed; with upstream's kube-proxy alone the part that fails is %g", name, failed, tried, i.rate)
	}
}

// count plays something, and counts attempts and failures meanwhile.
func (i *install) count(play func()) (tried, failed int) {
	i.tb.Helper()
	i.counted()
	play()
	for where, counted := range i.counted() {
		for kind := range counted.Tried {
			tried += counted.Tried[kind]
			failed += counted.Failed[kind]
		}
		i.tb.Logf("%s, failed: %s", where, counted)
	}
	return tried, failed
}

// block is one of those below a heading, with replacements, pairs of old and new text.
func (i *install) block(heading string, number int, replace ...string) string {
	i.tb.Helper()
	if number >= len(i.page[heading]) {
		i.tb.Fatalf("below %q the page has %d blocks, not %d", heading, len(i.page[heading]), number+1)
	}
	commands := i.page[heading][number]
	for n := 0; n < len(replace); n += 2 {
		if !strings.Contains(commands, replace[n]) {
			i.tb.Fatalf("block %d below %q does not have %q:\n%s", number, heading, replace[n], commands)
		}
		commands = strings.ReplaceAll(commands, replace[n], replace[n+1])
	}
	return commands
}

// follow runs a block, and returns what it says.
func (i *install) follow(heading string, number int, replace ...string) string {
	i.tb.Helper()
	return i.run(i.block(heading, number, replace...))
}

// run runs commands, which have to succeed.
func (i *install) run(commands string) string {
	i.tb.Helper()
	out, err := i.shell(commands)
	if err != nil {
		i.tb.Fatalf("%v", err)
	}
	i.tb.Logf("%s\n%s", commands, out)
	return out
}

// patience is how long anything may take that is waited for. Programs leave connections to another
// kube-proxy after 30 s.
const patience = time.Minute

// await runs commands until they succeed, and say something.
func (i *install) await(commands, something string) {
	i.tb.Helper()
	lab.Await(i.tb, patience, something, func() error {
		out, err := i.shell(commands)
		if err == nil && !strings.Contains(out, something) {
			err = fmt.Errorf("%s\nsays no %q:\n%s", commands, something, out)
		}
		return err
	})
}

// serves waits until the kube-proxy of each node runs in a mode and is healthy.
func (i *install) serves(mode string) {
	i.tb.Helper()
	i.answers(mode, "/healthz")
}

// answers waits until the kube-proxy of each node runs in a mode, and an URL of its health server has
// status 200.
func (i *install) answers(mode, url string) {
	i.tb.Helper()
	lab.Await(i.tb, patience, "mode "+mode, func() error {
		for _, n := range i.nodes {
			if got, err := n.Fetch(i.tb.Context(), 10249, "/proxyMode"); err != nil || got != mode {
				return fmt.Errorf("/proxyMode on %s says %q; error %v", n.Name, got, err)
			}
			if _, err := n.Fetch(i.tb.Context(), 10256, url); err != nil {
				return err
			}
		}
		return nil
	})
}
