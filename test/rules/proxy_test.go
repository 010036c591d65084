// SPDX-License-Identifier: Apache-2.0

//go:build linux

package rules

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	k8smetrics "k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/informers"
	"github.com/tandem-proxy/tandem/metrics"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/xtables"
)

// asProxy makes a copy of the test program a kube-proxy that has this tier alone.
const asProxy = "TANDEM_TEST_AS_IPTABLES_PROXY"

func TestMain(m *testing.M) {
	if os.Getenv(asProxy) != "" {
		if err := serve(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	lab.Main()
	os.Exit(m.Run())
}

type registry struct{}

func (registry) Register(m k8smetrics.Registerable) error { return legacyregistry.Register(m) }
func (registry) CustomRegister(c k8smetrics.StableCollector) error {
	return legacyregistry.CustomRegister(c)
}

// settled gives back what the start took, as the shipped program does.
type settled struct {
	*metrics.Metrics
	once sync.Once
}

func (s *settled) Synced(info proxier.SyncInfo) {
	s.Metrics.Synced(info)
	klog.InfoS("Synced", "full", info.Full, "ports", info.Ports, "took", info.End.Sub(info.Start), "err", info.Err)
	if info.Err == nil {
		s.once.Do(func() { time.AfterFunc(3*time.Second, debug.FreeOSMemory) })
	}
}

// serve brings what an API server tells into the kernel.
func serve() error {
	flags := flag.NewFlagSet("kube-proxy", flag.ContinueOnError)
	master := flags.String("master", "", "")
	node := flags.String("hostname-override", "", "")
	pods := flags.String("cluster-cidr", "", "")
	flags.String("proxy-mode", "", "")
	flags.Int("oom-score-adj", 0, "")
	if err := flags.Parse(os.Args[1:]); err != nil {
		return err
	}
	debug.SetGCPercent(50) // as the shipped program
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	client, err := informers.NewClient(informers.ClientConfig{Master: *master, QPS: 100, Burst: 100})
	if err != nil {
		return err
	}
	tools, err := xtables.Find(ctx)
	if err != nil {
		return err
	}
	klog.InfoS("Found the programs", "variant", tools.Variant())
	tier, err := iptables.Open(ctx, iptables.Options{Tools: tools, Reporter: proxier.ReporterFunc(func(p proxier.Problem) { klog.InfoS("Problem", "problem", p) })})
	if err != nil {
		return err
	}
	defer tier.Close()
	m := &settled{Metrics: metrics.New([]proxier.Family{proxier.IPv4, proxier.IPv6})}
	if err := m.Register(registry{}, func() (metrics.Tables, bool) { return metrics.Tables{}, false }); err != nil {
		return err
	}
	facts := proxier.Facts{}
	for text := range strings.SplitSeq(*pods, ",") {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return err
		}
		facts.Pods.CIDRs = append(facts.Pods.CIDRs, prefix)
	}
	px, err := proxier.New(proxier.Options{
		NodeName: *node, Facts: facts, Policy: proxier.Policy{}, Tier: m.Tier(tier), Observer: m, Runner: proxier.DefaultRunnerOptions(),
	})
	if err != nil {
		return err
	}
	m.SetChanges(px.Tracker().Counts)
	var running sync.WaitGroup
	failed := make(chan error, 2)
	running.Go(func() { failed <- informers.New(client, px, informers.Options{NodeName: *node}).Run(ctx) })
	running.Go(func() { px.Run(ctx) })
	server := &http.Server{Addr: "127.0.0.1:10249", Handler: legacyregistry.Handler()}
	running.Go(func() { failed <- server.ListenAndServe() })
	defer running.Wait()
	defer server.Close()
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		stop()
		return errors.Join(errors.New("a part has ended"), err)
	}
}
