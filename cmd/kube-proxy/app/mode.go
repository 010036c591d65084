// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"k8s.io/component-base/featuregate"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/observe/metrics"
	"github.com/tandem-proxy/tandem/observe/status"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
)

// mode is one way to serve Services. The process runs one, chosen at the start. The rest of
// this package knows modes, and what they open, by these interfaces alone: another mode is
// another file mode_*.go and an entry in modesOf.
type mode interface {
	name() capabilities.Mode
	// featureGate can turn the mode off; empty for none.
	featureGate() featuregate.Feature
	// needsConntrack says that the process ends if it cannot set up conntrack.
	needsConntrack() bool
	// intervals are those between syncs.
	intervals() proxier.RunnerOptions
	// needsRestart says that a change of this field takes a restart in this mode, though
	// other modes apply it at runtime.
	needsRestart(field string) bool
	// uses says that this mode manages the kernel state of another one, which then does
	// not count as left over.
	uses(other capabilities.Mode) bool

	// forecast says what the mode would do if it was opened. It changes nothing.
	forecast(*proxier.Table) forecast
	// check tries what capability probes cannot tell. It leaves nothing in the kernel.
	check(context.Context) error
	// initialize changes the kernel settings that take more privileges than the rest
	// (--init-only).
	initialize(context.Context) error
	// open prepares the datapath. What an earlier process left goes on serving.
	open(context.Context, *parts) (activeMode, error)

	leftover
}

// leftover is kernel state that a mode leaves when its process ends.
type leftover interface {
	// what names it in logs.
	what() string
	// retire removes it while another mode serves. Where connections depend on it, it is
	// drained first.
	retire(context.Context, *parts) error
	// cleanup removes it at once, whether this proxy or upstream's left it (--cleanup).
	cleanup(context.Context) error
}

// activeMode is a mode that is open.
type activeMode interface {
	// tier programs decisions into the kernel.
	tier() proxier.Tier
	// run does what goes on beside syncs until ctx is done.
	run(context.Context)
	// serves says what serves a frontend for clients of an origin.
	serves(*proxier.Decision, *proxier.Frontend, proxier.Origin) serving
	// isUnplaced says that nothing serves a service port, since tables are full.
	isUnplaced(*proxier.Decision) bool
	// checks are conditions of readiness besides probes of Services by connections of this host.
	checks(*round) []health.Check
	// lacks is why packets that come in by these uplinks, or any if there is none, are not served at a frontend although serves
	// says so: what the kernel has is looked up. It is nil if they are, or if that is not known.
	lacks(d *proxier.Decision, f *proxier.Frontend, uplinks []string) error
	// followBinds calls fn where a socket of the host may be about to listen at a frontend, until ctx is done. It returns at once if that is
	// not known.
	followBinds(ctx context.Context, fn func()) error
	// foreignPrograms are programs of others that can refuse connections of sockets which
	// this datapath serves.
	foreignPrograms() []string
	// describe adds what of the configuration cannot be carried out now, and why, and how direct server return goes.
	describe(*status.Status)
	// detail is what an explanation adds about a frontend that this datapath serves.
	detail(*proxier.Explanation) string
	// hasMaps says that tandemctl reads from the kernel what this datapath serves.
	hasMaps() bool
	// fallbackName names what serves frontends that programs leave to others; empty for nothing.
	fallbackName() string
	// tables and rulePackets are for /metrics; false where there are none.
	tables() (metrics.Tables, bool)
	rulePackets() (metrics.RulePackets, bool)
	// flowsEnded is told of the UDP flows that were removed from conntrack.
	flowsEnded([]conntrack.Flow)
	// foundOther is told, again and again, where another kube-proxy listens on this node.
	foundOther(listeners []netip.AddrPort)
	// otherEnded is called when another kube-proxy that was not to stay has ended. A full sync follows.
	otherEnded()
	// close releases what this process holds. The kernel state stays.
	close() error
}

// serving is what serves a frontend.
type serving struct {
	by       capabilities.Mode // empty for nothing
	refused  error             // why the datapath of the mode does not; nil if it does
	bySocket bool              // connections are translated at connect()
}

// parts are those of the process that datapaths work with.
type parts struct {
	reporter proxier.Reporter
	rules    iptables.Observer
	flows    *staleudp.Reconciler
	uplinks  *devices.Watcher
	// repaired is told of kernel state that others removed and that was restored.
	repaired func(proxier.Repair)
	// disrupted is told of changes of Maglev tables.
	disrupted func(proxier.Disruption)
	// optOuts tells, until ctx is done, which pods opt out of socket load balancing; nil where nothing
	// can know.
	optOuts func(ctx context.Context, tell func(proxier.OptOuts))
	// nodes tells, until ctx is done, the addresses of all nodes and their pods; nil where nothing can know.
	nodes func(ctx context.Context, tell func(proxier.Cluster) error)
	// waiting is called once if another process has to end first.
	waiting func()
}

