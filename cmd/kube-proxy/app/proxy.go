// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/component-base/configz"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/observe/events"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/observe/metrics"
	"github.com/tandem-proxy/tandem/observe/status"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
	"github.com/tandem-proxy/tandem/sources/apiserver"
	"github.com/tandem-proxy/tandem/sources/manifests"
	"github.com/tandem-proxy/tandem/sources/nodefacts"
)

// source is where objects come from.
type source interface {
	Run(ctx context.Context) error
}

// proxy is one process: everything between a source and a kernel.
type proxy struct {
	opts     *Options
	started  time.Time
	families []proxier.Family

	// What the kernel can do, and the mode that was chosen by that.
	host     *host
	mode     mode
	decision capabilities.Decision

	client   *apiserver.Client      // nil with manifests
	source   *sourceRunner          // nil while it waits for another process to end
	tracker  *proxier.ChangeTracker // what the source has delivered
	recorder *events.Writer         // nil with manifests

	metrics  *metrics.Metrics
	flows    *staleudp.Reconciler
	health   *health.Health
	services *health.Services
	ready    *health.Readiness
	problems *events.Reporter
	memory   memory
	explain  explainer
	recorded status.Recorder
	facts    facts
	configz  *configz.Config
	resync   resync
	reports  *reports
	rounds   uint64 // of probes, which run one at a time

	// mu is held while a server uses the datapath, so that it is not closed meanwhile.
	mu     sync.Mutex
	active activeMode // nil before it is open and once it is closed
}

// runProxy runs the proxy until ctx is done. The kernel state stays.
func runProxy(ctx context.Context, o *Options) error {
	limitGarbage()
	p, err := newProxy(ctx, o)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		if p.source != nil {
			p.source.stop()
		}
	}()
	if err := p.registerMetrics(); err != nil { // what is counted before is lost
		return err
	}
	// The source lists while the kernel is probed.
	p.startSource(ctx)
	if err := p.prepare(ctx); err != nil {
		return err
	}
	return p.run(ctx)
}

// newProxy builds what depends neither on the kernel nor on the mode. It starts nothing.
func newProxy(ctx context.Context, o *Options) (*proxy, error) {
	p := &proxy{opts: o, started: time.Now(), families: families()}
	if err := checkFamilies(o.Config, p.families); err != nil {
		return nil, err
	}
	p.metrics = metrics.New(p.families)
	if dir := o.Config.Tandem.Manifests; dir != "" {
		if err := manifests.Check(dir); err != nil {
			return nil, err
		}
	} else if err := p.connect(); err != nil {
		return nil, err
	}
	p.problems = events.New(ctx, events.Options{NodeName: o.nodeName, Recorder: p.recorder, Counter: func(kind, reason string) {
		p.metrics.Problem(kind, reason)
		p.recorded.Problem(kind, reason)
	}})
	p.tracker = p.newTracker()
	var err error
	if p.facts.settings, err = nodefacts.New(o.Config, o.gate); err != nil {
		return nil, err
	}
	uplinks := devices.Options{Names: o.Config.Tandem.EBPF.Devices}
	p.facts.uplinks, p.facts.origins = devices.New(uplinks), devices.New(uplinks)
	p.flows = staleudp.New(staleudp.Options{Table: conntrack.Kernel{}, Opening: conntrack.Kernel{}.Opening, Exclusive: true, Observer: p.metrics.Reconciled, Ended: p.flowsEnded})
	return p, nil
}

// prepare probes the kernel, selects the mode, and builds what depends on it.
func (p *proxy) prepare(ctx context.Context) (err error) {
	if p.host, err = probeHost(ctx, p.opts); err != nil {
		return err
	}
	if p.mode, p.decision, err = selectMode(ctx, p.host); err != nil {
		return err
	}
	logMode(klog.FromContext(ctx), p.host, p.decision)
	p.explain.stateDirectory = p.opts.Config.Tandem.StateDirectory
	p.explain.node, p.explain.mode, p.explain.tiers, p.explain.placement = p.opts.nodeName, string(p.mode.name()), p.explainTiers, p.placement
	p.health = health.New(health.Options{
		// Upstream's factor: one sync may fail and be repeated.
		Timeout:  2 * p.mode.intervals().MaxInterval,
		Families: p.families, Healthz: p.metrics.Healthz, Livez: p.metrics.Livez,
	})
	p.ready = health.NewReadiness(health.ReadinessOptions{Healthy: p.health.Healthy, Probe: p.probe, Count: p.metrics.Readyz})
	p.reports = newReports()
	p.services = health.NewServices(health.ServicesOptions{Families: p.families, Healthy: p.health.Healthy, Reporter: p.problems})
	return tuneConntrack(ctx, p.host, func(err error) {
		p.problems.Report(proxier.Problem{
			Kind: "Node", Reason: proxier.ReasonUnsupported,
			Message: "conntrack settings differ from the configuration: " + strings.ReplaceAll(err.Error(), "\n", "; "),
		})
	})
}

