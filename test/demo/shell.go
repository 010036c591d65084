// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// openShell makes the cluster and runs a command on its first node, or a shell.
func openShell(ctx context.Context, c *cluster, args []string) error {
	if err := errors.Join(c.open(), c.writeService()); err != nil {
		return err
	}
	if _, err := c.writeEndpoints(); err != nil {
		return err
	}
	client, err := c.lab.AddClient("client")
	if err != nil {
		return err
	}
	for _, p := range c.proxies {
		if err := p.start(ctx); err != nil {
			return err
		}
	}
	tools, err := c.writeTools(client)
	if err != nil {
		return err
	}
	node := c.nodes[0]
	if len(args) == 0 {
		c.out.say("This is node1 of two nodes. Service demo/hello is at %s:%d, and at NodePort %d of %s.", serviceIP4, servicePortTCP, nodePortTCP, node.Addr4)
		c.out.say("  ask ADDRESS:PORT     send a request from the node; in-pod ask …, outside ask … from elsewhere")
		c.out.say("  tandemctl            inspect the node")
		c.out.say("  $MANIFESTS           the Service and its EndpointSlices: kube-proxy follows changes")
		c.out.say("  exit                 remove everything")
		args = []string{"bash", "--norc", "-i"}
	}
	cmd := node.Command(ctx, args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Dir = c.dir
	cmd.Env = append(os.Environ(),
		"PATH="+tools+":"+c.bin+":"+os.Getenv("PATH"), "PS1=node1# ", "TANDEM_CGROUP_ROOT="+node.CgroupPath(), "MANIFESTS="+c.manifests, "KUBE_PROXY_LOG="+c.proxies[0].logPath,
		fmt.Sprintf("KUBE_PROXY_PID=%d", c.proxies[0].cmd.Process.Pid))
	err = cmd.Run()
	if exit := (*exec.ExitError)(nil); len(args) > 0 && args[0] == "bash" && errors.As(err, &exit) {
		return nil // what the last command of a shell said
	}
	return err
}

// writeTools writes the commands that a shell has beside those of the machine.
func (c *cluster) writeTools(outside *lab.Client) (dir string, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	dir = filepath.Join(c.dir, "tools")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	within := func(s *lab.Sandbox) string {
		// The cgroup first, as it is not visible from there.
		return fmt.Sprintf("echo 0 >%s/cgroup.procs && exec nsenter --net=%s -- \"$@\"\n", s.CgroupPath(), s.NetNSPath())
	}
	for name, script := range map[string]string{
		"ask":     fmt.Sprintf("exec %s -ask \"$@\"\n", self),
		"in-pod":  within(c.clients[0].Sandbox),
		"outside": within(outside.Sandbox),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// ask sends a request from where this process is, and shows the answer. It keeps the connection for a while.
func ask(to string, keep time.Duration) error {
	address, udp := strings.CutSuffix(to, "/udp")
	at, err := netip.ParseAddrPort(strings.TrimSuffix(address, "/tcp"))
	if err != nil {
		return fmt.Errorf("want ADDRESS:PORT or ADDRESS:PORT/udp: %w", err)
	}
	network := "tcp"
	if udp {
		network = "udp"
	}
	ctx, cancel := context.WithTimeout(context.Background(), keep+5*time.Second)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, network, at.String())
	if err != nil {
		return err
	}
	defer c.Close()
	reply, err := lab.AskConn(ctx, c)
	if err != nil {
		return err
	}
	fmt.Printf("%s answers. It sees %s as the client.\n", reply.Server, reply.Peer)
	time.Sleep(keep)
	return nil
}
