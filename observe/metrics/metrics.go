// SPDX-License-Identifier: Apache-2.0

// Package metrics defines the proxy's metrics. Metrics that upstream has too use upstream's
// names, others start with tandem_.
//
// Upstream runs one proxier per address family, with the label ip_family. This proxy
// programs both families in one sync. Such a metric is observed once for each family of
// the node, so that dashboards and alerts for upstream find the series they expect.
package metrics

import (
	"runtime"
	"strconv"
	"sync"
	"time"

	k8smetrics "k8s.io/component-base/metrics"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
)

const (
	kubeproxy = "kubeproxy"
	tandem    = "tandem"
	ipFamily  = "ip_family"
)

// Registry registers metrics: the functions of legacyregistry, or a registry of a test.
type Registry interface {
	Register(k8smetrics.Registerable) error
	CustomRegister(k8smetrics.StableCollector) error
}

// Metrics are the metrics of one proxy. It observes syncs.
type Metrics struct {
	families []string
	changes  func() (pending int, total uint64)

	// Shared with upstream.
	syncDuration       *k8smetrics.HistogramVec
	fullDuration       *k8smetrics.HistogramVec
	partialDuration    *k8smetrics.HistogramVec
	syncLast           *k8smetrics.GaugeVec
	syncLastQueued     *k8smetrics.GaugeVec
	endpointPending    *k8smetrics.Gauge
	endpointTotal      *k8smetrics.Counter
	servicePending     *k8smetrics.Gauge
	serviceTotal       *k8smetrics.Counter
	healthz, livez     *k8smetrics.CounterVec
	programmingLatency *k8smetrics.HistogramVec
	noLocalEndpoints   *k8smetrics.GaugeVec
	restoreFailures    *k8smetrics.CounterVec
	partialFailures    *k8smetrics.CounterVec
	rulesTotal         *k8smetrics.GaugeVec
	rulesLast          *k8smetrics.GaugeVec
	conntrackDuration  *k8smetrics.HistogramVec
	conntrackDeleted   *k8smetrics.CounterVec

	// Additional ones.
	readyz     *k8smetrics.CounterVec
	problems   *k8smetrics.CounterVec
	syncErrors *k8smetrics.Counter
	ports      *k8smetrics.Gauge
	capability *k8smetrics.GaugeVec
	mode       *k8smetrics.GaugeVec
	build      *k8smetrics.GaugeVec
	other      *k8smetrics.Gauge
	checks     *k8smetrics.GaugeVec
	draining   *k8smetrics.GaugeVec
	states     *k8smetrics.GaugeVec
	filters    *k8smetrics.Gauge
	firewalls  *k8smetrics.Gauge
	repairs    *k8smetrics.CounterVec
	disruption *k8smetrics.Histogram
	config     configMetrics
	tables     tables
	rules      rulePackets
	events     lastEvents

	mu            sync.Mutex
	noLocal       map[uint32]noLocal // by index of the service port
	noLocalCounts [noLocalBits]int   // number of service ports with each bit
}

var _ proxier.Observer = (*Metrics)(nil)

