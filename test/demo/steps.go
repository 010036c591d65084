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
	// sampleSize requests are enough for an almost even distribution.
	sampleSize = 300
	// settleLimit is how long a change of the manifests may take to have an effect.
	settleLimit = 5 * time.Second
	// pauseWithout is how long the demo waits while the process is dead, and again
	// after its restart.
	pauseWithout = 3 * time.Second
)

func createCluster(ctx context.Context, c *cluster) error {
	c.out.title("Create a cluster of two nodes from network namespaces and cgroups")
	if err := c.open(); err != nil {
		return err
	}
	for _, n := range c.nodes {
		c.out.say("%-18s %-12s %s", n.Name, n.Addr4, n.Addr6)
		for _, p := range c.podsOf(n) {
			c.out.say("  %-16s %-12s %s", "pod "+p.Name, p.Addr4, p.Addr6)
		}
	}
	c.out.say("%-18s %-12s %s", "Service demo/hello", serviceIP4, serviceIP6)
	c.out.say("  %-16s TCP %d, UDP %d", "ports", servicePortTCP, servicePortUDP)
	c.out.say("  %-16s %s", "endpoints", names(c.ready))
	if err := c.writeService(); err != nil {
		return err
	}
	if _, err := c.writeEndpoints(); err != nil {
		return err
	}
	c.out.say("In the commands below:")
	c.out.say("  %-16s %s", "$NODE1", c.nodes[0].CgroupPath()+" (cgroup of node1)")
	c.out.say("  %-16s %s", "$MANIFESTS", c.manifests+" (YAML files)")
	if err := c.unanswered(); err != nil {
		return err
	}
	c.out.good("without kube-proxy, no request to the Service is answered")
	return nil
}

func startProxies(ctx context.Context, c *cluster) error {
	c.out.title("Start kube-proxy on each node")
	for i, p := range c.proxies {
		if i == 0 {
			c.out.command(p.args())
		}
		began := time.Now()
		if err := p.start(ctx); err != nil {
			return err
		}
		c.out.good("%s: process %d has programmed the Service after %s", p.node.Name, p.cmd.Process.Pid, round(time.Since(began)))
	}
	return nil
}

func showDistribution(ctx context.Context, c *cluster) error {
	c.out.title("Send %d requests per client and address, and count the answers of each pod", sampleSize)
	for _, from := range c.clients {
		for _, to := range targets {
			if err := c.sample(ctx, fmt.Sprintf("%-9s %s %s", from.label, to.kind(), to.addr), from, to); err != nil {
				return err
			}
		}
	}
	other := client{label: "node2", Sandbox: c.nodes[1].Sandbox}
	return c.sample(ctx, fmt.Sprintf("%-9s %s", other.label, allAddresses), other, targets...)
}

func showTools(ctx context.Context, c *cluster) error {
	c.out.title("Inspect the state on %s", c.nodes[0].Name)
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
	c.out.title("Remove endpoint %s under load", leaving.Name)
	c.ready = []*lab.Pod{c.ready[0], c.ready[2]}
	changed, err := c.writeEndpoints()
	if err != nil {
		return err
	}
	last, err := c.load.left(ctx, leaving.Name, changed)
	if err != nil {
		return err
	}
	c.out.good("%s got its last request %s after the manifest changed", leaving.Name, round(max(0, last.Sub(changed))))
	if err := c.sampleAll(ctx); err != nil {
		return err
	}

	coming := c.spare
	c.out.title("Add endpoint %s under load", coming.Name)
	c.ready = append(c.ready, coming)
	if changed, err = c.writeEndpoints(); err != nil {
		return err
	}
	first, err := c.load.came(ctx, coming.Name)
	if err != nil {
		return err
	}
	c.out.good("%s sent its first answer %s after the manifest changed", coming.Name, round(first.Sub(changed)))
	if err := c.sampleAll(ctx); err != nil {
		return err
	}
	return c.judge("during both changes", before)
}

func killProxy(ctx context.Context, c *cluster) error {
	p := c.proxies[0]
	c.out.title("Kill kube-proxy on %s under load", p.node.Name)
	before := c.load.tally()
	c.out.command([]string{"kill", "-9", fmt.Sprint(p.cmd.Process.Pid)})
	if err := p.kill(); err != nil {
		return err
	}
	if err := sleep(ctx, pauseWithout); err != nil {
		return err
	}
	return c.judge(fmt.Sprintf("%.0f s without kube-proxy", pauseWithout.Seconds()), before)
}

func restartProxy(ctx context.Context, c *cluster) error {
	p := c.proxies[0]
	c.out.title("Restart kube-proxy, which adopts the programs and maps in the kernel")
	before := c.load.tally()
	began := time.Now()
	if err := p.start(ctx); err != nil {
		return err
	}
	c.out.good("process %d has programmed the Service after %s", p.cmd.Process.Pid, round(time.Since(began)))
	if err := sleep(ctx, pauseWithout); err != nil {
		return err
	}
	if err := c.judge("during and after the restart", before); err != nil {
		return err
	}
	// The restarted process must also apply changes.
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
	c.out.good("changes are applied again: %s got its last request %s after it was removed", leaving.Name, round(max(0, last.Sub(changed))))
	if err := c.sampleAll(ctx); err != nil {
		return err
	}
	all := c.load.stop()
	c.load = nil
	return c.report("in total", all)
}

func cleanUp(ctx context.Context, c *cluster) error {
	c.out.title("Stop kube-proxy and clean up")
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
	if err := c.unanswered(); err != nil {
		return err
	}
	c.out.good("after the clean-up, no request to the Service is answered")
	return nil
}

// sleep waits for a duration or until ctx is done.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
