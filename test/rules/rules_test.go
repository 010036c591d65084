// SPDX-License-Identifier: Apache-2.0

//go:build linux

package rules

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/test/binary"
	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/synthetic"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// first is the Service that is programmed before all others, and dialled is the one
// that changes.
var (
	first   = netip.MustParseAddrPort("10.96.0.1:443")
	dialled = netip.MustParseAddrPort("10.96.0.10:80")
)

const targetPort = 8080

// ground is a node with pods to dial, and the cluster it is in.
type ground struct {
	node    *lab.Node
	shell   *lab.Pod
	pods    []*lab.Pod
	objects []fakeapi.Object
}

func newGround(b testing.TB, variant xtables.Variant, services, endpoints int) *ground {
	b.Helper()
	g := &ground{node: lab.NewT(b).Node("node1")}
	g.shell = g.node.Pod("shell")
	for i := range 4 {
		pod := g.node.Pod(fmt.Sprintf("web%d", i))
		if _, err := pod.ServeTCP(targetPort); err != nil {
			b.Fatal(err)
		}
		g.pods = append(g.pods, pod)
	}
	for i := range services {
		s := synthetic.Service(i)
		s.Spec.HealthCheckNodePort = 0                            // listeners are not rules
		if s.Spec.SessionAffinity == v1.ServiceAffinityClientIP { // an API server says how long
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](10800)}}
		}
		g.objects = append(g.objects, s, synthetic.Slice(i, 0, i*endpoints, endpoints))
	}
	g.objects = append(g.objects,
		service("default", "kubernetes", first), slice("default", "kubernetes", g.pods[0]),
		service("shop", "web", dialled), slice("shop", "web", g.pods[0]))
	// Where kubelet runs it leaves this hint.
	err := g.node.Command(b.Context(), "iptables-"+variant.String(), "-t", "mangle", "-N", "KUBE-IPTABLES-HINT").Run()
	if err != nil {
		b.Fatal(err)
	}
	return g
}

func service(namespace, name string, vip netip.AddrPort) *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: v1.ServiceSpec{Type: v1.ServiceTypeClusterIP, ClusterIP: vip.Addr().String(), ClusterIPs: []string{vip.Addr().String()},
			Ports: []v1.ServicePort{{Name: "p", Port: int32(vip.Port()), Protocol: v1.ProtocolTCP}}},
	}
}

func slice(namespace, name string, pods ...*lab.Pod) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("p"), Port: ptr.To[int32](targetPort), Protocol: ptr.To(v1.ProtocolTCP)}},
	}
	for _, pod := range pods {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{pod.Addr4.String()}, NodeName: &pod.Node.Name})
	}
	return s
}

// side is one of the two.
type side struct {
	name string
	opts upstream.Options
}

// sides are ours and upstream's.
func sides(b *testing.B, variant xtables.Variant) []side {
	b.Helper()
	theirs := upstream.BinaryT(b)
	first := ours(b, variant)
	return []side{
		first,
		{"upstream", upstream.Options{Binary: theirs, Mode: "iptables", Args: append([]string{"--v=2"}, upstream.Flags...), Env: first.opts.Env}},
	}
}

// ours is our side alone. The variant is that of the plain commands, which upstream runs: they are in a directory that comes first.
func ours(tb testing.TB, variant xtables.Variant) side {
	tb.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		lab.SkipOrFailProgram(tb, fmt.Errorf("%w, which builds kube-proxy", err))
	}
	dir := tb.TempDir()
	upstream.ToolsT(tb, dir, variant.String())
	path, err := binary.KubeProxy(dir)
	if err != nil {
		tb.Fatal(err)
	}
	return side{"tandem", upstream.Options{Binary: path, Mode: "iptables", Args: []string{"--v=2"}, Env: []string{"PATH=" + dir + ":" + os.Getenv("PATH")}}}
}

// start runs a side and waits until all is programmed. It returns how long that took from
// the process's start, and how long until the first Service could be reached.
func (g *ground) start(ctx context.Context, b testing.TB, s side) (p *upstream.Proxy, programmed, reached time.Duration, err error) {
	b.Helper()
	s.opts.Objects = g.objects
	ctx, cancel := context.WithCancel(ctx)
	b.Cleanup(cancel)
	began := time.Now()
	var answered time.Time
	done := make(chan struct{})
	asking, stopAsking := context.WithCancel(ctx)
	go func() {
		defer close(done)
		for asking.Err() == nil {
			try, cancel := context.WithTimeout(asking, 50*time.Millisecond)
			_, err := g.shell.Ask(try, "tcp", first)
			cancel()
			if err == nil {
				answered = time.Now()
				return
			}
		}
	}()
	p, err = upstream.Start(ctx, g.node, s.opts)
	end := time.Now()
	if err == nil {
		began = p.Started
		end, err = upstream.ProgrammedAt(ctx, g.node)
	}
	if err == nil {
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			err = errors.New("the first Service cannot be reached")
		}
	}
	stopAsking()
	<-done
	return p, end.Sub(began), answered.Sub(began), err
}

// change has another pod serve the Service, and waits until connections go there.
func (g *ground) change(b *testing.B, p *upstream.Proxy, to *lab.Pod) time.Duration {
	b.Helper()
	began := time.Now()
	p.API.Put(slice("shop", "web", to))
	for time.Since(began) < time.Minute {
		ctx, cancel := context.WithTimeout(b.Context(), 200*time.Millisecond)
		reply, err := g.shell.Ask(ctx, "tcp", dialled)
		cancel()
		if err == nil && reply.Server == to.Name {
			return time.Since(began)
		}
		<-time.After(time.Millisecond / 2) // leave the CPU to those who work
	}
	b.Fatalf("no change within a minute; the log:\n%s", tail(p.Log()))
	return 0
}