// run starts the parts and waits for the end of ctx, or of a part that must
// not end.
func (p *proxy) run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	if !slices.Contains(p.families, proxier.IPv6) {
		logger.Info("IPv6 is disabled on this host; serving IPv4 only")
	}
	p.publishMode()
	k := &p.opts.Config.KubeProxy
	var err error
	if p.configz, err = publishConfig(p.opts.Config); err != nil {
		return err
	}
	switch err := setOOMScore(*k.OOMScoreAdj); {
	case errors.Is(err, fs.ErrPermission):
		logger.Info("Cannot set the OOM score; continuing without it: that needs CAP_SYS_RESOURCE", "oomScoreAdj", *k.OOMScoreAdj)
	case err != nil:
		logger.Error(err, "Cannot set the OOM score; continuing without it", "oomScoreAdj", *k.OOMScoreAdj)
	}

	group, ctx := errgroup.WithContext(ctx)
	if claim := claimPrograms(ctx, p.host); claim != nil { // before the servers bind their ports
		group.Go(func() error { claim.Run(ctx); return nil })
	}
	if p.recorder != nil {
		group.Go(func() error { p.recorder.Run(ctx); return nil })
	}
	for _, s := range p.servers() {
		group.Go(func() error { return s.run(ctx) })
	}
	group.Go(func() error { return p.program(ctx) })
	return group.Wait()
}

// program brings what the source delivers into the kernel.
func (p *proxy) program(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	parts := &parts{
		reporter: p.problems, rules: p.metrics, flows: p.flows, uplinks: p.facts.uplinks,
		repaired: func(r proxier.Repair) { p.repaired(ctx, r) },
		disrupted: func(d proxier.Disruption) {
			p.metrics.Disrupted(d.Moved)
			p.explain.disruptions.Add(d)
		},
		waiting: func() { // objects would pile up
			if p.source != nil {
				p.source.stop()
				p.source, p.tracker = nil, p.newTracker()
			}
		},
	}
	if p.client != nil {
		parts.nodes = p.followNodes
		if p.opts.nodeName != "" {
			parts.optOuts = p.followOptOuts
		}
	}
	other := p.newOtherProxy()
	if err := other.await(ctx, parts.waiting); err != nil {
		return err
	}
	open, err := p.mode.open(ctx, parts)
	if err != nil {
		return err
	}
	p.setActive(open)
	defer func() {
		p.setActive(nil)
		if err := open.close(); err != nil {
			logger.Error(err, "Cannot close the datapath")
		}
	}()

	p.facts.programs = open.hasMaps()
	if p.facts.programs && !p.opts.Config.Tandem.EBPF.IgnoreHostFilters {
		p.facts.filters = &filters{reporter: p.problems, count: p.metrics.HostFilters, fallbackName: open.fallbackName()}
	}
	p.facts.start(ctx)
	states := p.newBackendStates()
	p.facts.known.Overrides = states.start(ctx)
	left := leftoversOf(p.mode, p.host, parts, p.metrics.Draining)
	left.replace(ctx)
	px, err := proxier.New(proxier.Options{
		NodeName: p.opts.nodeName, Tracker: p.tracker, Tier: p.metrics.Tier(open.tier()), Reporter: p.problems,
		Facts: p.facts.known, Policy: p.facts.policyOf(p.facts.settings), NodeFacts: p.facts.fromNode,
		Observer: p.observers(left), Runner: p.mode.intervals(),
	})
	if err != nil {
		return err
	}
	p.metrics.SetChanges(px.Tracker().Counts)
	p.explain.next = px.Table()
	p.resync.use(px.RequestFull)
	other.ended = func() {
		p.withActive(activeMode.otherEnded)
		left.otherEnded()
		px.RequestFull()
	}

	group, ctx := errgroup.WithContext(ctx)
	first := &nodeBeforeServices{Handler: px, clock: clock.RealClock{}, released: func() { p.facts.check(logger) }}
	if p.opts.Config.Tandem.HostPort {
		first.awaitPods = true
		group.Go(func() error { p.followHostPorts(ctx, px, first.podsKnown); return nil })
	}
	handler := p.metrics.Handler(&nodeToBoth{
		Handler: first,
		also:    p.health, logger: logger,
	})
	if p.source == nil {
		p.startSource(ctx)
	}
	group.Go(func() error { return p.source.deliver(ctx, handler, p.facts.serviceCIDRs.Handler(px.UpdateFacts)) })
	if p.opts.ConfigFile != "" {
		group.Go(func() error { return p.reloader(px).run(ctx) })
	}
	group.Go(func() error { p.services.Run(ctx); return nil })
	group.Go(func() error { p.facts.awaitPodCIDRs(ctx, clock.RealClock{}, p.problems); return nil })
	group.Go(func() error { p.facts.follow(ctx, px); return nil })
	group.Go(func() error { p.facts.followUplinks(ctx, px); return nil })
	group.Go(func() error { p.facts.followFilters(ctx, px); return nil })
	group.Go(func() error {
		states.follow(ctx, func(list []proxier.BackendOverride) {
			px.UpdateFacts(func(known *proxier.Facts) { known.Overrides = list })
		})
		return nil
	})
	if p.mode.name() == capabilities.ModeEBPF {
		group.Go(func() error { return p.host.awaitIPsec(ctx) })
	} else {
		group.Go(func() error { holdServingLock(ctx); return nil })
	}
	group.Go(func() error { left.run(ctx); return nil })
	group.Go(func() error { other.follow(ctx); return nil })
	group.Go(func() error { open.run(ctx); return nil })
	group.Go(func() error { p.reports.run(ctx, px.Table(), open); return nil })
	group.Go(func() error { p.followChecks(ctx); return nil })
	group.Go(func() error {
		p.health.Start()
		p.metrics.Start(time.Now())
		p.recordStart()
		px.Run(ctx)
		return nil
	})
	return group.Wait()
}

