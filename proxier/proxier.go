// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Options of a Proxier.
type Options struct {
	// NodeName distinguishes local endpoints from remote ones.
	NodeName string
	// Facts known from the start, and the Policy by which all is decided.
	Facts  Facts
	Policy Policy
	// NodeFacts updates the facts from the Node, replacing lists; nil updates only the
	// zone.
	NodeFacts func(*v1.Node, *Facts)
	// Tier programs the decisions into the kernel.
	Tier Tier
	// Tracker may have changes already, which are programmed first; nil makes a new one.
	Tracker *ChangeTracker
	// Reporter receives problems with objects; optional.
	Reporter Reporter
	// Observer receives the outcome of syncs; optional.
	Observer Observer
	// Runner has the intervals of syncs; see DefaultRunnerOptions.
	Runner RunnerOptions
}

// DefaultRunnerOptions are the intervals for a tier whose sync cost is proportional to the
// changes.
func DefaultRunnerOptions() RunnerOptions {
	return RunnerOptions{
		// Long enough for the two halves of a change (a slice that shrinks
		// and one that grows) to arrive together, too short for anyone to
		// notice.
		MinInterval: 10 * time.Millisecond,
		// The interval of upstream's periodic sync.
		MaxInterval:   30 * time.Second,
		RetryInterval: 100 * time.Millisecond,
	}
}

// Observer watches syncs, for metrics and health.
type Observer interface {
	// Queued is called when the first change of the next sync is queued.
	Queued(at time.Time)
	// Synced is called after every sync.
	Synced(SyncInfo)
}

// SyncInfo describes one sync.
type SyncInfo struct {
	Start, End time.Time
	Reason     RunReason
	// Full says that every service port was compared with the kernel.
	Full bool
	// Services and Ports count what changed.
	Services, Ports int
	// ServicePorts counts all service ports.
	ServicePorts int
	// Triggers are the moments at which the cluster saw what this sync made
	// visible, by family.
	Triggers [Families][]time.Time
	// HealthChecks are those that changed, whether or not the sync succeeded, and NodeRules
	// the rules that the tier was given, if it was.
	HealthChecks []HealthCheckChange
	NodeRules    *NodeRules
	Err          error
}

// Proxier connects the sources of objects with a tier: handlers record, a
// runner takes what changed, applies it to the decision table, and syncs the tier. The
// first change of a quiet period is programmed before its handler returns, all
// others are when it is their time. Nothing is programmed before both Services
// and EndpointSlices have synced.
type Proxier struct {
	tracker  *ChangeTracker
	tier     Tier
	reporter Reporter
	observer Observer
	runner   *Runner
	clock    clock.Clock

	servicesSynced, slicesSynced atomic.Bool
	queued                       atomic.Bool
	full                         atomic.Bool // the next sync compares everything with the kernel

	nodeFacts func(*v1.Node, *Facts)
	factsMu   sync.Mutex
	facts     Facts
	policy    *Policy // a new one; nil once it is the table's

	// Owned by sync.
	table  *Table
	synced bool // the tier has been given everything once
}

var _ Handler = (*Proxier)(nil)

// New makes a Proxier. It starts nothing.
func New(opts Options) (*Proxier, error) {
	if opts.NodeName == "" {
		return nil, errors.New("a proxier needs the name of its node")
	}
	if opts.Tier == nil {
		return nil, errors.New("a proxier needs a tier")
	}
	if opts.Runner.Clock == nil {
		opts.Runner.Clock = clock.RealClock{}
	}
	p := &Proxier{
		tier: opts.Tier, reporter: opts.Reporter, observer: opts.Observer, clock: opts.Runner.Clock,
		tracker: opts.Tracker, facts: opts.Facts, nodeFacts: opts.NodeFacts,
		table: NewTable(opts.Facts, opts.Policy),
	}
	if p.tracker == nil {
		p.tracker = NewChangeTracker(opts.NodeName, opts.Runner.Clock.Now(), opts.Reporter)
	}
	if p.nodeFacts == nil {
		p.nodeFacts = func(node *v1.Node, f *Facts) { f.Zone, f.Labels = node.Labels[v1.LabelTopologyZone], node.Labels }
	}
	if p.reporter == nil {
		p.reporter = ReporterFunc(func(Problem) {})
	}
	p.runner = NewRunner(p.sync, opts.Runner)
	return p, nil
}

// Run programs the changes that the handlers record, until ctx is done. It leaves the kernel
// state in place.
func (p *Proxier) Run(ctx context.Context) {
	p.runner.Run(ctx)
}

// SetIntervals takes over other intervals of syncs while it runs.
func (p *Proxier) SetIntervals(opts RunnerOptions) { p.runner.SetIntervals(opts) }

// Table of this proxier, for its read-only methods.
func (p *Proxier) Table() *Table { return p.table }

// Tracker of this proxier, for its counts.
func (p *Proxier) Tracker() *ChangeTracker { return p.tracker }

