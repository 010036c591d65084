// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// State is what a proxy can change in a node's kernel: rules, addresses, routes, ipsets, virtual
// servers and settings, but for what changes by itself, as counters do. BPF programs are left out.
func (n *Node) State(ctx context.Context) (string, error) {
	var all strings.Builder
	tools := [][]string{
		{"iptables-save"}, {"ip6tables-save"}, {"nft", "-s", "list", "ruleset"}, {"ip", "address"}, {"ip", "route", "show", "table", "all"},
	}
	if _, err := exec.LookPath("ipset"); err == nil {
		tools = append(tools, []string{"ipset", "save"})
	}
	for _, tool := range tools {
		out, err := n.Command(ctx, tool[0], tool[1:]...).Output()
		if err != nil {
			return "", fmt.Errorf("%s: %w", tool, err)
		}
		for line := range strings.Lines(string(out)) {
			if !strings.HasPrefix(line, "#") { // times
				all.WriteString(counters.ReplaceAllString(line, ""))
			}
		}
	}
	err := n.Do(func() error { return errors.Join(virtualServers(&all), settings(&all)) })
	return all.String(), wrap(err, "read the state of %s", n.Name)
}

// counters are those of chains.
var counters = regexp.MustCompile(` ?\[\d+:\d+\]`)

// virtualServers writes those of IPVS with their destinations, but for their connections, and for
// destinations of weight 0, which their proxy removes when they are drained.
func virtualServers(to *strings.Builder) error {
	text, err := os.ReadFile("/proc/thread-self/net/ip_vs")
	if errors.Is(err, fs.ErrNotExist) {
		return nil // not loaded
	}
	const heads = 3 // of which one has the size of a table that grows
	for i, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		words := strings.Fields(line)
		if i < heads {
			continue
		}
		if words[0] == "->" { // address, kind, weight, connections
			if words[3] == "0" {
				continue
			}
			words = words[:4]
		}
		fmt.Fprintln(to, strings.Join(words, " "))
	}
	return err
}

// volatile settings change by themselves, or belong to all network namespaces.
var volatile = []string{"nf_conntrack_count", "nf_conntrack_max"}

// settings writes the sysctls of the calling thread's network namespace.
func settings(to *strings.Builder) error {
	const root = "/proc/sys/net"
	found := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil && path == root:
			return err
		case err != nil, d.IsDir(), slices.Contains(volatile, d.Name()):
			return nil // settings of a device go with it
		}
		// Some are write-only, and a secret that has not been set cannot be read.
		if text, err := os.ReadFile(path); err == nil {
			fmt.Fprintf(to, "%s=%s\n", path[len(root)+1:], strings.TrimSpace(string(text)))
			found++
		}
		return nil
	})
	if err == nil && found == 0 {
		err = errors.New("no setting can be read in " + root)
	}
	return err
}
