// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

const (
	startLimit = 20 * time.Second
	stopLimit  = 10 * time.Second
)

// proxy is the kube-proxy of a node: the real binary, in the node's network
// namespace and cgroup.
type proxy struct {
	node      *lab.Node
	bin       string
	manifests string
	logPath   string

	cmd     *lab.Cmd // nil unless it runs
	ended   chan struct{}
	started bool // it may need a clean-up
}

func (p *proxy) args() []string {
	return []string{
		p.bin, "--proxy-mode=ebpf",
		"--manifests=" + p.manifests,
		"--hostname-override=" + p.node.Name,
		"--ebpf-cgroup-root=" + p.node.CgroupPath(),
		"--cluster-cidr=10.244.0.0/16,fd00:10:244::/48",
	}
}

func (p *proxy) cleanupArgs() []string {
	return []string{p.bin, "--cleanup", "--ebpf-cgroup-root=" + p.node.CgroupPath()}
}

// start runs the binary and waits until it has programmed the kernel.
func (p *proxy) start(ctx context.Context) error {
	log, err := os.OpenFile(p.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	// Not bound to ctx, which would kill it without a clean-up.
	p.cmd = p.command(context.Background(), p.args())
	p.cmd.Stdout, p.cmd.Stderr = log, log
	if err := p.cmd.Start(); err != nil {
		p.cmd = nil
		return fmt.Errorf("start kube-proxy on %s: %w", p.node.Name, err)
	}
	p.started = true
	p.ended = make(chan struct{})
	go func() {
		defer close(p.ended)
		_ = p.cmd.Wait()
	}()

	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		err := p.serves(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.ended:
			return fmt.Errorf("kube-proxy on %s ended: %v", p.node.Name, p.cmd.ProcessState)
		case <-ctx.Done():
			return fmt.Errorf("kube-proxy on %s does not serve within %v: %w", p.node.Name, startLimit, err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// command prepares a command on the node. It has a process group of its own, so that only
// the demo gets a Ctrl-C at the terminal.
func (p *proxy) command(ctx context.Context, args []string) *lab.Cmd {
	c := p.node.Command(ctx, args[0], args[1:]...)
	c.SysProcAttr.Setpgid = true
	return c
}

// serves returns nil once the process has programmed everything. /healthz is not enough:
// like upstream's, it is healthy before the first sync.
func (p *proxy) serves(ctx context.Context) error {
	if _, err := p.node.Fetch(ctx, 10256, "/healthz"); err != nil {
		return err
	}
	body, err := p.node.Fetch(ctx, 10249, "/metrics")
	if err != nil {
		return err
	}
	if !firstSync.MatchString(body) {
		return errors.New("no sync has succeeded yet")
	}
	return nil
}

var firstSync = regexp.MustCompile(`(?m)^kubeproxy_sync_proxy_rules_last_timestamp_seconds\{.*\} [1-9]`)

// kill kills the process, like a crash.
func (p *proxy) kill() error {
	if err := p.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill kube-proxy on %s: %w", p.node.Name, err)
	}
	<-p.ended
	p.cmd = nil
	return nil
}

// stop terminates the process, and kills it after a timeout.
func (p *proxy) stop() error {
	if p.cmd == nil {
		return nil
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop kube-proxy on %s: %w", p.node.Name, err)
	}
	select {
	case <-p.ended:
		p.cmd = nil
		return nil
	case <-time.After(stopLimit):
		return errors.Join(fmt.Errorf("kube-proxy on %s does not stop within %v", p.node.Name, stopLimit), p.kill())
	}
}

func (p *proxy) cleanup(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	if out, err := p.command(ctx, p.cleanupArgs()).CombinedOutput(); err != nil {
		return fmt.Errorf("clean up on %s: %w\n%s", p.node.Name, err, bytes.TrimSpace(out))
	}
	p.started = false
	return nil
}

// logTail returns the last lines of the log.
func (p *proxy) logTail() string {
	text, err := os.ReadFile(filepath.Clean(p.logPath))
	if err != nil {
		return ""
	}
	lines := slices.Collect(strings.Lines(string(text)))
	return strings.Join(lines[max(0, len(lines)-25):], "")
}
