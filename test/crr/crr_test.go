// SPDX-License-Identifier: Apache-2.0

//go:build linux

package crr

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/component-base/cli"

	"github.com/tandem-proxy/tandem/cmd/kube-proxy/app"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// asProxy makes a copy of the test program our kube-proxy.
const asProxy = "TANDEM_TEST_AS_KUBE_PROXY"

func TestMain(m *testing.M) {
	if os.Getenv(asProxy) != "" {
		os.Exit(cli.Run(app.NewCommand()))
	}
	os.Exit(m.Run())
}

// ebpf is our kube-proxy.
var ebpf = &Proxy{
	Binary: os.Args[0], Env: []string{asProxy + "=1"}, Mode: "ebpf",
	Args:  func(n *lab.Node) []string { return []string{"--ebpf-cgroup-root=" + n.CgroupPath()} },
	Ready: onUplink,
}

// rules is our kube-proxy in mode iptables.
var rules = &Proxy{Binary: os.Args[0], Env: []string{asProxy + "=1"}, Mode: "iptables", Title: "tandem-iptables"}

// direct is our kube-proxy with direct server return.
var direct = &Proxy{
	Binary: os.Args[0], Env: []string{asProxy + "=1"}, Mode: "ebpf", Title: "ebpf-dsr",
	Args: func(n *lab.Node) []string { return []string{"--ebpf-cgroup-root=" + n.CgroupPath(), "--lb-mode=dsr"} },
	Ready: func(ctx context.Context, n *lab.Node) error {
		if err := onUplink(ctx, n); err != nil {
			return err
		}
		return wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
			metrics, err := n.Fetch(ctx, 10249, "/metrics")
			const endpoints = "tandem_direct_server_return_endpoints"
			return strings.Contains(metrics, endpoints+`{state="masqueraded"} 0`) && !strings.Contains(metrics, endpoints+`{state="ready"} 0`), err
		})
	},
}

// onUplink waits until programs see what comes in from outside.
func onUplink(ctx context.Context, n *lab.Node) error {
	return n.Do(func() error {
		uplink, err := net.InterfaceByName(lab.Uplink)
		if err != nil {
			return err
		}
		for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline) && ctx.Err() == nil; time.Sleep(time.Millisecond) {
			found, err := tc.Find(uplink.Index, tc.Ingress, func(*ciliumebpf.Program) bool { return true })
			tc.Close(found)
			if err != nil || len(found) > 0 {
				return err
			}
		}
		return errors.New("no program on the uplink")
	})
}

// BenchmarkCRR puts upstream's modes and ours beside direct connections; an
// iteration is a turn of all of them. What is reported is per connection, and
// with half of the turns within ± of the ratio.
func BenchmarkCRR(b *testing.B) {
	binary := upstream.BinaryT(b)
	for _, services := range []int{10, 1000, 10000, 50000} {
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) {
			variants := []Variant{Direct{}, Upstream(binary, "nftables"), ebpf}
			// The time that iptables-restore takes grows with the square: a minute
			// for 10,000 Services, and half an hour for 50,000.
			if services <= 10000 {
				variants = append(variants, Upstream(binary, "iptables"), rules)
			}
			c := compare(b, services, variants...)
			for path := range Paths {
				b.Run(fmt.Sprintf("path=%s", path), func(b *testing.B) {
					results, err := c.Path(path, b.N)
					if err != nil {
						b.Fatal(err)
					}
					report(b, results)
				})
			}
		})
	}
}

// BenchmarkCRRDirect puts connections from outside to a pod of another node beside each other: masqueraded and by direct
// server return.
func BenchmarkCRRDirect(b *testing.B) {
	c := compare(b, 10, Direct{}, ebpf, direct)
	results, err := c.Path(NodePortRemote, b.N)
	if err != nil {
		b.Fatal(err)
	}
	report(b, results)
}

func report(b *testing.B, results []Result) {
	b.Helper()
	for _, r := range results {
		b.ReportMetric(float64(r.Cost.Nanoseconds())/1e3, r.Variant+"-µs")
		if r.Variant != "direct" {
			b.ReportMetric(r.Ratio, r.Variant+"/direct")
			b.ReportMetric(r.Spread, r.Variant+"/direct-±")
		}
	}
	b.ReportMetric(0, "ns/op")
}

func compare(tb testing.TB, services int, variants ...Variant) *Comparison {
	tb.Helper()
	c, err := Compare(context.Background(), func() (*lab.Lab, error) { return lab.NewT(tb), nil }, services, variants...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := c.Close(); err != nil {
			tb.Error(err)
		}
	})
	return c
}
