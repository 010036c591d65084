// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// process is the container of a kube-proxy on a node.
type process struct {
	*lab.Watched
	c    *cluster
	node *lab.Node
}

// start runs a binary on a node, with flags in addition to those of the DaemonSet.
func (c *cluster) start(n *lab.Node, binary string, flags ...string) *process {
	c.tb.Helper()
	if err := c.hosts[n.Name].sync(c.tb.Context(), c.plane); err != nil {
		c.tb.Fatal(err)
	}
	return c.restart(n, binary, flags...)
}

// restart is start with the specification that the node's kubelet has already read.
func (c *cluster) restart(n *lab.Node, binary string, flags ...string) *process {
	c.tb.Helper()
	cmd, err := c.hosts[n.Name].proxy(binary, flags...)
	if err != nil {
		c.tb.Fatal(err)
	}
	p := &process{lab.Watch(cmd), c, n}
	p.Begin(c.tb)
	return p
}

// startAll runs this proxy on every node, and waits until each has programmed all Services.
func (c *cluster) startAll(flags ...string) (all []*process) {
	c.tb.Helper()
	for _, n := range c.nodes {
		all = append(all, c.start(n, ourBinary(c.tb), flags...))
	}
	for _, p := range all {
		p.programmed()
	}
	return all
}

// programmed waits for the first sync of both families.
func (p *process) programmed() {
	p.c.tb.Helper()
	p.await("the first sync on "+p.node.Name, p.unprogrammed)
}

func (p *process) unprogrammed() error { return upstream.Programmed(p.c.tb.Context(), p.node) }

// await is the cluster's await, but fails at once when the process has ended.
func (p *process) await(what string, condition func() error) {
	p.c.tb.Helper()
	p.Await(p.c.tb, patience, what, condition)
}

// terminate ends the container as kubelet does.
func (p *process) terminate() {
	p.c.tb.Helper()
	p.Terminate(p.c.tb)
}

// get sends a request to one of the process's servers on its node.
func (p *process) get(port uint16, path string) (string, error) {
	return p.node.Fetch(p.c.tb.Context(), port, path)
}

// mode checks the mode that the process reports.
func (p *process) mode(want string) {
	p.c.tb.Helper()
	if mode, err := p.get(10249, "/proxyMode"); err != nil || mode != want {
		p.c.tb.Errorf("/proxyMode on %s: %q %v, want %s", p.node.Name, mode, err, want)
	}
}

// TestControlPlane: what kubeadm sets up suffices to reach the API server through its Service.
func TestControlPlane(t *testing.T) {
	c := newCluster(t, 1, inMode("ebpf"))
	p := c.startAll()[0]
	p.mode("ebpf")
	c.await("the kubernetes Service", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		conn, err := p.node.Dial(ctx, "tcp", netip.AddrPortFrom(lab.ServicePrefix4.Addr().Next(), 443))
		if err == nil {
			err = conn.Close()
		}
		return err
	})
}
