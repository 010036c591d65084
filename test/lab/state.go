// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// State is what a proxy can change in a node's kernel: rules, addresses, routes, ipsets, virtual
// servers and settings, but for what changes by itself, as counters do. BPF programs are left out.
func (n *Node) State(ctx context.Context) (string, error) {
	var all strings.Builder
	for _, tool := range [][]string{
		{"iptables-save"}, {"ip6tables-save"}, {"nft", "-s", "list", "ruleset"}, {"ip", "address"}, {"ip", "route", "show", "table", "all"},
	} {
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
	err := n.Do(func() error { return errors.Join(ipsets(&all), virtualServers(&all), settings(&all)) })
	return all.String(), wrap(err, "read the state of %s", n.Name)
}

// counters are those of chains.
var counters = regexp.MustCompile(` ?\[\d+:\d+\]`)

// ipsets writes those of the calling thread's network namespace.
func ipsets(to *strings.Builder) error {
	sets, err := netlink.IpsetListAll()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil // a kernel without ipset
	}
	for _, s := range sets {
		entries, err := json.Marshal(s.Entries)
		if err != nil {
			return err
		}
		fmt.Fprintf(to, "ipset %s %s %s\n", s.SetName, s.TypeName, entries)
	}
	return wrap(err, "list ipsets")
}

// virtualServers writes those of IPVS with their destinations, but for their connections, and for
// destinations of weight 0, which their proxy removes when they are drained.
func virtualServers(to *strings.Builder) error {
	text, err := os.ReadFile("/proc/thread-self/net/ip_vs")
	if errors.Is(err, fs.ErrNotExist) {
		return nil // not loaded
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) > 3 && words[0] == "->" {
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
