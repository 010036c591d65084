// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/ipvs/vserver"
	"github.com/tandem-proxy/tandem/test/lab"
)

// meter counts what the kernel is asked to change, and how long that takes.
type meter struct {
	n    int
	took time.Duration
}

func (m *meter) of(change func() error) error {
	began := time.Now()
	err := change()
	m.n++
	m.took += time.Since(began)
	return err
}

type meteredServers struct {
	vserver.Kernel
	*meter
}

func (m meteredServers) Add(k serverKey, is server) error {
	return m.of(func() error { return m.Kernel.Add(k, is) })
}

func (m meteredServers) AddDestination(k serverKey, to netip.AddrPort, weight int) error {
	return m.of(func() error { return m.Kernel.AddDestination(k, to, weight) })
}

func (m meteredServers) ChangeDestination(k serverKey, to netip.AddrPort, weight int) error {
	return m.of(func() error { return m.Kernel.ChangeDestination(k, to, weight) })
}

func (m meteredServers) DeleteDestination(k serverKey, to netip.AddrPort) error {
	return m.of(func() error { return m.Kernel.DeleteDestination(k, to) })
}

type meteredObjects[K comparable] struct {
	objects[K]
	*meter
}

func (m meteredObjects[K]) Add(k K) error {
	return m.of(func() error { return m.objects.Add(k) })
}

func (m meteredObjects[K]) Delete(k K) error {
	return m.of(func() error { return m.objects.Delete(k) })
}

type meteredTools struct {
	iptables.Tools
	*meter
}

func (m meteredTools) Restore(ctx context.Context, f proxier.Family, input []byte) error {
	return m.of(func() error { return m.Tools.Restore(ctx, f, input) })
}

// BenchmarkKernel is a first sync, by what it waits for, and the changes that follow: in
// messages to the kernel, and in rules.
func BenchmarkKernel(b *testing.B) {
	for _, services := range []int{1, 10_000} {
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) {
			opts := needs(b)
			for b.Loop() {
				measure(b, opts, services)
			}
		})
	}
}

func measure(b *testing.B, opts Options, services int) {
	n := lab.NewT(b).Node("node1")
	var rules, servers, addrs, members meter
	opts.Tools = meteredTools{opts.Tools.(iptables.Tools), &rules}
	tier := onNode(b, n, opts)
	defer tier.Close()
	tier.servers.kernel = meteredServers{tier.servers.kernel, &servers}
	tier.addrs.kernel = meteredObjects[netip.Addr]{tier.addrs.kernel, &addrs}
	tier.members.kernel = meteredObjects[member]{tier.members.kernel, &members}

	all := proxier.Update{Full: true, NodeRules: nodeRules}
	for i := range services {
		all.Changes = append(all.Changes, proxier.PortChange{New: clusterIPOf(i, 2)})
	}
	began := time.Now()
	if err := tier.Sync(b.Context(), all); err != nil {
		b.Fatal(err)
	}
	whole := time.Since(began)
	for name, took := range map[string]time.Duration{
		"first-sync": whole, "virtual-servers": servers.took, "addresses": addrs.took, "set-members": members.took, "rules": rules.took,
	} {
		b.ReportMetric(took.Seconds(), name+"-s")
	}

	const changes = 20
	before := servers.n + addrs.n + members.n + rules.n
	began = time.Now()
	for i := range changes {
		if err := tier.Sync(b.Context(), proxier.Update{Changes: []proxier.PortChange{{New: clusterIPOf(0, 3-i%2)}}}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(time.Since(began).Milliseconds())/changes, "ms/change")
	b.ReportMetric(float64(servers.n+addrs.n+members.n+rules.n-before)/changes, "messages/change")
	out, err := n.Command(b.Context(), "iptables-save").Output()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(strings.Count(string(out), "\n-A ")), "rules")
}
