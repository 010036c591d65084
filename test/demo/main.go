// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

func main() {
	self, _ := os.Executable()
	bin := flag.String("bin", filepath.Dir(self), "directory with kube-proxy and tandemctl")
	shell := flag.Bool("shell", false, "instead of the demo, run a shell on a node of its cluster, or the command that follows")
	askTo := flag.String("ask", "", "in such a shell: send a request to this ADDRESS:PORT[/udp]")
	keep := flag.Duration("keep", 0, "keep the connection of -ask for this time")
	flag.Parse()
	if *askTo != "" {
		if err := ask(*askTo, *keep); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}

	if err := available(*bin); err != nil {
		fmt.Fprintf(os.Stderr, "The demo cannot run here: %v\n", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second Ctrl-C interrupts the clean-up too.
	context.AfterFunc(ctx, stop)

	start := time.Now()
	out := newScreen(os.Stdout)
	c := &cluster{out: out, bin: *bin}
	var err error
	if *shell {
		err = openShell(ctx, c, flag.Args())
	} else {
		err = play(ctx, c)
	}
	if err != nil && ctx.Err() == nil {
		c.showLogs()
	}
	left := c.close()

	out.blank()
	switch {
	case left != nil:
		out.bad("The demo failed to clean up: %v", errors.Join(err, left))
		os.Exit(1)
	case ctx.Err() != nil:
		out.say("Interrupted. Everything that the demo created is removed.")
		os.Exit(130)
	case err != nil:
		out.bad("The demo failed: %v", err)
		os.Exit(1)
	}
	if *shell {
		return
	}
	out.good("All steps succeeded in %.0f s. Everything that the demo created is removed.", time.Since(start).Seconds())
}

// available returns what is missing, before anything is created.
func available(bin string) error {
	if os.Geteuid() != 0 {
		self, _ := os.Executable()
		return fmt.Errorf("network namespaces, cgroups and eBPF require root. Try: sudo %s", self)
	}
	if err := lab.Available(); err != nil {
		return fmt.Errorf("%w (the demo requires a writable cgroup2 mount: mount -t cgroup2 none /sys/fs/cgroup)", err)
	}
	for _, name := range []string{"kube-proxy", "tandemctl"} {
		if _, err := os.Stat(filepath.Join(bin, name)); err != nil {
			return fmt.Errorf("%w (run: make build)", err)
		}
	}
	return nil
}

// play runs the steps in order, up to the first that fails.
func play(ctx context.Context, c *cluster) error {
	for _, step := range []func(context.Context, *cluster) error{
		createCluster,
		startProxies,
		showDistribution,
		showTools,
		changeEndpoints,
		killProxy,
		restartProxy,
		cleanUp,
	} {
		if err := step(ctx, c); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}
