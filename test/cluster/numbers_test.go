// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

const (
	// settle is how long a process may take to return the memory of its start.
	settle = 15 * time.Second
	// quiet is longer than the minimum interval between syncs of all sides.
	quiet = 1200 * time.Millisecond
	// rate is the number of connections per second while endpoints change.
	rate = 500
)

// BenchmarkProxy compares this proxy with upstream's on a node with 5,000 Services of ten
// endpoints, with the same API server. It measures the start, from exec; memory after the start;
// the latency of an endpoint change after a quiet period, from before its write until connections
// to the VIP reach the new endpoint; failed connections while endpoints change; and the latency of
// a change that was made while no process ran, from the exec of the process after kill -9. CPU
// time includes tools that a process runs.
func BenchmarkProxy(b *testing.B) {
	theirs := upstream.BinaryT(b)
	c := newCluster(b, 3, nil)
	c.crowd(5000, 10)
	mode := `mode: ""`
	for i, s := range []struct{ side, mode, binary string }{
		{"tandem", "ebpf", ourBinary(b)}, {"upstream", "iptables", theirs}, {"upstream", "nftables", theirs},
	} {
		if err := editConfig(b.Context(), c.client, map[string]string{mode: "mode: " + s.mode}); err != nil {
			b.Fatal(err)
		}
		mode = "mode: " + s.mode
		n := c.nodes[i]
		// Make upstream's mode iptables use the variant that is fast with many rules.
		tools := b.TempDir()
		upstream.ToolsT(b, tools, "legacy")
		c.hosts[n.Name].tools = tools
		web := fmt.Sprintf("web-%s-%s", s.side, s.mode)
		shell := n.Pod("shell-" + s.mode).Sandbox
		pods := []*lab.Pod{n.Pod(web + "-1"), n.Pod(web + "-2")}
		for _, p := range pods {
			if _, err := p.ServeTCP(targetPort); err != nil {
				b.Fatal(err)
			}
		}
		to := vip(c.expose(web, func(s *v1.Service) { s.Spec.Selector, s.Spec.Ports = nil, s.Spec.Ports[:1] }), 0)
		c.lead(web, pods[0])
		b.Run(fmt.Sprintf("side=%s/mode=%s", s.side, s.mode), func(b *testing.B) {
			for range b.N {
				c.measure(b, n, shell, s.binary, web, to, pods)
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

func (c *cluster) measure(b *testing.B, n *lab.Node, shell *lab.Sandbox, binary, web string, to netip.AddrPort, pods []*lab.Pod) {
	began := time.Now()
	p := c.start(n, binary)
	first := make(chan time.Duration)
	go func() {
		c.connects(b, shell, netip.AddrPortFrom(lab.ServicePrefix4.Addr().Next(), 443))
		first <- time.Since(began)
	}()
	for p.unprogrammed() != nil {
		if p.Ended() || time.Since(began) > patience {
			b.Fatalf("it is not programmed:\n%s", p.Log)
		}
		<-time.After(50 * time.Millisecond)
	}
	b.ReportMetric(time.Since(began).Seconds(), "all-s")
	b.ReportMetric((<-first).Seconds(), "first-s")
	c.leads(b, shell, to, pods[0])
	<-time.After(settle)
	b.ReportMetric(p.Memory(b, "VmRSS"), "RSS-MiB")
	b.ReportMetric(p.Memory(b, "VmHWM"), "peak-MiB")

	const changes, counted = 100, 30 // CPU time and failed connections are those of the counted changes
	var took []time.Duration
	cpu := p.cpu(b)
	for i := range changes {
		next := pods[(i+1)%2]
		began := time.Now()
		c.lead(web, next)
		c.leads(b, shell, to, next)
		took = append(took, time.Since(began))
		<-time.After(quiet)
		if i+1 == counted {
			b.ReportMetric((p.cpu(b) - cpu).Seconds(), "CPU-s")
		}
	}
	slices.Sort(took)
	b.ReportMetric(took[(changes-1)/2].Seconds()*1e3, "change-p50-ms")
	b.ReportMetric(took[(changes-1)*99/100].Seconds()*1e3, "change-p99-ms")

	ctx, stop := context.WithCancel(b.Context())
	result := make(chan lab.Dials)
	go func() { result <- shell.DialOften(ctx, "tcp", to, rate) }()
	for i := range counted {
		c.lead(web, pods[(i+1)%2])
		<-time.After(quiet)
	}
	stop()
	d := <-result
	b.ReportMetric(float64(d.All), "connects")
	b.ReportMetric(float64(d.Failed), "failed")
	if d.Err != nil {
		b.Logf("the first of %d failures: %v", d.Failed, d.Err)
	}
	c.leads(b, shell, to, pods[counted%2]) // some sides are slow

	_ = p.Close()
	c.lead(web, pods[1])
	began = time.Now()
	p = c.restart(n, binary)
	c.leads(b, shell, to, pods[1])
	b.ReportMetric(time.Since(began).Seconds(), "restart-s")
	_ = p.Close()
}

// connects waits until a connection succeeds.
func (c *cluster) connects(b *testing.B, from *lab.Sandbox, to netip.AddrPort) {
	for began := time.Now(); time.Since(began) < patience; <-time.After(5 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(b.Context(), 50*time.Millisecond)
		conn, err := from.Dial(ctx, "tcp", to)
		cancel()
		if err == nil {
			_ = conn.Close()
			return
		}
	}
	b.Errorf("no connection to %s", to)
}

// leads waits until connections reach the Pod.
func (c *cluster) leads(b *testing.B, from *lab.Sandbox, to netip.AddrPort, pod *lab.Pod) {
	b.Helper()
	for began := time.Now(); time.Since(began) < patience; <-time.After(time.Millisecond / 2) {
		ctx, cancel := context.WithTimeout(b.Context(), 200*time.Millisecond)
		reply, err := from.Ask(ctx, "tcp", to)
		cancel()
		if err == nil && reply.Server == pod.Name {
			return
		}
	}
	b.Fatalf("connections to %s do not reach %s", to, pod.Name)
}

// lead sets the only endpoint of a Service.
func (c *cluster) lead(name string, pod *lab.Pod) {
	c.tb.Helper()
	slices := c.client.DiscoveryV1().EndpointSlices(namespace)
	s := sliceOf(name, discoveryv1.Endpoint{Addresses: []string{pod.Addr4.String()}, NodeName: &pod.Node.Name})
	_, err := slices.Update(c.tb.Context(), s, metav1.UpdateOptions{})
	if err != nil {
		_, err = slices.Create(c.tb.Context(), s, metav1.CreateOptions{})
	}
	if err != nil {
		c.tb.Fatal(err)
	}
}

// cpu returns the CPU time of the process and of children that it waited for.
func (p *process) cpu(b *testing.B) (total time.Duration) {
	b.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
	if err != nil {
		b.Fatal(err)
	}
	const first, ticks = 11, 100 // utime, stime, cutime and cstime, counted from the state
	for _, field := range strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))[first : first+4] {
		n, err := strconv.Atoi(field)
		if err != nil {
			b.Fatal(err)
		}
		total += time.Duration(n) * time.Second / ticks
	}
	return total
}
