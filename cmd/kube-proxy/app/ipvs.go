// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/ipvs"
)

// openIPVS opens the IPVS tier.
func (p *proxy) openIPVS(ctx context.Context) (*ipvs.Tier, error) {
	rules, err := p.ruleOptions(ctx)
	if err != nil {
		return nil, err
	}
	opts := ipvsOptions(p.opts.Config)
	opts.Tools, opts.Reporter = rules.Tools, p.problems
	opts.OpenRules = func(ctx context.Context, constant func(proxier.Family, *proxier.NodeRules) ipvs.ConstantRules) (ipvs.Rules, error) {
		rules.Extra = func(f proxier.Family, node *proxier.NodeRules) iptables.Extra { return extraRules(constant(f, node)) }
		return iptables.Open(ctx, rules)
	}
	tier, err := ipvs.Open(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("open the IPVS tier: %w", err)
	}
	klog.FromContext(ctx).Info("Opened the IPVS tier", "scheduler", opts.Scheduler, "variant", rules.Tools.Variant())
	return tier, nil
}

// tryIPVS says what keeps mode ipvs from running.
func tryIPVS(ctx context.Context, c *config.Config) error {
	tools, err := xtables.Find(ctx)
	if err != nil {
		return fmt.Errorf("find the iptables of this node: %w", err)
	}
	opts := ipvsOptions(c)
	opts.Tools = tools
	return ipvs.CanUse(ctx, opts)
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

// removeIPVS removes what mode ipvs left, ours and upstream's: its rules, as sets that they
// ask cannot go, and then the rest, by ipvs.Cleanup or ipvs.Drain.
func removeIPVS(ctx context.Context, c *config.Config, remove func(context.Context, ipvs.Options) error) error {
	present, err := ipvs.Present()
	if !present || err != nil {
		return err
	}
	var errs []error
	for _, v := range []xtables.Variant{xtables.NFT, xtables.Legacy} {
		if tools, err := xtables.New(v); err == nil { // else nothing wrote any rules
			errs = append(errs, iptables.CleanupIPVS(ctx, tools))
		}
	}
	if err := errors.Join(append(errs, remove(ctx, ipvsOptions(c)))...); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Removed the virtual servers, sets and addresses of mode ipvs")
	return nil
}

// extraRules are the constant rules of mode ipvs, for the tier that writes them.
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
