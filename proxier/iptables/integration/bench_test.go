// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/synthetic"
)

// benchSizes are clusters: many Services, and large ones.
var benchSizes = []struct{ services, endpoints int }{{10000, 2}, {5000, 10}}

// timedTools measure the time of the programs.
type timedTools struct {
	iptablestest.Tools
	restoring, saving time.Duration
	restores          int
	served            time.Time // when the first frontend was served
}

func (t *timedTools) Restore(ctx context.Context, f proxier.Family, input []byte) error {
	start := time.Now()
	err := t.Tools.Restore(ctx, f, input)
	t.restoring += time.Since(start)
	t.restores++
	if t.served.IsZero() && bytes.Contains(input, []byte("-j KUBE-SVC-")) {
		t.served = time.Now()
	}
	return err
}

func (t *timedTools) SaveAll(ctx context.Context, f proxier.Family, tables ...string) (map[string]*xtables.Table, error) {
	start := time.Now()
	saved, err := t.Tools.SaveAll(ctx, f, tables...)
	t.saving += time.Since(start)
	return saved, err
}

// benchCluster has the objects for a tier.
type benchCluster struct {
	tracker   *proxier.ChangeTracker
	table     *proxier.Table
	endpoints int
}

func newBenchCluster(services, endpoints int) *benchCluster {
	c := &benchCluster{tracker: proxier.NewChangeTracker("node1", time.Time{}, nil), endpoints: endpoints}
	c.table = proxier.NewTable(proxier.Facts{Zone: "z1", Pods: proxier.Detector{CIDRs: []netip.Prefix{netip.MustParsePrefix("172.16.0.0/12")}}}, proxier.Policy{})
	for i := range services {
		c.tracker.UpdateService(synthetic.Service(i))
		c.tracker.UpdateEndpointSlice(synthetic.Slice(i, 0, i*endpoints, endpoints))
	}
	c.table.Apply(c.tracker.Take())
	return c
}

func (c *benchCluster) all() proxier.Update {
	rules := c.table.NodeRules()
	return proxier.Update{Full: true, NodeRules: &rules, Changes: c.table.All()}
}

// change replaces an endpoint of a Service.
func (c *benchCluster) change(service, round int) proxier.Update {
	s := synthetic.Slice(service, 0, service*c.endpoints, c.endpoints)
	s.Endpoints[0].Addresses[0] = fmt.Sprintf("172.31.%d.%d", round>>8&255, round&255)
	c.tracker.UpdateEndpointSlice(s)
	return proxier.Update{Changes: c.table.Apply(c.tracker.Take())}
}

// BenchmarkSync measures the tier alone, on real tables. An iteration writes all rules on an empty
// node, then changes of one endpoint each, then syncs without a change, and restarts the process
// with all rules in place.
func BenchmarkSync(b *testing.B) {
	for _, variant := range []xtables.Variant{xtables.NFT, xtables.Legacy} {
		for _, size := range benchSizes {
			if testing.Short() {
				size.services /= 10
			}
			b.Run(fmt.Sprintf("variant=%s/services=%d/endpoints=%d", variant, size.services, size.endpoints), func(b *testing.B) {
				c := newBenchCluster(size.services, size.endpoints)
				sum := map[string]time.Duration{}
				var changes []time.Duration
				for i := range b.N {
					changes = append(changes, benchSync(b, variant, c, i, sum)...)
				}
				for name, d := range sum {
					b.ReportMetric(d.Seconds()*1e3/float64(b.N), name+"-ms")
				}
				slices.Sort(changes)
				b.ReportMetric(changes[len(changes)/2].Seconds()*1e3, "change-p50-ms")
				b.ReportMetric(changes[len(changes)*99/100].Seconds()*1e3, "change-p99-ms")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

func benchSync(b *testing.B, variant xtables.Variant, c *benchCluster, round int, sum map[string]time.Duration) (changes []time.Duration) {
	b.Helper()
	node := lab.NewT(b).Node("node1")
	programs, err := xtables.New(variant)
	if err != nil {
		lab.SkipOrFail(b, err)
	}
	tools := &timedTools{Tools: programs}
	open := func() *iptables.Tier {
		var t *iptables.Tier
		if err := node.Do(func() (err error) {
			t, err = iptables.Open(context.Background(), iptables.Options{Tools: tools, Flows: staleudp.New(staleudp.Options{Table: conntrack.Kernel{}})})
			return err
		}); err != nil {
			b.Fatal(err)
		}
		return t
	}
	sync := func(t *iptables.Tier, u proxier.Update, name string) time.Duration {
		*tools = timedTools{Tools: programs}
		start := time.Now()
		if err := t.Sync(context.Background(), u); err != nil {
			b.Fatal(err)
		}
		took := time.Since(start)
		sum[name] += took
		sum[name+"-programs"] += tools.restoring + tools.saving
		if name == "first" {
			sum["first-frontend"] += tools.served.Sub(start)
		}
		return took
	}
	t := open()
	sync(t, c.all(), "first")
	const events = 50
	for i := range events {
		changes = append(changes, sync(t, c.change(i*97, round*events+i), "changes"))
	}
	sync(t, c.all(), "unchanged")
	if tools.restores > 0 {
		b.Errorf("a sync without a change wrote %d times", tools.restores)
	}
	if err := t.Close(); err != nil {
		b.Error(err)
	}
	t = open()
	defer t.Close()
	sync(t, c.all(), "restart")
	if tools.restores > 0 {
		b.Errorf("a restart without a change wrote %d times", tools.restores)
	}
	return changes
}
