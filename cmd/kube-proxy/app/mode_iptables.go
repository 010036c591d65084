// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"k8s.io/component-base/featuregate"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/observe/metrics"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
	"github.com/tandem-proxy/tandem/sources/nodefacts"
)

// iptablesMode serves everything by netfilter rules.
type iptablesMode struct{ *host }

func (*iptablesMode) name() capabilities.Mode          { return capabilities.ModeIPTables }
func (*iptablesMode) featureGate() featuregate.Feature { return "" }
func (*iptablesMode) needsConntrack() bool             { return true }
func (*iptablesMode) uses(capabilities.Mode) bool      { return false }

// needsRestart is about mode nftables: in other modes nothing depends on its section.
func (m *iptablesMode) needsRestart(field string) bool {
	return field == "nftables.masqueradeBit" && m.config.KubeProxy.Mode == config.ModeNFTables
}

func (*iptablesMode) check(context.Context) error { return nil }

func (m *iptablesMode) intervals() proxier.RunnerOptions {
	r, rules := proxier.DefaultRunnerOptions(), m.config.Rules()
	r.MinInterval, r.MaxInterval = rules.MinSyncPeriod, rules.SyncPeriod
	r.RetryInterval = min(time.Second, r.MaxInterval) // each try runs programs
	return r
}

func (m *iptablesMode) initialize(context.Context) error { return allowLoopbackNodePorts(m.host) }

// allowLoopbackNodePorts sets the sysctl that NodePorts at loopback addresses need, where
// they are to be served.
func allowLoopbackNodePorts(h *host) error {
	settings, err := nodefacts.New(h.config, h.gate)
	if err != nil {
		return err
	}
	if rules := settings.Policy.NodeRules(&proxier.Facts{}); len(rules.Loopback[proxier.IPv4]) == 0 {
		return nil
	}
	_, err = kernelSettings.Ensure(routeLocalnet, "1")
	return err
}

const routeLocalnet = "proc/sys/net/ipv4/conf/all/route_localnet"

func (m *iptablesMode) open(ctx context.Context, p *parts) (activeMode, error) {
	rules, err := openRules(ctx, m.host, p, p.flows)
	if err != nil {
		return nil, err
	}
	return &iptablesDatapath{rules: rules, logger: klog.FromContext(ctx)}, nil
}

// openRules opens the iptables datapath, alone or as a fallback. It keeps UDP flows in line
// with decisions if it has them.
func openRules(ctx context.Context, h *host, p *parts, flows *staleudp.Reconciler) (*iptables.Tier, error) {
	opts, err := ruleOptions(ctx, h, p)
	if err != nil {
		return nil, err
	}
	opts.Counters, opts.Flows = nfacct.Kernel{}, flows
	tier, err := iptables.Open(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("open the iptables datapath: %w", err)
	}
	klog.FromContext(ctx).Info("Opened the iptables datapath", "variant", opts.Tools.Variant())
	return tier, nil
}

// ruleOptions are those of rules in every mode.
func ruleOptions(ctx context.Context, h *host, p *parts) (iptables.Options, error) {
	tools, err := findTools(ctx, h.config)
	if err != nil {
		return iptables.Options{}, err
	}
	bit := h.config.Rules().MasqueradeBit
	return iptables.Options{
		Tools: tools, Reporter: p.reporter, Repaired: p.repaired, Observer: p.rules, MasqueradeBit: &bit,
		TrackSockets: trackSockets, KeepInvalid: h.config.KubeProxy.Conntrack.TCPBeLiberal || liberalConntrack(),
	}, nil
}

// findTools finds the iptables that rules are written with: the variant that this node uses, or
// the nft variant where mode nftables is configured.
func findTools(ctx context.Context, c *config.Config) (tools *xtables.Tools, err error) {
	if c.KubeProxy.Mode == config.ModeNFTables {
		if tools, err = xtables.New(xtables.NFT); err != nil {
			return nil, fmt.Errorf("find the nft variant of iptables for mode nftables: %w", err)
		}
		return tools, nil
	}
	if tools, err = xtables.Find(ctx); err != nil {
		return nil, fmt.Errorf("find the iptables of this node: %w", err)
	}
	return tools, nil
}

