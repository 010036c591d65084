// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-proxy/tandem/test/lab"
)

// cluster has the nodes, pods and processes. It may be incomplete.
type cluster struct {
	out *screen
	bin string

	dir       string // holds everything the demo writes
	manifests string
	lab       *lab.Lab
	nodes     []*lab.Node
	pods      []*lab.Pod
	ready     []*lab.Pod // the endpoints of the Service
	spare     *lab.Pod   // becomes an endpoint later
	clients   []client
	proxies   []*proxy
	load      *load // while it runs
}

// open creates the nodes and pods.
func (c *cluster) open() (err error) {
	if c.dir, err = os.MkdirTemp("", "tandem-demo-"); err != nil {
		return err
	}
	c.manifests = filepath.Join(c.dir, "manifests")
	if err := os.Mkdir(c.manifests, 0o755); err != nil {
		return err
	}
	// kube-proxy finds the namespaces of pods by their pause processes.
	if c.lab, err = lab.New(lab.Options{Pause: true}); err != nil {
		return err
	}
	for _, name := range []string{"node1", "node2"} {
		n, err := c.lab.AddNode(name)
		if err != nil {
			return err
		}
		c.nodes = append(c.nodes, n)
		c.proxies = append(c.proxies, &proxy{
			node:      n,
			bin:       filepath.Join(c.bin, "kube-proxy"),
			manifests: c.manifests,
			logPath:   filepath.Join(c.dir, name+".log"),
		})
	}
	var shell *lab.Pod
	for _, pod := range []struct {
		node *lab.Node
		name string
		to   *[]*lab.Pod
	}{
		{c.nodes[0], "web-1", &c.ready},
		{c.nodes[0], "web-2", &c.ready},
		{c.nodes[0], "shell", nil},
		{c.nodes[1], "web-3", &c.ready},
		{c.nodes[1], "web-4", nil},
	} {
		p, err := pod.node.AddPod(pod.name)
		if err != nil {
			return err
		}
		c.pods = append(c.pods, p)
		if pod.name == "shell" {
			shell = p
			continue
		}
		if pod.to == nil {
			c.spare = p
		} else {
			*pod.to = append(*pod.to, p)
		}
		if _, err := p.ServeTCP(podPortTCP); err != nil {
			return err
		}
		if _, err := p.ServeUDP(podPortUDP); err != nil {
			return err
		}
	}
	c.out.short = strings.NewReplacer(c.nodes[0].CgroupPath(), "$NODE1", c.manifests, "$MANIFESTS", c.bin+"/", "")
	c.clients = []client{
		{label: "pod shell", Sandbox: shell.Sandbox},
		{label: "node1", Sandbox: c.nodes[0].Sandbox},
	}
	return nil
}

func (c *cluster) podsOf(n *lab.Node) []*lab.Pod {
	var pods []*lab.Pod
	for _, p := range c.pods {
		if p.Node == n {
			pods = append(pods, p)
		}
	}
	return pods
}

// allAddresses labels a sample of all targets.
const allAddresses = "all addresses"

// sampleAll samples all targets from the first client.
func (c *cluster) sampleAll(ctx context.Context) error {
	return c.sample(ctx, fmt.Sprintf("%-9s %s", c.clients[0].label, allAddresses), c.clients[0], targets...)
}

// sample sends requests to each target in turn and shows which pods answered. It fails
// unless all ready endpoints answered, and no other pod.
func (c *cluster) sample(ctx context.Context, label string, from client, to ...target) error {
	answers := map[string]int{}
	for i := range sampleSize {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		t := to[i%len(to)]
		reply, err := from.ask(t)
		if err != nil {
			return err
		}
		answers[reply.Server]++
	}
	c.out.bars(label, names(c.ready), answers, sampleSize)
	total := 0
	for _, p := range c.ready {
		total += answers[p.Name]
		// A third of an even share is far below random variation.
		if answers[p.Name] < sampleSize/len(c.ready)/3 {
			return fmt.Errorf("%s: %s got %d of %d requests", label, p.Name, answers[p.Name], sampleSize)
		}
	}
	if total < sampleSize {
		return fmt.Errorf("%s: a pod answered that is not an endpoint: %v", label, answers)
	}
	return nil
}

// unanswered fails if a request is answered. It sends all requests at once, since each
// waits until its timeout.
func (c *cluster) unanswered() error {
	var group errgroup.Group
	for _, from := range c.clients {
		for _, to := range targets {
			group.Go(func() error {
				if reply, err := from.ask(to); err == nil {
					return fmt.Errorf("%s answers at %s without kube-proxy", reply.Server, to)
				}
				return nil
			})
		}
	}
	return group.Wait()
}

// judge reports the results of the load since an earlier tally.
func (c *cluster) judge(when string, before tally) error {
	return c.report(when, c.load.tally().since(before))
}

func (c *cluster) report(when string, t tally) error {
	if t.failed == 0 && t.asked > 0 && t.steady > 0 {
		c.out.good("%s: %d requests, and %d on an established connection, 0 failed", when, t.asked, t.steady)
		return nil
	}
	c.out.bad("%s: %d requests, and %d on an established connection, %d failed", when, t.asked, t.steady, t.failed)
	return fmt.Errorf("%d requests failed, the last with: %w", t.failed, t.failure)
}

// tandemctl runs tandemctl on the first node and shows its output.
func (c *cluster) tandemctl(ctx context.Context, args ...string) error {
	args = append(args, "--cgroup-root", c.nodes[0].CgroupPath())
	c.out.command(append([]string{"tandemctl"}, args...))
	text, err := c.nodes[0].Command(ctx, filepath.Join(c.bin, "tandemctl"), args...).CombinedOutput()
	c.out.block(string(text))
	if err != nil {
		return fmt.Errorf("tandemctl %s: %w", args[0], err)
	}
	return nil
}

func (c *cluster) showLogs() {
	for _, p := range c.proxies {
		if tail := p.logTail(); tail != "" {
			c.out.heading("Last lines of kube-proxy's log on %s", p.node.Name)
			c.out.block(tail)
		}
	}
}

// close removes everything, in any state. It does not use the context of the steps, which
// may be cancelled.
func (c *cluster) close() error {
	var errs []error
	if c.load != nil {
		c.load.stop()
	}
	for _, p := range c.proxies {
		if p.started {
			errs = append(errs, p.stop(), p.cleanup(context.Background()))
		}
	}
	if c.lab != nil {
		errs = append(errs, c.lab.Close())
	}
	if c.dir != "" {
		errs = append(errs, os.RemoveAll(c.dir))
	}
	return errors.Join(errs...)
}

func names(pods []*lab.Pod) podNames {
	var list podNames
	for _, p := range pods {
		list = append(list, p.Name)
	}
	return list
}

type podNames []string

func (n podNames) String() string { return strings.Join(n, ", ") }
