// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	"k8s.io/component-base/configz"
	k8smetrics "k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/observe/events"
	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/observe/metrics"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
	"github.com/tandem-proxy/tandem/sources/apiserver"
	"github.com/tandem-proxy/tandem/sources/manifests"
	"github.com/tandem-proxy/tandem/sources/nodefacts"
)

// component names this process in Events, as upstream's does.
const component = "kube-proxy"

// busyInterval is how often a proxy asks whether the one before it is gone.
const busyInterval = time.Second

// source is where objects come from.
type source interface {
	Run(ctx context.Context) error
}

// proxy is one process: everything between a source and a kernel.
type proxy struct {
	opts     *Options
	started  time.Time
	families []proxier.Family
	decision capabilities.Decision
	report   capabilities.Report
	cgroup   string

	client   *apiserver.Client // nil with manifests
	feed     *feed             // nil while it waits for another process to end
	recorder *events.Writer    // nil with manifests

	metrics  *metrics.Metrics
	flows    *staleudp.Reconciler
	health   *health.Health
	services *health.Services
	ready    *health.Readiness
	problems *events.Reporter
	memory   memory
	explain  explainer
	facts    facts
	configz  *configz.Config

	// tierMu is held while a server asks the tiers, so that they are not closed
	// meanwhile.
	tierMu sync.Mutex
	tiers  tiers // none before they are open and once they are closed
}

// runProxy runs the proxy until ctx is done. The kernel state stays.
func runProxy(ctx context.Context, o *Options) error {
	ctx, cancel := context.WithCancel(ctx)
	p, err := newProxy(ctx, o)
	defer func() {
		cancel()
		if p.feed != nil {
			p.feed.stop()
		}
	}()
	if err != nil {
		return err
	}
	return p.run(ctx)
}

// newProxy has the source list, asks the kernel what it can do meanwhile, and builds what
// does not need the kernel. After an error too, the source may run.
func newProxy(ctx context.Context, o *Options) (*proxy, error) {
	c := o.Config
	p := &proxy{opts: o, started: time.Now(), families: families()}
	if err := checkFamilies(c, p.families); err != nil {
		return p, err
	}
	p.metrics = metrics.New(p.families)
	if c.Tandem.Manifests != "" {
		if err := manifests.Check(c.Tandem.Manifests); err != nil {
			return p, err
		}
	} else if err := p.connect(ctx); err != nil {
		return p, err
	}
	p.problems = events.New(ctx, events.Options{NodeName: o.nodeName, Recorder: p.recorder, Counter: p.metrics.Problem})
	p.feed = startFeed(ctx, p.source)
	if err := p.selectMode(ctx); err != nil {
		return p, err
	}
	p.explain.node, p.explain.mode, p.explain.tiers, p.explain.carrier = o.nodeName, string(p.decision.Mode), p.explainTiers, p.carrier
	var err error
	if p.facts.settings, err = nodefacts.New(c, o.gate); err != nil {
		return p, err
	}
	p.facts.uplinks = devices.New(devices.Options{Names: c.Tandem.EBPF.Devices})
	p.flows = staleudp.New(staleudp.Options{Table: conntrack.Kernel{}, Exclusive: true, Observer: p.metrics.Reconciled, Ended: p.closeStrays})
	p.health = health.New(health.Options{
		// Upstream's factor: one sync may fail and be repeated.
		Timeout:  2 * p.runner(c).MaxInterval,
		Families: p.families, Healthz: p.metrics.Healthz, Livez: p.metrics.Livez,
	})
	p.ready = health.NewReadiness(health.ReadinessOptions{Healthy: p.health.Healthy, Probe: p.probe, Count: p.metrics.Readyz})
	p.services = health.NewServices(health.ServicesOptions{Families: p.families, Healthy: p.health.Healthy, Reporter: p.problems})
	return p, p.tuneConntrack(ctx)
}