// New makes the metrics of a node with these address families. They count nothing until
// they are registered.
func New(families []proxier.Family) *Metrics {
	m := &Metrics{noLocal: map[uint32]noLocal{}}
	for _, f := range families {
		m.families = append(m.families, f.String())
	}
	counter := func(subsystem, name, help string) *k8smetrics.Counter {
		return k8smetrics.NewCounter(&k8smetrics.CounterOpts{Subsystem: subsystem, Name: name, Help: help, StabilityLevel: k8smetrics.ALPHA})
	}
	counters := func(subsystem, name, help string, labels ...string) *k8smetrics.CounterVec {
		return k8smetrics.NewCounterVec(&k8smetrics.CounterOpts{Subsystem: subsystem, Name: name, Help: help, StabilityLevel: k8smetrics.ALPHA}, labels)
	}
	gauge := func(subsystem, name, help string) *k8smetrics.Gauge {
		return k8smetrics.NewGauge(&k8smetrics.GaugeOpts{Subsystem: subsystem, Name: name, Help: help, StabilityLevel: k8smetrics.ALPHA})
	}
	gauges := func(subsystem, name, help string, labels ...string) *k8smetrics.GaugeVec {
		return k8smetrics.NewGaugeVec(&k8smetrics.GaugeOpts{Subsystem: subsystem, Name: name, Help: help, StabilityLevel: k8smetrics.ALPHA}, labels)
	}
	histograms := func(name, help string, buckets []float64) *k8smetrics.HistogramVec {
		return k8smetrics.NewHistogramVec(&k8smetrics.HistogramOpts{Subsystem: kubeproxy, Name: name, Help: help, Buckets: buckets, StabilityLevel: k8smetrics.ALPHA}, []string{ipFamily})
	}

	m.syncDuration = histograms("sync_proxy_rules_duration_seconds", "Duration of a sync.", k8smetrics.ExponentialBuckets(0.001, 2, 15))
	m.fullDuration = histograms("sync_full_proxy_rules_duration_seconds", "Duration of a full sync.", k8smetrics.ExponentialBuckets(0.001, 2, 15))
	m.partialDuration = histograms("sync_partial_proxy_rules_duration_seconds", "Duration of a sync of changes.", k8smetrics.ExponentialBuckets(0.001, 2, 15))
	m.syncLast = gauges(kubeproxy, "sync_proxy_rules_last_timestamp_seconds", "Time of the last successful sync.", ipFamily)
	m.syncLastQueued = gauges(kubeproxy, "sync_proxy_rules_last_queued_timestamp_seconds", "Time of the last request for a sync.", ipFamily)
	m.endpointPending = gauge(kubeproxy, "sync_proxy_rules_endpoint_changes_pending", "Services with pending changes of their endpoints or of themselves.")
	m.endpointTotal = counter(kubeproxy, "sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices received.")
	m.servicePending = gauge(kubeproxy, "sync_proxy_rules_service_changes_pending", "Services with pending changes of themselves or of their endpoints.")
	m.serviceTotal = counter(kubeproxy, "sync_proxy_rules_service_changes_total", "Changes of Services received.")
	m.healthz = counters(kubeproxy, "proxy_healthz_total", "Answers of /healthz by HTTP status.", "code")
	m.livez = counters(kubeproxy, "proxy_livez_total", "Answers of /livez by HTTP status.", "code")
	m.programmingLatency = histograms("network_programming_duration_seconds", "Time from a change in the cluster to the end of the sync that programmed it on this node.",
		// Upstream's buckets: fine for the latencies of a healthy cluster, up to five
		// minutes, and one at 0 from the merge.
		k8smetrics.MergeBuckets(
			k8smetrics.LinearBuckets(0.25, 0.25, 2),
			k8smetrics.LinearBuckets(1, 1, 59),
			k8smetrics.LinearBuckets(60, 5, 12),
			k8smetrics.LinearBuckets(120, 30, 7),
		))
	m.noLocalEndpoints = gauges(kubeproxy, "sync_proxy_rules_no_local_endpoints_total", "Service ports with traffic policy Local that have endpoints, but none on this node.", "traffic_policy", ipFamily)

	m.restoreFailures = counters(kubeproxy, "sync_proxy_rules_iptables_restore_failures_total", "Failed runs of iptables-restore.", ipFamily)
	m.partialFailures = counters(kubeproxy, "sync_proxy_rules_iptables_partial_restore_failures_total", "Failed runs of iptables-restore in a sync of changes.", ipFamily)
	m.rulesTotal = gauges(kubeproxy, "sync_proxy_rules_iptables_total", "Number of iptables rules of this proxy.", "table", ipFamily)
	m.rulesLast = gauges(kubeproxy, "sync_proxy_rules_iptables_last", "Number of iptables rules written by the last sync.", "table", ipFamily)
	m.conntrackDuration = histograms("conntrack_reconciler_sync_duration_seconds", "Time to find and delete stale UDP entries in conntrack.", k8smetrics.ExponentialBuckets(0.001, 2, 15))
	m.conntrackDeleted = counters(kubeproxy, "conntrack_reconciler_deleted_entries_total", "Stale UDP entries deleted from conntrack.", ipFamily)

	m.readyz = counters(tandem, "readyz_total", "Answers of /readyz by HTTP status.", "code")
	m.problems = counters(tandem, "problems_total", "Problems with objects of the cluster, by kind of object and reason.", "kind", "reason")
	m.syncErrors = counter(tandem, "sync_errors_total", "Syncs that failed completely or in part.")
	m.ports = gauge(tandem, "service_ports", "Number of service ports.")
	m.capability = gauges(tandem, "capability", "1 for the state of each kernel feature on this node.", "feature", "state")
	m.mode = gauges(tandem, "proxy_mode", "1 for the running mode; the reason is requested or fallback.", "mode", "reason")
	m.build = gauges(tandem, "build_info", "1 for the build of this proxy.", "version", "go_version")
	m.other = gauge(tandem, "other_proxy", "1 if another kube-proxy runs on this node, otherwise 0.")
	m.checks = gauges(tandem, "check_ok", "1 if a condition of readiness holds, otherwise 0. They are checked every 10 seconds, whether /readyz is asked or not.", "check")
	m.draining = gauges(tandem, "draining_since_timestamp_seconds", "Unix time since which what another mode left in the kernel serves its last connections before it is removed.", "what")
	m.firewalls = gauge(tandem, "translated_only_firewalls", "Firewalls of this host that forward only connections translated by netfilter. eBPF programs leave clients outside this node of Services with local endpoints to the fallback.")
	m.filters = gauge(tandem, "filters_before_dnat", "Rules of this host that can drop packets before DNAT; those that cannot be read count as one. eBPF programs leave the affected frontends to the fallback.")
	m.states = gauges(tandem, "backend_states", "Backends that an operator drained or quarantined on this node, by state. One command for all ports of an address counts once.", "state")
	m.repairs = counters(tandem, "repairs_total", "Repairs of kernel state that another process removed or bypassed, by kind.", "state")
	m.disruption = k8smetrics.NewHistogram(&k8smetrics.HistogramOpts{
		Subsystem: tandem, Name: "maglev_moved_ratio", Help: "Fraction of connections without local state that a change of a Maglev table moves to another endpoint.",
		Buckets: []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1}, StabilityLevel: k8smetrics.ALPHA,
	})
	m.config = newConfigMetrics()
	return m
}