func (p *proxy) newTracker() *proxier.ChangeTracker {
	return proxier.NewChangeTracker(p.opts.nodeName, p.started, p.problems)
}

// startSource runs the source. Most of it is held back until a handler is attached.
func (p *proxy) startSource(ctx context.Context) {
	p.source = newSourceRunner(p.metrics.Handler(&recorder{tracker: p.tracker}), p.newSource)
	p.source.start(ctx)
}

func (p *proxy) newSource(handler proxier.Handler, onServiceCIDR func(string, []string)) source {
	c := p.opts.Config
	if p.client == nil {
		return manifests.New(c.Tandem.Manifests, handler, p.problems, manifests.Options{NodeName: p.opts.nodeName, OnServiceCIDR: onServiceCIDR})
	}
	return apiserver.New(p.client, handler, apiserver.Options{
		NodeName: p.opts.nodeName, OnServiceCIDR: onServiceCIDR, ServiceAnnotations: proxier.ServiceAnnotations, SliceAnnotations: proxier.SliceAnnotations,
	})
}

func (p *proxy) setActive(open activeMode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.active = open
}

// withActive calls do if the datapath is open, which stays open until then.
func (p *proxy) withActive(do func(activeMode)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.active != nil {
		do(p.active)
	}
}

// flowsEnded is staleudp.Options.Ended.
func (p *proxy) flowsEnded(ended []conntrack.Flow) {
	p.withActive(func(open activeMode) { open.flowsEnded(ended) })
}

// tables is a metrics.TableSource.
func (p *proxy) tables() (t metrics.Tables, ok bool) {
	p.withActive(func(open activeMode) { t, ok = open.tables() })
	return t, ok
}

// rulePackets is a metrics.RuleSource.
func (p *proxy) rulePackets() (r metrics.RulePackets, ok bool) {
	p.withActive(func(open activeMode) { r, ok = open.rulePackets() })
	return r, ok
}

// placement implements explain.PlacementFunc.
func (p *proxy) placement(d *proxier.Decision, f *proxier.Frontend, o proxier.Origin) (by, reason string, shown bool) {
	p.withActive(func(open activeMode) {
		s := open.serves(d, f, o)
		by, shown = string(s.by), s.refused != nil || !open.hasMaps()
		if s.refused != nil {
			reason = s.refused.Error()
		}
	})
	return by, reason, shown
}

// explainTiers implements explain.Tiers.
func (p *proxy) explainTiers(e *proxier.Explanation) (list []explain.Tier) {
	p.withActive(func(open activeMode) { list = explainTiers(p.mode, open, e) })
	return list
}