// selectMode probes and decides, and logs the decision once.
func (p *proxy) selectMode(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	p.cgroup = p.opts.Config.Tandem.EBPF.CgroupRoot
	var noRoot error
	if p.cgroup == "" {
		p.cgroup, noRoot = capabilities.FindCgroup2Root(ownProc)
	}
	p.report = capabilities.Probe(ctx, capabilities.Options{CgroupRoot: p.cgroup, Mask: p.opts.mask})
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := p.decide(ctx); err != nil {
		return err
	}
	if noRoot != nil && p.decision.Mode == capabilities.ModeEBPF {
		return noRoot
	}
	logger.Info("Selected the proxy mode", "mode", p.decision.Mode, "reasons", texts(p.decision.Reasons),
		"degraded", texts(p.decision.Degraded), "kernel", p.report.Kernel, "cgroupRoot", p.cgroup)
	return nil
}

// decide chooses the mode by what the kernel can do.
func (p *proxy) decide(ctx context.Context) error {
	available := make([]capabilities.Mode, 0, len(availableModes))
	for _, m := range availableModes {
		available = append(available, capabilities.Mode(m))
	}
	request := capabilities.Request{
		Mode: capabilities.Mode(p.opts.Config.KubeProxy.Mode), Fallback: p.fallbackModes(), Available: available,
	}
	p.decision = capabilities.Select(p.report, request)
	if p.decision.Mode == capabilities.ModeIPVS {
		// What it needs of modules, and of the tools, is only found out so.
		if err := tryIPVS(ctx, p.opts.Config); err != nil {
			request.Failed = map[capabilities.Mode]error{capabilities.ModeIPVS: err}
			p.decision = capabilities.Select(p.report, request)
		}
	}
	if p.decision.Err != nil {
		return fmt.Errorf("kernel %s: %w", p.report.Kernel, p.decision.Err)
	}
	return nil
}

func texts(reasons []capabilities.Reason) []string {
	all := make([]string, 0, len(reasons))
	for _, r := range reasons {
		all = append(all, r.String())
	}
	return all
}

// connect builds the client of the API server and the recorder of Events.
func (p *proxy) connect(ctx context.Context) error {
	client, err := newClient(p.opts)
	if err != nil {
		return err
	}
	p.client = client
	p.recorder = events.NewWriter(component, client.Events())
	return nil
}

// newClient asks nobody yet.
func newClient(o *Options) (*apiserver.Client, error) {
	c := &o.Config.KubeProxy.ClientConnection
	return apiserver.NewClient(apiserver.ClientConfig{
		Kubeconfig: c.Kubeconfig, Master: o.Master,
		ContentType: c.ContentType, AcceptContentTypes: c.AcceptContentTypes,
		QPS: c.QPS, Burst: int(c.Burst),
	})
}

// run starts the parts and waits for the end of ctx, or of a part that must
// not end.
func (p *proxy) run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	if !slices.Contains(p.families, proxier.IPv6) {
		logger.Info("IPv6 is off on this host; this is a node of IPv4 alone")
	}
	k := &p.opts.Config.KubeProxy
	if k.ShowHiddenMetricsForVersion != "" {
		k8smetrics.SetShowHidden()
	}
	if err := p.registerMetrics(); err != nil {
		return err
	}
	var err error
	if p.configz, err = publishConfig(p.opts.Config); err != nil {
		return err
	}
	if err := setOOMScore(*k.OOMScoreAdj); err != nil {
		logger.Error(err, "Cannot set the OOM score; going on without", "oomScoreAdj", *k.OOMScoreAdj)
	}

	group, ctx := errgroup.WithContext(ctx)
	if p.recorder != nil {
		group.Go(func() error { p.recorder.Run(ctx); return nil })
	}
	for _, s := range p.servers() {
		group.Go(func() error { return s.run(ctx) })
	}
	group.Go(func() error { return p.program(ctx) })
	return group.Wait()
}