// Register registers the metrics. Each source may be nil.
func (m *Metrics) Register(registry Registry, source TableSource, rules RuleSource, events EventSource) error {
	for _, metric := range []k8smetrics.Registerable{
		m.syncDuration, m.fullDuration, m.partialDuration, m.syncLast, m.syncLastQueued, m.endpointPending, m.endpointTotal, m.servicePending, m.serviceTotal,
		m.healthz, m.livez, m.programmingLatency, m.noLocalEndpoints, m.restoreFailures, m.partialFailures, m.rulesTotal, m.rulesLast, m.conntrackDuration, m.conntrackDeleted,
		m.readyz, m.problems, m.syncErrors, m.ports, m.capability, m.mode, m.build, m.other, m.checks, m.draining, m.states, m.repairs, m.disruption, m.filters, m.firewalls,
	} {
		if err := registry.Register(metric); err != nil {
			return err
		}
	}
	// Alerts need these series before the first sync.
	for _, f := range m.families {
		m.noLocalEndpoints.WithLabelValues("internal", f).Set(0)
		m.noLocalEndpoints.WithLabelValues("external", f).Set(0)
		m.restoreFailures.WithLabelValues(f).Add(0)
		m.partialFailures.WithLabelValues(f).Add(0)
	}
	for kind, reasons := range proxier.ExpectedProblems {
		for _, reason := range reasons {
			m.problems.WithLabelValues(kind, reason).Add(0)
		}
	}
	for _, state := range proxier.RepairedStates {
		m.repairs.WithLabelValues(string(state)).Add(0)
	}
	if err := m.config.register(registry); err != nil {
		return err
	}
	if rules != nil {
		m.rules.source = rules
		if err := registry.CustomRegister(&m.rules); err != nil {
			return err
		}
	}
	if events != nil {
		m.events.source = events
		if err := registry.CustomRegister(&m.events); err != nil {
			return err
		}
	}
	if source == nil {
		return nil
	}
	m.tables.source = source
	return registry.CustomRegister(&m.tables)
}

// SetChanges sets the source of the change tracker's counts.
func (m *Metrics) SetChanges(counts func() (pending int, total uint64)) { m.changes = counts }

// OtherProxy reports whether another kube-proxy runs on this node.
func (m *Metrics) OtherProxy(runs bool) {
	m.other.Set(0)
	if runs {
		m.other.Set(1)
	}
}

// Checks are the conditions of readiness. One that is not in the list has no series any more.
func (m *Metrics) Checks(ok map[string]bool) {
	m.checks.Reset()
	for name, holds := range ok {
		value := 0.0
		if holds {
			value = 1
		}
		m.checks.WithLabelValues(name).Set(value)
	}
}

// Draining says since when something serves its last connections; the zero time ends that.
func (m *Metrics) Draining(what string, since time.Time) {
	if since.IsZero() {
		m.draining.DeleteLabelValues(what)
		return
	}
	m.draining.WithLabelValues(what).Set(seconds(since))
}

// BackendStates says which backends an operator drained or quarantined.
func (m *Metrics) BackendStates(list []proxier.BackendOverride) {
	count := map[proxier.BackendState]int{}
	for i := range list {
		count[list[i].State]++
	}
	for _, s := range []proxier.BackendState{proxier.MaintenanceState, proxier.QuarantinedState} {
		m.states.WithLabelValues(s.String()).Set(float64(count[s]))
	}
}

