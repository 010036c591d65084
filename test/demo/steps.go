// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

const (
	// sampleSize requests are enough for the shares to be close to even.
	sampleSize = 300
	// settleLimit is how long a change of the manifests may take to show.
	settleLimit = 5 * time.Second
	// pauseWithout is how long the demo looks on while the process is dead, and
	// again after it is back.
	pauseWithout = 3 * time.Second
)

func layCluster(ctx context.Context, c *cluster) error {
	c.out.title("A cluster of two nodes, made of network namespaces and cgroups on this machine")
	if err := c.open(); err != nil {
		return err
	}
	for _, n := range c.nodes {
		c.out.say("%s  %s, %s", n.Name, n.Addr4, n.Addr6)
		for _, p := range c.podsOf(n) {
			c.out.say("  pod %-6s %s, %s", p.Name, p.Addr4, p.Addr6)
		}
	}
	c.out.say("Service hello: %s and %s, TCP port %d and UDP port %d; endpoints: %s.",
		serviceIP4, serviceIP6, servicePortTCP, servicePortUDP, names(c.ready))
	if err := c.writeService(); err != nil {
		return err
	}
	if _, err := c.writeEndpoints(); err != nil {
		return err
	}
	c.out.say("Below, $NODE1 is the cgroup of node1, %s,", c.nodes[0].CgroupPath())
	c.out.say("and $MANIFESTS the directory with the YAML files, %s.", c.manifests)
	if err := c.nobody(); err != nil {
		return err
	}
	c.out.good("Nobody answers at these addresses yet, as it should be.")
	return nil
}

func startProxies(ctx context.Context, c *cluster) error {
	c.out.title("kube-proxy starts, one per node")
	for i, p := range c.proxies {
		if i == 0 {
			c.out.command(p.args())
		}
		began := time.Now()
		if err := p.start(ctx); err != nil {
			return err
		}
		c.out.good("%s: process %d serves after %s", p.node.Name, p.cmd.Process.Pid, round(time.Since(began)))
	}
	return nil
}

func showDistribution(ctx context.Context, c *cluster) error {
	c.out.title("Requests to the Service, %d of each kind, and which pod answered", sampleSize)
	for _, from := range c.clients {
		for _, to := range targets {
			if err := c.sample(ctx, fmt.Sprintf("%-9s %s %s", from.label, to.kind(), to.addr), from, to); err != nil {
				return err
			}
		}
	}
	other := client{label: "node2", Sandbox: c.nodes[1].Sandbox}
	return c.sample(ctx, "node2     all four", other, targets...)
}

func showTools(ctx context.Context, c *cluster) error {
	c.out.title("What an operator sees on %s", c.nodes[0].Name)
	for _, args := range [][]string{{"status"}, {"services"}} {
		if err := c.tandemctl(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

func changeEndpoints(ctx context.Context, c *cluster) error {
	c.load = startLoad(c.clients, targets)
	before := c.load.tally()

	leaving := c.ready[1]
	c.out.title("Endpoint %s is taken out of the manifest, under load", leaving.Name)
	c.ready = []*lab.Pod{c.ready[0], c.ready[2]}
	changed, err := c.writeEndpoints()
	if err != nil {
		return err
	}
	last, err := c.load.left(ctx, leaving.Name, changed)
	if err != nil {
		return err
	}
	c.out.good("the last request it got was sent %s after the file was written", round(max(0, last.Sub(changed))))
	if err := c.sample(ctx, "pod shell all four", c.clients[0], targets...); err != nil {
		return err
	}

	coming := c.spare
	c.out.title("Endpoint %s is added", coming.Name)
	c.ready = append(c.ready, coming)
	if changed, err = c.writeEndpoints(); err != nil {
		return err
	}
	first, err := c.load.came(ctx, coming.Name)
	if err != nil {
		return err
	}
	c.out.good("its first answer came %s after the file was written", round(first.Sub(changed)))
	if err := c.sample(ctx, "pod shell all four", c.clients[0], targets...); err != nil {
		return err
	}
	return c.judge("Meanwhile", before)
}

func killProxy(ctx context.Context, c *cluster) error {
	p := c.proxies[0]
	c.out.title("kube-proxy of %s is killed, while requests from there go on", p.node.Name)
	before := c.load.tally()
	c.out.command([]string{"kill", "-9", fmt.Sprint(p.cmd.Process.Pid)})
	if err := p.kill(); err != nil {
		return err
	}
	if err := sleep(ctx, pauseWithout); err != nil {
		return err
	}
	return c.judge(fmt.Sprintf("%.0f s without a process", pauseWithout.Seconds()), before)
}

func restartProxy(ctx context.Context, c *cluster) error {
	p := c.proxies[0]
	c.out.title("It starts again, and takes over what it finds in the kernel")
	before := c.load.tally()
	began := time.Now()
	if err := p.start(ctx); err != nil {
		return err
	}
	c.out.good("process %d serves after %s", p.cmd.Process.Pid, round(time.Since(began)))
	if err := sleep(ctx, pauseWithout); err != nil {
		return err
	}
	if err := c.judge("Start and the time after", before); err != nil {
		return err
	}
	// It is in charge again only if it follows changes again.
	leaving := c.ready[0]
	c.ready = c.ready[1:]
	changed, err := c.writeEndpoints()
	if err != nil {
		return err
	}
	last, err := c.load.left(ctx, leaving.Name, changed)
	if err != nil {
		return err
	}
	c.out.good("it follows changes: %s was taken out and got its last request %s later", leaving.Name, round(max(0, last.Sub(changed))))
	if err := c.sample(ctx, "pod shell all four", c.clients[0], targets...); err != nil {
		return err
	}
	all := c.load.stop()
	c.load = nil
	return c.report("In all", all)
}

func cleanUp(ctx context.Context, c *cluster) error {
	c.out.title("kube-proxy stops and cleans up after itself")
	for i, p := range c.proxies {
		if err := p.stop(); err != nil {
			return err
		}
		if i == 0 {
			c.out.command(p.cleanupArgs())
		}
		if err := p.cleanup(ctx); err != nil {
			return err
		}
	}
	if err := c.nobody(); err != nil {
		return err
	}
	c.out.good("Nobody answers at the Service's addresses any more, as it should be.")
	return nil
}

// sleep waits for a time to pass: here the time itself is what is shown.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