// Sync programs the recorded changes at once, in the caller's goroutine. It must not be
// called while Run runs. It is for benchmarks and tests.
func (p *Proxier) Sync(ctx context.Context) error { return p.sync(ctx, Requested) }

// OnServiceAdd records a new Service.
func (p *Proxier) OnServiceAdd(service *v1.Service) { p.changed(p.tracker.UpdateService(service)) }

// OnServiceUpdate records a changed Service.
func (p *Proxier) OnServiceUpdate(_, service *v1.Service) {
	p.changed(p.tracker.UpdateService(service))
}

// OnServiceDelete records that a Service is gone.
func (p *Proxier) OnServiceDelete(service *v1.Service) {
	p.changed(p.tracker.DeleteService(types.NamespacedName{Namespace: service.Namespace, Name: service.Name}))
}

// OnServiceSynced notes that all Services of the first list were handed over. Nothing is
// programmed before this and OnEndpointSlicesSynced.
func (p *Proxier) OnServiceSynced() {
	p.servicesSynced.Store(true)
	p.request()
}

// OnEndpointSliceAdd records a new EndpointSlice.
func (p *Proxier) OnEndpointSliceAdd(slice *discoveryv1.EndpointSlice) {
	p.changed(p.tracker.UpdateEndpointSlice(slice))
}

// OnEndpointSliceUpdate records a changed EndpointSlice.
func (p *Proxier) OnEndpointSliceUpdate(old, slice *discoveryv1.EndpointSlice) {
	pending := false
	if old != nil && old.Labels[discoveryv1.LabelServiceName] != slice.Labels[discoveryv1.LabelServiceName] {
		pending = p.tracker.DeleteEndpointSlice(old)
	}
	p.changed(p.tracker.UpdateEndpointSlice(slice) || pending)
}

// OnEndpointSliceDelete records that an EndpointSlice is gone.
func (p *Proxier) OnEndpointSliceDelete(slice *discoveryv1.EndpointSlice) {
	p.changed(p.tracker.DeleteEndpointSlice(slice))
}

// OnEndpointSlicesSynced is the same for EndpointSlices.
func (p *Proxier) OnEndpointSlicesSynced() {
	p.slicesSynced.Store(true)
	p.request()
}

// OnPod records a Pod of this node that is new or has changed, for its hostPorts.
func (p *Proxier) OnPod(pod *v1.Pod) { p.changed(p.tracker.UpdatePod(pod)) }

// OnPodDelete records that a Pod is gone.
func (p *Proxier) OnPodDelete(pod *v1.Pod) { p.changed(p.tracker.DeletePod(pod)) }

// OnNodeAdd records the facts of this node.
func (p *Proxier) OnNodeAdd(node *v1.Node) { p.OnNodeUpdate(nil, node) }

// OnNodeUpdate records the facts of this node.
func (p *Proxier) OnNodeUpdate(_, node *v1.Node) {
	p.UpdateFacts(func(f *Facts) { p.nodeFacts(node, f) })
}

// UpdateFacts changes facts of this node. Lists must be replaced, not changed
// in place.
func (p *Proxier) UpdateFacts(change func(*Facts)) {
	p.factsMu.Lock()
	before := p.facts
	change(&p.facts)
	changed := !p.facts.equal(&before)
	p.factsMu.Unlock()
	if changed { // much is decided anew: nothing for the caller to wait for
		p.request()
	}
}

// UpdatePolicy takes over another policy, and the facts that change with it.
func (p *Proxier) UpdatePolicy(policy Policy, change func(*Facts)) {
	p.factsMu.Lock()
	p.policy = &policy
	change(&p.facts)
	p.factsMu.Unlock()
	p.request()
}

// OnNodeDelete keeps the last known facts: a node that is being removed still
// serves.
func (p *Proxier) OnNodeDelete(*v1.Node) {}

// OnNodeSynced does nothing: nothing waits for the Node.
func (p *Proxier) OnNodeSynced() {}

func (p *Proxier) gateOpen() bool { return p.servicesSynced.Load() && p.slicesSynced.Load() }

// request requests a sync once both sources have synced. An earlier one would do nothing,
// and delay the first real one by the minimum interval.
func (p *Proxier) request() {
	if p.gateOpen() {
		p.runner.Request()
	}
}

// RequestFull requests a sync that compares everything with the kernel, as periodic ones do. It
// returns at once.
func (p *Proxier) RequestFull() {
	p.full.Store(true)
	p.request()
}

func (p *Proxier) changed(pending bool) {
	if !pending || !p.gateOpen() {
		return
	}
	if p.observer != nil && p.queued.CompareAndSwap(false, true) {
		p.observer.Queued(p.clock.Now())
	}
	p.runner.Now()
}

// bootstrap is programmed before everything else: nodes join, and their own
// components find the API server, through it.
var bootstrap = types.NamespacedName{Namespace: "default", Name: "kubernetes"}