// program brings what the source tells into the kernel.
func (p *proxy) program(ctx context.Context) error {
	open, err := p.openTiers(ctx)
	if err != nil {
		return err
	}
	p.setTiers(open)
	defer func() {
		p.setTiers(tiers{})
		if err := open.close(); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot close the tiers")
		}
	}()

	runner := p.runner(p.opts.Config)
	p.facts.start(ctx)
	left := p.leftovers()
	px, err := proxier.New(proxier.Options{
		NodeName: p.opts.nodeName, Tier: p.metrics.Tier(p.carrierOf(&open)), Reporter: p.problems,
		Facts: p.facts.known, Policy: p.facts.settings.Policy, NodeFacts: p.facts.fromNode,
		Observer: observers{p.metrics, p.health, p.services, &p.memory, &p.explain, p.ready, left}, Runner: runner,
	})
	if err != nil {
		return err
	}
	p.metrics.SetChanges(px.Tracker().Counts)
	p.explain.next = px.Table()

	group, ctx := errgroup.WithContext(ctx)
	to := p.metrics.Handler(&nodeFan{
		Handler: &nodeFirst{Handler: px, clock: clock.RealClock{}, released: func() { p.facts.check(klog.FromContext(ctx)) }},
		also:    p.health,
	})
	if p.feed == nil {
		p.feed = startFeed(ctx, p.source)
	}
	group.Go(func() error { return p.feed.deliver(ctx, to, p.facts.serviceCIDRs.FeedTo(px.UpdateFacts)) })
	if p.opts.ConfigFile != "" {
		group.Go(func() error { return p.reloader(px).run(ctx) })
	}
	group.Go(func() error { p.services.Run(ctx); return nil })
	group.Go(func() error { p.facts.awaitPodCIDRs(ctx, clock.RealClock{}, p.problems); return nil })
	group.Go(func() error { p.facts.follow(ctx, px); return nil })
	group.Go(func() error { left.run(ctx); return nil })
	if open.fast != nil {
		group.Go(func() error { p.followUplinks(ctx, open.fast); return nil })
		group.Go(func() error { open.fast.Run(ctx); return nil })
	}
	group.Go(func() error {
		p.health.Start()
		p.metrics.Start(time.Now())
		if p.recorder != nil {
			p.recorder.Eventf(events.NodeReference(p.opts.nodeName), v1.EventTypeNormal, "Starting", "StartKubeProxy", "")
			p.tellOfFallback()
		}
		px.Run(ctx)
		return nil
	})
	return group.Wait()
}

// tellOfFallback records an Event on the Node if another mode runs than was asked for.
func (p *proxy) tellOfFallback() {
	asked := p.opts.Config.KubeProxy.Mode
	if string(p.decision.Mode) == string(asked) {
		return
	}
	p.recorder.Eventf(events.NodeReference(p.opts.nodeName), v1.EventTypeWarning, "ProxyModeFallback", "StartKubeProxy",
		"mode %s runs instead of %s: %s", p.decision.Mode, asked, strings.Join(texts(p.decision.Reasons), "; "))
}

func (p *proxy) source(handler proxier.Handler, onServiceCIDR func(string, []string)) source {
	c := p.opts.Config
	if p.client == nil {
		return manifests.New(c.Tandem.Manifests, handler, p.problems, manifests.Options{NodeName: p.opts.nodeName, OnServiceCIDR: onServiceCIDR})
	}
	return apiserver.New(p.client, handler, apiserver.Options{
		NodeName: p.opts.nodeName, OnServiceCIDR: onServiceCIDR, ServiceAnnotations: []string{proxier.AnnotationFastPath},
	})
}

func (p *proxy) registerMetrics() error {
	if err := p.metrics.Register(registry{}, p.tables, p.counted); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	reason := metrics.ModeRequested
	if string(p.decision.Mode) != string(p.opts.Config.KubeProxy.Mode) {
		reason = metrics.ModeFallback
	}
	p.opts.gate.AddMetrics()
	p.metrics.Build(buildVersion())
	p.metrics.Mode(string(p.decision.Mode), reason)
	for _, r := range p.report.Results {
		p.metrics.Capability(string(r.Feature), r.State.String())
	}
	return nil
}

// registry is the one of the process.
type registry struct{}

func (registry) Register(m k8smetrics.Registerable) error { return legacyregistry.Register(m) }
func (registry) CustomRegister(c k8smetrics.StableCollector) error {
	return legacyregistry.CustomRegister(c)
}

// publishConfig shows the configuration at /configz.
func publishConfig(c *config.Config) (*configz.Config, error) {
	entry, err := configz.New("kubeproxy.config.k8s.io")
	if err != nil {
		return nil, fmt.Errorf("publish configuration: %w", err)
	}
	return entry, show(entry, c)
}

func show(entry *configz.Config, c *config.Config) error { return entry.Set(c.Upstream()) }