func tail(log string) string { return log[max(0, len(log)-3000):] }

// resident is the memory of the proxy on the node.
func resident(b *testing.B, node *lab.Node, s side) float64 {
	b.Helper()
	pids, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		b.Fatal(err)
	}
	inode, err := node.NetNSInode()
	if err != nil {
		b.Fatal(err)
	}
	for _, path := range pids {
		dir := filepath.Dir(path)
		line, _ := os.ReadFile(path)
		ns, _ := os.Readlink(dir + "/ns/net")
		if !strings.HasPrefix(string(line), s.opts.Binary+"\x00") || ns != fmt.Sprintf("net:[%d]", inode) {
			continue
		}
		text, _ := os.ReadFile(dir + "/status")
		for line := range strings.Lines(string(text)) {
			if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
				kib, _ := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 64)
				return kib / 1024
			}
		}
	}
	b.Fatal("the process is not there")
	return 0
}

// settleTime is how long a process has to give back what its start took.
const settleTime = 10 * time.Second

// quiet is longer than both wait between syncs.
const quiet = 1200 * time.Millisecond

func percentile(list []time.Duration, p int) float64 {
	slices.Sort(list)
	return list[(len(list)-1)*p/100].Seconds() * 1e3
}

// BenchmarkRules puts a node's life with 10,000 Services beside upstream's: everything
// into empty tables, one endpoint that changes after a quiet period, and a new process
// that finds everything as it should be. Times are from the process's start.
func BenchmarkRules(b *testing.B) {
	for _, variant := range []xtables.Variant{xtables.Legacy, xtables.NFT} {
		for _, s := range sides(b, variant) {
			b.Run(fmt.Sprintf("variant=%s/services=10000/side=%s", variant, s.name), func(b *testing.B) {
				for range b.N {
					g := newGround(b, variant, 10000, 2)
					p, programmed, reached, err := g.start(b.Context(), b, s)
					if err != nil {
						b.Fatal(err)
					}
					b.ReportMetric(programmed.Seconds(), "first-s")
					b.ReportMetric(reached.Seconds(), "frontend-s")
					<-time.After(settleTime)
					b.ReportMetric(resident(b, g.node, s), "RSS-MiB")
					var changes []time.Duration
					for i := range 40 {
						changes = append(changes, g.change(b, p, g.pods[1+i%3]))
						<-time.After(quiet)
					}
					b.ReportMetric(percentile(changes, 50), "change-p50-ms")
					b.ReportMetric(percentile(changes, 99), "change-p99-ms")
					b.ReportMetric(resident(b, g.node, s), "RSS-later-MiB")
					if err := p.Close(); err != nil {
						b.Error(err)
					}
					g.objects[len(g.objects)-1] = slice("shop", "web", g.pods[1+39%3])
					p, programmed, _, err = g.start(b.Context(), b, s)
					if err != nil {
						b.Fatal(err)
					}
					b.ReportMetric(programmed.Seconds(), "restart-s")
					_ = p.Close()
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// BenchmarkLargeRules is 5,000 Services of ten endpoints in the variant where one
// restore takes with the square of what it has; upstream is given two minutes.
func BenchmarkLargeRules(b *testing.B) {
	for _, s := range sides(b, xtables.NFT) {
		b.Run("side="+s.name, func(b *testing.B) {
			for range b.N {
				g := newGround(b, xtables.NFT, 5000, 10)
				ctx, cancel := context.WithTimeout(b.Context(), 2*time.Minute)
				p, programmed, reached, err := g.start(ctx, b, s)
				late := ctx.Err() != nil
				cancel()
				if err != nil && !late {
					b.Fatal(err)
				}
				if late {
					b.Logf("not done within two minutes")
				}
				b.ReportMetric(programmed.Seconds(), "first-s")
				b.ReportMetric(reached.Seconds(), "frontend-s")
				if p != nil {
					_ = p.Close()
				}
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkConnectsDuringChanges dials one Service among 5,000 while its endpoints
// change, all of which are alive all the time: no connection may fail.
func BenchmarkConnectsDuringChanges(b *testing.B) {
	const rate, events = 500, 30
	for _, variant := range []xtables.Variant{xtables.Legacy, xtables.NFT} {
		for _, s := range sides(b, variant) {
			b.Run(fmt.Sprintf("variant=%s/side=%s", variant, s.name), func(b *testing.B) {
				for range b.N {
					g := newGround(b, variant, 5000, 2)
					p, _, _, err := g.start(b.Context(), b, s)
					if err != nil {
						b.Fatal(err)
					}
					ctx, stop := context.WithCancel(b.Context())
					result := make(chan lab.Dials)
					go func() { result <- g.shell.DialOften(ctx, "tcp", dialled, rate) }()
					for i := range events {
						pods := slices.Delete(slices.Clone(g.pods), i%len(g.pods), i%len(g.pods)+1)
						p.API.Put(slice("shop", "web", pods...))
						<-time.After(quiet)
					}
					stop()
					d := <-result
					b.ReportMetric(float64(d.All), "connects")
					b.ReportMetric(float64(d.Failed), "failed")
					b.ReportMetric(d.Slowest.Seconds()*1e3, "slowest-ms")
					if d.Err != nil {
						b.Logf("the first of %d failures: %v", d.Failed, d.Err)
					}
					_ = p.Close()
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
