// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/component-base/featuregate"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/ipvs"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
)

// ipvsMode serves by virtual servers, and by rules what those cannot.
type ipvsMode struct{ *host }

func (*ipvsMode) name() capabilities.Mode          { return capabilities.ModeIPVS }
func (*ipvsMode) featureGate() featuregate.Feature { return config.IPVSMode }
func (*ipvsMode) needsConntrack() bool             { return true }
func (*ipvsMode) uses(capabilities.Mode) bool      { return false }

// needsRestart is true for masqueradeAll: the rules that mark packets for it are written
// once, when the datapath is opened.
func (*ipvsMode) needsRestart(field string) bool { return field == "iptables.masqueradeAll" }

func (m *ipvsMode) intervals() proxier.RunnerOptions {
	r, k := proxier.DefaultRunnerOptions(), &m.config.KubeProxy.IPVS
	r.MinInterval, r.MaxInterval = k.MinSyncPeriod.Duration, k.SyncPeriod.Duration
	r.RetryInterval = min(time.Second, r.MaxInterval)
	return r
}

// check tries the modules and tools that the mode needs.
func (m *ipvsMode) check(ctx context.Context) error {
	tools, err := xtables.Find(ctx)
	if err != nil {
		return fmt.Errorf("find the iptables of this node: %w", err)
	}
	opts := ipvsOptions(m.config)
	opts.Tools = tools
	return ipvs.CanUse(ctx, opts)
}

func (m *ipvsMode) initialize(context.Context) error {
	if err := ipvs.Configure(ipvsOptions(m.config)); err != nil {
		return fmt.Errorf("set up IPVS: %w", err)
	}
	return allowLoopbackNodePorts(m.host) // which rules serve in this mode, too
}

func (m *ipvsMode) open(ctx context.Context, p *parts) (activeMode, error) {
	rules, err := ruleOptions(ctx, m.host, p)
	if err != nil {
		return nil, err
	}
	opts := ipvsOptions(m.config)
	opts.Tools, opts.Reporter = rules.Tools, p.reporter
	opts.OpenRules = func(ctx context.Context, constant func(proxier.Family, *proxier.NodeRules) ipvs.ConstantRules) (ipvs.Rules, error) {
		rules.Extra = func(f proxier.Family, node *proxier.NodeRules) iptables.Extra { return extraRules(constant(f, node)) }
		return iptables.Open(ctx, rules)
	}
	tier, err := ipvs.Open(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("open the IPVS datapath: %w", err)
	}
	klog.FromContext(ctx).Info("Opened the IPVS datapath", "scheduler", opts.Scheduler, "variant", rules.Tools.Variant())
	return &ipvsDatapath{servers: tier, flows: p.flows}, nil
}

// extraRules are the constant rules of mode ipvs, which the iptables datapath writes.
func extraRules(c ipvs.ConstantRules) (extra iptables.Extra) {
	for _, chain := range c.Before {
		extra.Before = append(extra.Before, iptables.Chain(chain))
	}
	for _, chain := range c.Chains {
		extra.Chains = append(extra.Chains, iptables.Chain(chain))
	}
	for _, jump := range c.Jumps {
		extra.Jumps = append(extra.Jumps, iptables.Jump(jump))
	}
	return extra
}

// ipvsOptions are what the configuration says.
func ipvsOptions(c *config.Config) ipvs.Options {
	v := &c.KubeProxy.IPVS
	opts := ipvs.Options{
		MasqueradeAll: c.KubeProxy.IPTables.MasqueradeAll, Scheduler: v.Scheduler, StrictARP: v.StrictARP,
		TCPTimeout: v.TCPTimeout.Duration, TCPFinTimeout: v.TCPFinTimeout.Duration, UDPTimeout: v.UDPTimeout.Duration,
		Drain: c.Tandem.IPVS.DrainTimeout.Duration, UpstreamSemantics: c.Tandem.IPVS.UpstreamSemantics,
	}
	for _, text := range v.ExcludeCIDRs {
		if cidr, err := proxier.ParseCIDR(text); err == nil { // validated where the mode runs
			opts.ExcludeCIDRs = append(opts.ExcludeCIDRs, cidr)
		}
	}
	return opts
}

