// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// errEnded is that of a process that cannot do what is awaited any more.
var errEnded = errors.New("kube-proxy has ended")

// process is the container of a kube-proxy on a node.
type process struct {
	*lab.Cmd
	c    *cluster
	node *lab.Node
	log  *lab.Log
}

// start runs a binary on a node, with flags beside those that the DaemonSet has.
func (c *cluster) start(n *lab.Node, binary string, flags ...string) *process {
	c.tb.Helper()
	if err := c.hosts[n.Name].sync(c.tb.Context(), c.plane); err != nil {
		c.tb.Fatal(err)
	}
	return c.restart(n, binary, flags...)
}

// restart is start with what the node's kubelet knows, which need not be news.
func (c *cluster) restart(n *lab.Node, binary string, flags ...string) *process {
	c.tb.Helper()
	cmd, err := c.hosts[n.Name].proxy(binary, flags...)
	if err != nil {
		c.tb.Fatal(err)
	}
	p := &process{cmd, c, n, &lab.Log{}}
	p.Stdout, p.Stderr = p.log, p.log
	if err := p.Start(); err != nil {
		c.tb.Fatal(err)
	}
	c.tb.Cleanup(func() {
		_ = p.Close()
		if c.tb.Failed() {
			c.tb.Logf("log of kube-proxy on %s:\n%s", n.Name, p.log)
		}
	})
	return p
}

// startAll runs ours on every node, until each has programmed what there is.
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

func (p *process) unprogrammed() error {
	metrics, err := p.get(10249, "/metrics")
	for _, family := range []string{"IPv4", "IPv6"} {
		if err == nil && !strings.Contains(metrics, `kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="`+family+`"}`) {
			err = fmt.Errorf("%s is not programmed", family)
		}
	}
	return err
}

// await polls as the cluster does, while the process lives.
func (p *process) await(what string, condition func() error) {
	p.c.tb.Helper()
	p.c.await(what, func() error {
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

// terminate ends the container as kubelet does.
func (p *process) terminate() {
	p.c.tb.Helper()
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		p.c.tb.Fatal(err)
	}
	if err := p.Wait(); err != nil {
		p.c.tb.Fatalf("after SIGTERM: %v", err)
	}
}

// get asks one of the process's servers on its node.
func (p *process) get(port uint16, path string) (string, error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return p.node.Dial(ctx, "tcp", netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port))
		},
	}, Timeout: 5 * time.Second}
	response, err := client.Get("http://node" + path)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answers %s: %s", path, response.Status, text)
	}
	return string(text), err
}

// mode checks what the process says it runs in.
func (p *process) mode(want string) {
	p.c.tb.Helper()
	if mode, err := p.get(10249, "/proxyMode"); err != nil || mode != want {
		p.c.tb.Errorf("/proxyMode on %s: %q %v, want %s", p.node.Name, mode, err, want)
	}
}

// TestControlPlane: what kubeadm sets up is enough to reach the API server by its Service.
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
