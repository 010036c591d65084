// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

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

// TestInstall follows the page in its order. Each step begins where the last one ended, so none is
// played after one that fails.
func TestInstall(t *testing.T) {
	p, err := readPage(source + "/docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	c := newCluster(t, t.TempDir(), "node1")
	c.serve()
	c.failures() // until now
	i := &install{cluster: c, page: p}
	for _, s := range []struct {
		name string
		do   func()
	}{
		{"upstream alone", i.baseline},
		{"patch", i.patch},
		{"see that it works", i.see},
		{"undo", i.undo},
	} {
		if !t.Run(s.name, func(t *testing.T) { i.step(t, s.do) }) {
			t.FailNow()
		}
	}
}

// install is an installation of the page's.
type install struct {
	*cluster
	page page
	// rate is the part of attempts that fails with upstream's kube-proxy alone.
	rate float64
}

// step plays one step under load. Not more connections may fail than with upstream's kube-proxy alone.
func (i *install) step(t *testing.T, do func()) {
	outer := i.tb
	i.tb = t
	defer func() { i.tb = outer }()
	began := time.Now()
	do()
	tried, failed := i.failures()
	t.Logf("%d of %d failed in %v", failed, tried, time.Since(began).Round(time.Second))
	if float64(failed) > i.rate*float64(tried) {
		t.Errorf("%d of %d failed; with upstream's kube-proxy alone it is a part of %g", failed, tried, i.rate)
	}
}

// baseline is upstream's kube-proxy.
func (i *install) baseline() {
	i.rate = 1
	i.follows()
	time.Sleep(baselineTime)
	tried, failed := i.failures()
	i.rate = float64(failed) / float64(tried)
}

const baselineTime = 20 * time.Second

// block is one of those below a heading, by its number.
func (i *install) block(heading string, number int) string {
	i.tb.Helper()
	if number >= len(i.page[heading]) {
		i.tb.Fatalf("below %q the page has %d blocks, not %d", heading, len(i.page[heading]), number+1)
	}
	return i.page[heading][number]
}

// follow runs a block.
func (i *install) follow(heading string, number int, replace ...string) string {
	i.tb.Helper()
	commands := i.block(heading, number)
	for n := 0; n < len(replace); n += 2 {
		if !strings.Contains(commands, replace[n]) {
			i.tb.Fatalf("block %d below %q does not have %q:\n%s", number, heading, replace[n], commands)
		}
		commands = strings.ReplaceAll(commands, replace[n], replace[n+1])
	}
	out, err := i.shell(commands)
	if err != nil {
		i.tb.Fatalf("%v", err)
	}
	i.tb.Logf("%s\n%s", commands, out)
	return out
}

func (i *install) patch() {
	i.follow("kubeadm and kind", 0)
	i.serves("ebpf")
	i.follows()
}

// serves waits until all nodes run a mode of ours.
func (i *install) serves(mode string) {
	i.tb.Helper()
	lab.Await(i.tb, time.Minute, "mode "+mode, func() error {
		for _, n := range i.nodes {
			if got, err := n.Fetch(i.tb.Context(), 10249, "/proxyMode"); err != nil || got != mode {
				return fmt.Errorf("/proxyMode on %s says %q; error %v", n.Name, got, err)
			}
			if _, err := n.Fetch(i.tb.Context(), 10256, "/healthz"); err != nil {
				return err
			}
		}
		return nil
	})
}

func (i *install) see() {
	said := i.follow("See that it works", 0)
	if !strings.Contains(said, "mode") {
		i.tb.Errorf("no mode")
	}
}

// undo goes back without any other step of the page.
func (i *install) undo() {
	i.kubectl("-n", "kube-system", "rollout", "undo", "daemonset", "kube-proxy")
	i.rollout("kube-system", "daemonset/kube-proxy")
	i.serves("iptables")
	i.follows()
}
