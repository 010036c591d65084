// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// Program is a kube-proxy to run on a profile.
type Program struct {
	Title, Binary, Mode string
	// Ours says that it is this repository's.
	Ours bool
	Env  []string
}

// Proxy is a Program that runs on a World.
type Proxy struct {
	program Program
	world   *World
	process *upstream.Proxy
	objects []fakeapi.Object
}

// Start runs the program until it serves all clients.
func (w *World) Start(ctx context.Context, program Program) (*Proxy, error) {
	p := &Proxy{program: program, world: w, objects: w.objects()}
	if err := p.start(ctx); err != nil || program.Mode != "ebpf" || !w.OptedOut {
		return p, err
	}
	return p, p.says("A pod opted out of socket load balancing", 2) // pods of this node
}

func (p *Proxy) start(ctx context.Context) (err error) {
	w := p.world
	opts := upstream.Options{
		Binary: p.program.Binary, Mode: p.program.Mode, Env: p.program.Env, Objects: p.objects,
		ClusterCIDR: w.PodCIDRs, Args: append([]string{"--iptables-min-sync-period=50ms"}, upstream.Flags...),
	}
	if p.program.Ours {
		opts.Args = append(opts.Args, "--ebpf-cgroup-root="+w.Node.CgroupPath(), "--ebpf-capability-mask="+kernel.Mask(), "-v=2")
	}
	if p.process, err = upstream.Start(ctx, w.Node, opts); err != nil || p.program.Mode != "ebpf" {
		return err
	}
	// Programs serve before rules do, which some clients need.
	if err := p.says("Serving clients outside the node", 1); err != nil {
		return err
	}
	return p.says(`"Synced"`, 1)
}

// says waits until the log has a text so many times.
func (p *Proxy) says(text string, times int) error {
	for deadline := time.Now().Add(20 * time.Second * lab.Slower()); strings.Count(p.process.Log(), text) < times; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("its log does not say %q %d times:\n%s", text, times, p.process.Log())
		}
	}
	return nil
}

// Restart kills the process and starts another one.
func (p *Proxy) Restart(ctx context.Context) error {
	if err := p.process.Close(); err != nil {
		return err
	}
	return p.start(ctx)
}

// Put changes objects.
func (p *Proxy) Put(objects ...fakeapi.Object) {
	p.objects = append(p.objects, objects...)
	p.process.API.Put(objects...)
}

// Log is the output of the current process.
func (p *Proxy) Log() string { return p.process.Log() }

// Close kills the process and removes what it and its connections left in the kernel.
func (p *Proxy) Close(ctx context.Context, cleaner Program) error {
	err := p.process.Close()
	c := p.world.Node.Command(ctx, cleaner.Binary, "--cleanup", "--ebpf-cgroup-root="+p.world.Node.CgroupPath())
	c.Env = append(os.Environ(), cleaner.Env...)
	if out, failed := c.CombinedOutput(); failed != nil {
		err = errors.Join(err, fmt.Errorf("--cleanup: %w\n%s", failed, out))
	}
	for _, n := range []*lab.Node{p.world.Node, p.world.Other} {
		err = errors.Join(err, forget(n))
	}
	return err
}

// forget deletes the conntrack entries of a node.
func forget(n *lab.Node) error {
	return n.Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
		if err != nil {
			return fmt.Errorf("open netlink of %s: %w", n.Name, err)
		}
		defer h.Close()
		if err := h.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
			return fmt.Errorf("forget connections of %s: %w", n.Name, err)
		}
		return nil
	})
}
