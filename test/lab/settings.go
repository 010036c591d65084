// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
)

// NodeSettings are what filters packets on nodes of real clusters. The zero value is
// a node that has only routes.
//
// The rules are in the usual chains of iptables. A proxy's ACCEPT rules in FORWARD
// therefore take precedence over the policy; they would not if the policy were in
// a table of its own.
type NodeSettings struct {
	// Conntrack enables connection tracking, as any rule about the state of connections
	// does.
	Conntrack bool
	// ForwardDrop forwards only packets from or to the node's pods. In real clusters, a
	// container runtime sets the policy, and the CNI adds the exceptions.
	ForwardDrop bool
	// DropInvalid drops packets in state INVALID, both forwarded ones and those for the
	// node. It includes Conntrack.
	DropInvalid bool
	// Masquerade masquerades packets from pods to everything but pods. It includes
	// Conntrack.
	Masquerade bool
	// StrictSource sets rp_filter=1: packets are dropped if the route to their source
	// uses another device. IPv6 has no such setting.
	StrictSource bool
}

// restorers are the commands that write rules.
var restorers = [2]string{"iptables-restore", "ip6tables-restore"}

// Available returns nil if the settings can be used here, or what is missing.
func (s NodeSettings) Available() error {
	if s.netfilter() == (NodeSettings{}) {
		return nil
	}
	for _, tool := range restorers {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%s, which node settings need (Debian package iptables): %w", tool, err)
		}
	}
	return nil
}

// netfilter returns the settings that need rules.
func (s NodeSettings) netfilter() NodeSettings {
	s.StrictSource = false
	return s
}

// Set changes the node's settings. It replaces all rules of the filter and nat tables.
func (n *Node) Set(s NodeSettings) error {
	l := n.lab
	l.mu.Lock()
	defer l.mu.Unlock()
	return n.set(s)
}

func (n *Node) set(s NodeSettings) error {
	before := n.settings
	var err error
	if s.StrictSource != before.StrictSource {
		err = s.filterSources(n)
	}
	if s.netfilter() != before.netfilter() {
		err = errors.Join(err, s.writeRules(n))
	}
	if err == nil {
		n.settings = s
	}
	return wrap(err, "set up node %s", n.Name)
}

func (s NodeSettings) filterSources(n *Node) error {
	value := "0"
	if s.StrictSource {
		value = "1"
	}
	// For each device, the stricter one of "all" and its own setting applies.
	return n.Do(func() error { return sysctl("ipv4/conf/all/rp_filter", value) })
}

func (s NodeSettings) writeRules(n *Node) error {
	if err := s.Available(); err != nil {
		return err
	}
	for i, rules := range []string{s.rules(n.PodPrefix4, pods4), s.rules(n.PodPrefix6, pods6)} {
		c := n.Command(context.Background(), restorers[i])
		c.Stdin = strings.NewReader(rules)
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s\n%s", restorers[i], err, bytes.TrimSpace(out), rules)
		}
	}
	return nil
}

// rules returns the input of iptables-restore, given the prefixes of the node's and of the
// cluster's pods.
func (s NodeSettings) rules(pods, cluster netip.Prefix) string {
	var b strings.Builder
	line := func(wanted bool, format string, args ...any) {
		if wanted {
			fmt.Fprintf(&b, format+"\n", args...)
		}
	}
	line(true, "*filter\n:INPUT ACCEPT\n:OUTPUT ACCEPT")
	line(!s.ForwardDrop, ":FORWARD ACCEPT")
	line(s.ForwardDrop, ":FORWARD DROP")
	line(s.Conntrack, "-A INPUT -m conntrack --ctstate NEW") // only counts
	line(s.DropInvalid, "-A INPUT -m conntrack --ctstate INVALID -j DROP")
	line(s.DropInvalid, "-A FORWARD -m conntrack --ctstate INVALID -j DROP")
	line(s.ForwardDrop, "-A FORWARD -s %s -j ACCEPT", pods)
	line(s.ForwardDrop, "-A FORWARD -d %s -j ACCEPT", pods)
	line(true, "COMMIT\n*nat")
	line(s.Masquerade, "-A POSTROUTING -s %s ! -d %s -j MASQUERADE", pods, cluster)
	line(true, "COMMIT")
	return b.String()
}