func (p *Proxier) sync(ctx context.Context, reason RunReason) error {
	if !p.gateOpen() {
		return nil
	}
	info := SyncInfo{Start: p.clock.Now(), Reason: reason}
	p.queued.Store(false)

	p.factsMu.Lock()
	facts, policy := p.facts, p.policy
	p.policy = nil
	p.factsMu.Unlock()
	var changes []Change
	rules, services := p.table.SetFacts(facts)
	if policy != nil {
		rules = p.table.SetPolicy(*policy) || rules
	}
	if services || policy != nil {
		changes = p.tracker.TakeAll()
	} else {
		changes = p.tracker.Take()
	}
	for i := range changes {
		if changes[i].Name() == bootstrap {
			changes[0], changes[i] = changes[i], changes[0]
		}
		for f, at := range changes[i].Trigger {
			if at != 0 {
				info.Triggers[f] = append(info.Triggers[f], time.Unix(0, at))
			}
		}
	}

	update := Update{Changes: p.table.Apply(changes)}
	if rules || !p.synced {
		r := p.table.NodeRules()
		update.NodeRules = &r
	}
	info.Services, info.Ports = len(changes), len(update.Changes)
	info.HealthChecks, info.NodeRules = p.table.takeHealthChecks(), update.NodeRules
	p.reportProblems(update.Changes)
	// The first time, after a failure, periodically and on request the tier compares all that
	// it should serve with what the kernel holds.
	if p.full.Swap(false) || !p.synced || reason != Requested {
		update.Full, update.Changes = true, append(update.Changes, p.unchanged(update.Changes)...)
	}
	info.Full = update.Full

	err := p.tier.Sync(ctx, update)
	first := err == nil && !p.synced
	if err != nil {
		err = fmt.Errorf("sync of %d service ports: %w", len(update.Changes), err)
	} else {
		p.synced = true
	}
	info.End, info.Err, info.ServicePorts = p.clock.Now(), err, p.table.Len()
	if p.observer != nil {
		p.observer.Synced(info)
	}
	logger := klog.FromContext(ctx)
	if first {
		endpoints := 0
		for _, c := range update.Changes { // all, as this sync is full
			if c.New != nil {
				endpoints += len(c.New.Backends)
			}
		}
		logger.Info("Programmed all Services", "servicePorts", info.ServicePorts, "endpoints", endpoints, "duration", info.End.Sub(info.Start))
	}
	if logger.V(2).Enabled() && (info.Ports > 0 || logger.V(3).Enabled()) {
		logger.V(2).Info("Synced", "reason", reason, "full", info.Full, "services", info.Services, "changedPorts", info.Ports,
			"servicePorts", info.ServicePorts, "duration", info.End.Sub(info.Start))
	}
	return err
}

// unchanged are the decisions that are not among the changed ones.
func (p *Proxier) unchanged(changed []PortChange) []PortChange {
	standing := 0
	for _, c := range changed {
		if c.New != nil {
			standing++
		}
	}
	if standing == p.table.Len() {
		return nil
	}
	all := p.table.All()
	if standing == 0 {
		return all
	}
	seen := make(map[uint32]struct{}, len(changed))
	for _, c := range changed {
		if c.New != nil {
			seen[c.New.index] = struct{}{}
		}
	}
	rest := all[:0]
	for _, c := range all {
		if _, ok := seen[c.New.index]; !ok {
			rest = append(rest, c)
		}
	}
	return rest
}

// reportProblems reports, of what is new among the changes, frontends that are not
// served and load balancer IPs that source ranges leave open.
func (p *Proxier) reportProblems(changes []PortChange) {
	for _, c := range changes {
		if c.New == nil {
			continue
		}
		if problem, is := c.unservedHostPort(); is {
			p.reporter.Report(problem)
		}
		warned := false // of ranges, which are those of the Service
		for i := range c.New.Frontends {
			f := &c.New.Frontends[i]
			if f.Conflict == nil && !f.Unguarded {
				continue
			}
			var was Frontend
			if c.Old != nil {
				if j := c.Old.find(f.Addr); j >= 0 {
					was = c.Old.Frontends[j]
				}
			}
			problem := c.New.Problem(ReasonConflict)
			if f.Conflict != nil && (was.Conflict == nil || *was.Conflict != *f.Conflict) {
				problem.Message = fmt.Sprintf("%s %s/%s of %s is served for %s, whose claim comes first by kind, age or name; it is not served for this %s",
					f.Kind, f.Addr, c.New.Name.Protocol, c.New.Name, f.Conflict, problem.Kind)
				p.reporter.Report(problem)
			}
			if f.Unguarded && !was.Unguarded && !warned {
				warned = true
				problem.Field, problem.Reason = "spec.loadBalancerSourceRanges", ReasonUnguarded
				problem.Message = fmt.Sprintf("no %s range: %s is open to all sources, as in upstream kube-proxy; add a range of that family or set strictSourceRanges",
					FamilyOf(f.Addr.Addr()), f.Addr)
				p.reporter.Report(problem)
			}
		}
	}
}