// HostFilters says how many rules of this host filter packets before DNAT, with one for those that cannot be read, and how many firewalls
// forward only connections that netfilter translates.
func (m *Metrics) HostFilters(beforeDNAT, firewalls int) {
	m.filters.Set(float64(beforeDNAT))
	m.firewalls.Set(float64(firewalls))
}

// Healthz counts an answer of /healthz.
func (m *Metrics) Healthz(code int) { m.healthz.WithLabelValues(strconv.Itoa(code)).Inc() }

// Livez counts an answer of /livez.
func (m *Metrics) Livez(code int) { m.livez.WithLabelValues(strconv.Itoa(code)).Inc() }

// Readyz counts an answer of /readyz.
func (m *Metrics) Readyz(code int) { m.readyz.WithLabelValues(strconv.Itoa(code)).Inc() }

// RestoreFailed counts a run of iptables-restore that failed.
func (m *Metrics) RestoreFailed(family proxier.Family, partial bool) {
	m.restoreFailures.WithLabelValues(family.String()).Inc()
	if partial {
		m.partialFailures.WithLabelValues(family.String()).Inc()
	}
}

// Rules records the number of rules in a table, and how many the last sync wrote.
func (m *Metrics) Rules(family proxier.Family, table string, written, total int) {
	m.rulesLast.WithLabelValues(table, family.String()).Set(float64(written))
	m.rulesTotal.WithLabelValues(table, family.String()).Set(float64(total))
}

// Reconciled counts a reconciliation of conntrack.
func (m *Metrics) Reconciled(r staleudp.Result) {
	m.conntrackDuration.WithLabelValues(r.Family.String()).Observe(r.Took.Seconds())
	m.conntrackDeleted.WithLabelValues(r.Family.String()).Add(float64(r.Deleted))
}

// Problem counts a problem. Both labels have few values.
func (m *Metrics) Problem(kind, reason string) { m.problems.WithLabelValues(kind, reason).Inc() }

// Repaired counts kernel state that was restored.
func (m *Metrics) Repaired(state proxier.RepairedState) {
	m.repairs.WithLabelValues(string(state)).Inc()
}

// Disrupted records the share of connections that a change of a Maglev table moved.
func (m *Metrics) Disrupted(share float64) { m.disruption.Observe(share) }

// Capability records the state of a feature.
func (m *Metrics) Capability(feature, state string) {
	m.capability.WithLabelValues(feature, state).Set(1)
}

// Reasons of the running mode.
const (
	ModeRequested = "requested"
	ModeFallback  = "fallback"
)

// Mode records the running mode.
func (m *Metrics) Mode(mode, reason string) { m.mode.WithLabelValues(mode, reason).Set(1) }

// Build records the build.
func (m *Metrics) Build(version string) { m.build.WithLabelValues(version, runtime.Version()).Set(1) }

// Start records that the sync loop runs: the first sync runs without a request.
func (m *Metrics) Start(at time.Time) {
	for _, f := range m.families {
		m.syncLastQueued.WithLabelValues(f).Set(seconds(at))
	}
}

// Queued implements proxier.Observer.
func (m *Metrics) Queued(at time.Time) {
	m.Start(at)
	m.setPending()
}

// Synced implements proxier.Observer.
func (m *Metrics) Synced(info proxier.SyncInfo) {
	took, kind := info.End.Sub(info.Start).Seconds(), m.partialDuration
	if info.Full {
		kind = m.fullDuration
	}
	for _, f := range m.families {
		m.syncDuration.WithLabelValues(f).Observe(took)
		kind.WithLabelValues(f).Observe(took)
		if info.Err == nil {
			m.syncLast.WithLabelValues(f).Set(seconds(info.End))
		}
	}
	m.ports.Set(float64(info.ServicePorts))
	m.setPending()
	if info.Err != nil {
		m.syncErrors.Inc()
		return
	}
	for f, triggers := range info.Triggers {
		for _, at := range triggers {
			m.programmingLatency.WithLabelValues(proxier.Family(f).String()).Observe(info.End.Sub(at).Seconds())
		}
	}
}

func (m *Metrics) setPending() {
	if m.changes == nil {
		return
	}
	pending, _ := m.changes()
	m.servicePending.Set(float64(pending))
	m.endpointPending.Set(float64(pending))
}

func seconds(at time.Time) float64 { return float64(at.UnixNano()) / 1e9 }