func (*ipvsMode) what() string { return "virtual servers of mode ipvs" }

// replace makes rules masquerade connections of this host to ClusterIPs that virtual servers have,
// before there are such rules.
func (m *ipvsMode) replace(ctx context.Context) error {
	if present, err := ipvs.Present(); !present || err != nil {
		return err
	}
	sets, err := ipvs.ClusterIPSets()
	if err != nil {
		return err
	}
	rules, err := ruleOptions(ctx, m.host, &parts{})
	if err != nil {
		return err
	}
	return iptables.MasqueradeIPVS(ctx, &rules, sets)
}

// retire keeps what masquerades connections of this host until no virtual server is needed.
func (m *ipvsMode) retire(ctx context.Context, _ *parts) error {
	if err := m.remove(ctx, true, ipvs.Drain); err != nil {
		return err
	}
	return m.cleanup(ctx)
}

func (m *ipvsMode) cleanup(ctx context.Context) error {
	return m.remove(ctx, false, func(ctx context.Context, opts ipvs.Options) error {
		err := ipvs.Cleanup(ctx, opts)
		if err == nil {
			klog.FromContext(ctx).Info("Removed the virtual servers, sets and addresses of mode ipvs")
		}
		return err
	})
}

// remove removes the rules of mode ipvs first, since sets that a rule uses cannot be removed,
// and then the rest.
func (m *ipvsMode) remove(ctx context.Context, draining bool, rest func(context.Context, ipvs.Options) error) error {
	present, err := ipvs.Present()
	if !present || err != nil {
		return err
	}
	errs := eachXtables(func(tools *xtables.Tools) error { return iptables.CleanupIPVS(ctx, tools, draining) })
	return errors.Join(append(errs, rest(ctx, ipvsOptions(m.config)))...)
}

// ipvsDatapath is mode ipvs, open.
type ipvsDatapath struct {
	plain
	servers *ipvs.Tier // has the rules too
	flows   *staleudp.Reconciler
}

func (d *ipvsDatapath) tier() proxier.Tier { return staleudp.Beside(d.servers, d.flows) }
func (d *ipvsDatapath) close() error       { return d.servers.Close() }

func (d *ipvsDatapath) run(ctx context.Context) { d.servers.Run(ctx) }

func (d *ipvsDatapath) serves(decision *proxier.Decision, f *proxier.Frontend, _ proxier.Origin) serving {
	switch refused := d.servers.Why(decision, f); {
	case refused == nil:
		return serving{by: capabilities.ModeIPVS}
	case d.servers.Supports(decision, f) == nil:
		return serving{by: capabilities.ModeIPTables, refused: refused}
	default:
		return serving{refused: refused}
	}
}

func (m *ipvsMode) forecast(table *proxier.Table) (f forecast) {
	opts, rules := ipvsOptions(m.config), table.NodeRules()
	refuses, err := ipvs.Refuses(opts, &rules)
	f.serves = func(d *proxier.Decision, frontend *proxier.Frontend, _ proxier.Origin) serving {
		if why := refuses(d, frontend); why != nil {
			return serving{by: capabilities.ModeIPTables, refused: why}
		}
		return serving{by: capabilities.ModeIPVS}
	}
	f.settings, f.settingsErr = ipvs.Changes(opts)
	f.settingsErr = errors.Join(err, f.settingsErr)
	f.loopbackNodePorts(&rules)
	f.notTried = "whether virtual servers, ipsets and device kube-ipvs0 can be created: kube-proxy tries it when it starts, and falls back if that fails"
	return f
}