// modesOf has all modes of this build, in the order in which errors name them.
func modesOf(h *host) []mode {
	return []mode{&ebpfMode{h}, &ipvsMode{h}, &iptablesMode{h}}
}

// modeNames are those of all modes of this build.
func modeNames() (names []string) {
	for _, m := range modesOf(nil) {
		names = append(names, string(m.name()))
	}
	return names
}

// modeNamed returns a mode of this build.
func modeNamed(h *host, name capabilities.Mode) mode { return named(modesOf(h), name) }

func named(all []mode, name capabilities.Mode) mode {
	return all[slices.IndexFunc(all, func(m mode) bool { return m.name() == name })]
}

// withoutRules reports whether no rules may serve anything: mode ebpf with fallback none.
func withoutRules(c *config.Config) bool {
	return c.KubeProxy.Mode == config.ModeEBPF && !c.Tandem.Coexistence.Enabled() && len(fallbackModes(c)) == 0
}

// fallbackModes may run instead of the one that is configured, in this order. Mode nftables is
// upstream's alone: a configuration that names it is served by rules all the same.
func fallbackModes(c *config.Config) (list []capabilities.Mode) {
	switch {
	case c.KubeProxy.Mode == config.ModeNFTables:
		return []capabilities.Mode{capabilities.ModeIPTables}
	case c.KubeProxy.Mode != config.ModeEBPF || c.Tandem.Coexistence.Enabled():
		return nil
	}
	for _, m := range c.Tandem.EBPF.Fallback {
		if m != config.FallbackNone {
			list = append(list, capabilities.Mode(m))
		}
	}
	return list
}

// selectMode chooses the first mode that can run, of the configured one and its fallbacks.
func selectMode(ctx context.Context, h *host) (mode, capabilities.Decision, error) {
	return selectModeOf(ctx, h, modesOf(h))
}

func selectModeOf(ctx context.Context, h *host, all []mode) (mode, capabilities.Decision, error) {
	request := requestOf(h, all)
	for {
		decision := capabilities.Select(h.report, request)
		if decision.Err != nil {
			return nil, decision, fmt.Errorf("kernel %s: %w", h.report.Kernel, decision.Err)
		}
		m := named(all, decision.Mode)
		err := m.check(ctx)
		if err == nil {
			if request.Mode == config.ModeNFTables {
				decision.Reasons = []capabilities.Reason{{Text: "Tandem has no mode nftables of its own; " +
					"mode iptables serves with the nft variant of iptables and the settings of the section nftables"}}
			}
			return m, decision, nil
		}
		request.Failed[decision.Mode] = err // Select does not choose it again
	}
}

// requestOf is what the configuration asks for.
func requestOf(h *host, all []mode) capabilities.Request {
	request := capabilities.Request{
		Mode: capabilities.Mode(h.config.KubeProxy.Mode), Fallback: fallbackModes(h.config), Failed: map[capabilities.Mode]error{},
	}
	for _, m := range all {
		request.Available = append(request.Available, m.name())
	}
	return request
}

// logMode logs the decision once.
func logMode(logger klog.Logger, h *host, d capabilities.Decision) {
	logger.Info("Selected the proxy mode", "mode", d.Mode, "reasons", texts(d.Reasons),
		"degraded", texts(d.Degraded), "kernel", h.report.Kernel, "cgroupRoot", h.cgroup)
}

func texts(reasons []capabilities.Reason) []string {
	all := make([]string, 0, len(reasons))
	for _, r := range reasons {
		all = append(all, r.String())
	}
	return all
}

// plain is the part of a datapath that most do not need.
type plain struct{}

func (plain) isUnplaced(*proxier.Decision) bool                          { return false }
func (plain) checks(*round) []health.Check                               { return nil }
func (plain) lacks(*proxier.Decision, *proxier.Frontend, []string) error { return nil }
func (plain) followBinds(context.Context, func()) error                  { return nil }
func (plain) foreignPrograms() []string                                  { return nil }
func (plain) describe(*status.Status)                                    {}
func (plain) detail(*proxier.Explanation) string                         { return "" }
func (plain) hasMaps() bool                                              { return false }
func (plain) fallbackName() string                                       { return "" }
func (plain) tables() (metrics.Tables, bool)                             { return metrics.Tables{}, false }
func (plain) rulePackets() (metrics.RulePackets, bool)                   { return metrics.RulePackets{}, false }
func (plain) flowsEnded([]conntrack.Flow)                                {}
func (plain) foundOther([]netip.AddrPort)                                {}
func (plain) otherEnded()                                                {}