// liberalConntrack reports whether conntrack marks only out-of-window resets as invalid.
func liberalConntrack() bool {
	b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
	return err == nil && strings.TrimSpace(string(b)) != "0"
}

func (m *iptablesMode) what() string {
	if withoutRules(m.config) {
		return "rules of mode iptables"
	}
	return "counters of mode iptables"
}

// retire leaves rules alone where rules of the same names serve: their datapath brings them in line.
// Where none do, those of a process before this one would stay as they are, and translate what
// programs leave alone, such as connections to Services that were deleted since.
func (m *iptablesMode) retire(ctx context.Context, _ *parts) error {
	var errs []error
	if withoutRules(m.config) {
		errs = eachXtables(func(tools *xtables.Tools) error {
			if !hasRules(ctx, tools) {
				return nil
			}
			return iptables.Cleanup(ctx, tools, true)
		})
	}
	return errors.Join(append(errs, iptables.RemoveCounters(ctx, nfacct.Kernel{}))...)
}

// hasRules reports whether a kube-proxy left rules of a variant. Unlike Cleanup, it creates no table.
func hasRules(ctx context.Context, tools *xtables.Tools) bool {
	if tools.Variant() == xtables.Legacy && !xtables.HasLegacy("nat", "filter", "mangle") {
		return false
	}
	for f := range proxier.Families {
		tables, err := tools.Existing(ctx, f)
		if err != nil { // usually a kernel without tables of the family
			klog.FromContext(ctx).V(2).Info("Cannot read rules that a kube-proxy may have left", "variant", tools.Variant(), "family", f, "reason", err.Error())
		}
		if iptables.HasChains(tables) {
			return true
		}
	}
	return false
}

func (*iptablesMode) cleanup(ctx context.Context) error {
	errs := eachXtables(func(tools *xtables.Tools) error { return iptables.Cleanup(ctx, tools, false) })
	return errors.Join(append(errs, iptables.RemoveCounters(ctx, nfacct.Kernel{}))...)
}

// eachXtables is for both variants of iptables. One that is not installed wrote no rules.
func eachXtables(do func(*xtables.Tools) error) (errs []error) {
	for _, v := range []xtables.Variant{xtables.NFT, xtables.Legacy} {
		if tools, err := xtables.New(v); err == nil {
			errs = append(errs, do(tools))
		}
	}
	return errs
}

// iptablesDatapath is mode iptables, open.
type iptablesDatapath struct {
	plain
	rules  *iptables.Tier
	logger klog.Logger
}

func (d *iptablesDatapath) tier() proxier.Tier { return d.rules }
func (d *iptablesDatapath) close() error       { return d.rules.Close() }

func (d *iptablesDatapath) run(ctx context.Context) { d.rules.Run(ctx) }

func (d *iptablesDatapath) serves(decision *proxier.Decision, f *proxier.Frontend, _ proxier.Origin) serving {
	if why := d.rules.Supports(decision, f); why != nil {
		return serving{refused: why}
	}
	return serving{by: capabilities.ModeIPTables}
}

func (d *iptablesDatapath) rulePackets() (metrics.RulePackets, bool) {
	return rulePackets(d.rules, d.logger)
}

// rulePackets are what rules have counted.
func rulePackets(rules *iptables.Tier, logger klog.Logger) (metrics.RulePackets, bool) {
	c, ok, err := rules.Counted()
	if err != nil {
		logger.Error(err, "Cannot read the packet counters of rules; metrics lack them")
	}
	return metrics.RulePackets{InvalidDropped: c.InvalidDropped, LoopbackNodePorts: c.LoopbackNodePorts}, ok
}

func (m *iptablesMode) forecast(table *proxier.Table) (f forecast) {
	f.serves = func(*proxier.Decision, *proxier.Frontend, proxier.Origin) serving {
		return serving{by: capabilities.ModeIPTables}
	}
	rules := table.NodeRules()
	f.loopbackNodePorts(&rules)
	return f
}
