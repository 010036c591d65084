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

// NodeSettings are what nodes of real clusters have in the way of packets. The zero
// value is a node of the lab as it comes, which has nothing but routes.
//
// The rules are written by iptables, in the chains where others expect them: what a
// proxy accepts in FORWARD then counts there, as it would not against a policy in
// a table of its own.
type NodeSettings struct {
	// Conntrack has netfilter follow every connection, as any rule about the state
	// of connections does.
	Conntrack bool
	// ForwardDrop forwards nothing but what comes from the node's pods or goes to
	// them: a container runtime sets the policy, the CNI adds the exceptions.
	ForwardDrop bool
	// DropInvalid drops, forwarded or for the node, what conntrack cannot
	// attribute to a connection. It includes Conntrack.
	DropInvalid bool
	// Masquerade has pods appear as their node to everything but pods. It includes
	// Conntrack.
	Masquerade bool
	// StrictSource drops what comes in by another device than the way back to its
	// source: rp_filter=1. IPv6 has no such setting.
	StrictSource bool
}

// restorers are the commands that write rules.
var restorers = [2]string{"iptables-restore", "ip6tables-restore"}

// Available returns nil if nodes can have the settings here, or what is missing.
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

// netfilter is those of the settings that take rules.
func (s NodeSettings) netfilter() NodeSettings {
	s.StrictSource = false
	return s
}

// Set gives the node other settings. The rules of the filter and nat tables are
// replaced, whoever wrote them.
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
	// Devices have the strictest of "all" and their own.
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

// rules is what iptables-restore reads, for pods of the node among those of the
// cluster.
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
