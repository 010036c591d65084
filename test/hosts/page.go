// SPDX-License-Identifier: Apache-2.0

package hosts

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// header is the part of docs/hosts.md before the table.
const header = `# Hosts

` + "`TestProfiles` of `test/hosts`" + ` proves this page, and ` + "`TestPage`" + ` writes it with ` + "`-update`" + `. Each profile is a host with its network
and its CNI, made in network namespaces: a node with pods, a second node, clients outside. On each of them the same cells are
played, with the proxy in mode ` + "`ebpf`" + `: requests from pods, from the node and from outside to ClusterIPs, NodePorts, external IPs and
load balancer IPs, by TCP and UDP, over the families of the profile, to endpoints on this and on the other node, with
traffic policy Cluster and Local; transfers both ways that need path MTU discovery; and open and new connections while the
process is killed and endpoints change. On some there are more: a crowd of connections beside masqueraded ones of pods, and
connections that begin while a route is missing. A cell of policy Local also checks that the endpoint sees the client's address.

` + "`TestDisturbances`" + ` plays connections on the first profile while its addresses move to another device and back, its MTUs change,
a route goes and returns ten times a second, and damaged packets arrive. ` + "`TestDamage`" + ` sends such packets through the tunnels
of other profiles, and damaged packets of VXLAN, Geneve, WireGuard, IPIP, GRE and 6in4 around them.

Most profiles set up by hand what a CNI does. ` + "`TestCNI` of `test/cluster`" + ` plays the cells of two families where flannel's own daemon (0.27.4,
vxlan and host-gw) and kube-router's (2.1.0, routes and network policy) connect the nodes, from a real API server: all are kept.

Netfilter is the control. Cells that it does not keep either are not counted. The last columns say how many cells are kept on a
version of Linux, as the last run recorded it, and where rules instead of programs serve clients outside because of what the host
filters. "Not run" also means that the profile has changed since. 5.15 is Linux 6.18 without the features that came later (` + "`--ebpf-capability-mask=linux=5.15`" + `).
[testing.md](testing.md#hosts) says how to run it.

`

// Page is docs/hosts.md.
func Page(profiles []*Profile, kernels KernelRecords) string {
	var b strings.Builder
	b.WriteString(header)
	versions := kernels.versions()
	b.WriteString("| Profile | Hosts like it | Families | Cells |")
	for _, v := range versions {
		b.WriteString(" " + v + " |")
	}
	b.WriteString("\n|---|---|---|---|" + strings.Repeat("---|", len(versions)) + "\n")
	for _, p := range profiles {
		cells, lost := p.counted()
		counted := strconv.Itoa(cells)
		if lost > 0 {
			counted += fmt.Sprintf("; %d [lost](#lost)", lost)
		}
		like := p.Like
		if len(p.Kinds) > 0 {
			like += "; needs devices of type `" + strings.Join(p.Kinds, "` and `") + "`"
		}
		var families []string
		for _, f := range p.families() {
			families = append(families, "IPv"+string(f))
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |", p.Name, like, strings.Join(families, ", "), counted)
		for _, v := range versions {
			b.WriteString(" " + kernels[v].text(p) + " |")
		}
		b.WriteString("\n")
	}
	b.WriteString("\n## Lost\n\nWhat the proxy loses and netfilter keeps.\n")
	writeExceptions(&b, profiles, func(p *Profile) []Exception { return p.Lost })
	b.WriteString("\n## Denied\n\nWhat the host's policy forbids. These cells are kept if nothing answers.\n")
	writeExceptions(&b, profiles, func(p *Profile) []Exception { return p.Denied })
	b.WriteString("\n## Lost by netfilter as well\n\nWhat netfilter does not keep either.\n")
	writeExceptions(&b, profiles, func(p *Profile) []Exception { return p.Neither })
	return b.String()
}

// counted are the number of cells of a profile, and how many of them are lost.
func (p *Profile) counted() (cells, lost int) {
	for _, c := range p.Cells() {
		if matching(p.Neither, c) != nil {
			continue
		}
		cells++
		if matching(p.Lost, c) != nil {
			lost++
		}
	}
	return cells, lost
}

// writeExceptions writes one kind of exceptions of all profiles, with each reason once.
func writeExceptions(b *strings.Builder, profiles []*Profile, of func(*Profile) []Exception) {
	any := false
	for _, p := range profiles {
		var reasons []string
		which := map[string][]string{}
		for _, e := range of(p) {
			if !slices.Contains(reasons, e.Why) {
				reasons = append(reasons, e.Why)
			}
			which[e.Why] = append(which[e.Why], e.Cells.describe())
		}
		for _, why := range reasons {
			if !any {
				b.WriteString("\n| Profile | Cells | Reason |\n|---|---|---|\n")
				any = true
			}
			fmt.Fprintf(b, "| `%s` | %s | %s |\n", p.Name, strings.Join(which[why], "; "), why)
		}
	}
	if !any {
		b.WriteString("\nNothing.\n")
	}
}

// describe is a pattern for readers.
func (c Cell) describe() string {
	var parts []string
	add := func(format, value string) {
		if value != "" {
			parts = append(parts, fmt.Sprintf(format, value))
		}
	}
	add("%s", c.Kind)
	add("from %s", c.Client)
	add("to %s", c.Frontend)
	add("by %s", c.Network)
	add("endpoints %s", c.Backend)
	add("policy %s", c.Policy)
	return cmp.Or(strings.Join(parts, ", "), "all")
}
