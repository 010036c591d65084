// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/spf13/pflag"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/manifests"
	"github.com/tandem-proxy/tandem/sources/nodefacts"
)

// offline explains from files how a kube-proxy with these would serve.
type offline struct {
	manifests, node, config string
	clusterCIDR             string
	localAddresses          []string
}

func (o *offline) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.manifests, "manifests", "", "directory of manifests to explain from, instead of asking kube-proxy")
	fs.StringVar(&o.node, "node", "", "with --manifests: name of the node")
	fs.StringVar(&o.config, "config", "", "with --manifests: configuration file of kube-proxy")
	fs.StringVar(&o.clusterCIDR, "cluster-cidr", "", "with --manifests: CIDR of pods, as kube-proxy's flag; takes precedence over the file")
	fs.StringSliceVar(&o.localAddresses, "local-address", nil, "with --manifests: address of the node in addition to those of its Node object (can be repeated)")
}

func (o *offline) check(given *pflag.FlagSet) error {
	if o.manifests == "" {
		for _, name := range []string{"node", "config", "cluster-cidr", "local-address"} {
			if given.Changed(name) {
				return usagef("--%s needs --manifests", name)
			}
		}
		return nil
	}
	if given.Changed("server") {
		return usagef("--server has no effect with --manifests")
	}
	if o.node == "" {
		return usagef("--manifests needs --node, which decides which endpoints are local")
	}
	return nil
}

// noTier accepts decisions and does nothing.
type noTier struct{}

func (noTier) Sync(context.Context, proxier.Update) error          { return nil }
func (noTier) Cleanup(context.Context) error                       { return nil }
func (noTier) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

func (o *offline) explain(ctx context.Context, flow proxier.Flow, warn func(string)) (*explain.Explanation, error) {
	settings, err := o.settings(warn)
	if err != nil {
		return nil, err
	}
	var local []netip.Addr
	for _, text := range o.localAddresses {
		a, err := netip.ParseAddr(text)
		if err != nil || a.Zone() != "" {
			return nil, usagef("--local-address %q: want an IP address", text)
		}
		local = append(local, a.Unmap())
	}
	sawNode := false
	facts := settings.Facts()
	withLocal(&facts, local)
	px, err := proxier.New(proxier.Options{
		NodeName: o.node, Facts: facts, Policy: settings.Policy, Tier: noTier{}, Runner: proxier.DefaultRunnerOptions(),
		NodeFacts: func(node *v1.Node, f *proxier.Facts) {
			sawNode = true
			settings.FromNode(node, f)
			withLocal(f, local)
		},
		Reporter: proxier.ReporterFunc(func(p proxier.Problem) { warn(problemText(p)) }),
	})
	if err != nil {
		return nil, err
	}
	var cidrs nodefacts.ServiceCIDRs
	source := manifests.New(o.manifests, px, proxier.ReporterFunc(func(p proxier.Problem) { warn(problemText(p)) }),
		manifests.Options{NodeName: o.node, OnServiceCIDR: cidrs.Handler(px.UpdateFacts)})
	if err := source.Load(ctx); err != nil {
		return nil, err
	}
	if !sawNode {
		warn(fmt.Sprintf("the manifests have no Node %s, so its addresses and zone are unknown", o.node))
	}
	if err := px.Sync(ctx); err != nil {
		return nil, err
	}
	return explain.Of(o.node, px.Table(), flow, nil), nil
}

// settings are what the configuration file and the flags say.
func (o *offline) settings(warn func(string)) (*nodefacts.Settings, error) {
	c := config.New()
	if o.config != "" {
		loaded, warnings, err := config.Load(o.config)
		if err != nil {
			return nil, err
		}
		for _, w := range warnings {
			warn(w)
		}
		c = loaded
	}
	if o.clusterCIDR != "" {
		if _, err := config.ParseClusterCIDR(o.clusterCIDR); err != nil {
			return nil, usagef("--cluster-cidr %q: %v", o.clusterCIDR, err)
		}
		c.KubeProxy.DetectLocalMode, c.KubeProxy.ClusterCIDR = config.LocalModeClusterCIDR, o.clusterCIDR
	}
	gate, err := config.NewFeatureGate()
	if err != nil {
		return nil, err
	}
	gates, removed := config.DropRemovedGates(c.KubeProxy.FeatureGates)
	for _, name := range slices.Sorted(maps.Keys(removed)) {
		warn(removed[name])
	}
	if err := errors.Join(c.Explain(c.Validate()), gate.SetFromMap(gates)); err != nil {
		return nil, err
	}
	settings, err := nodefacts.New(c, gate)
	if err != nil {
		return nil, err
	}
	for _, w := range settings.Warnings {
		warn(w)
	}
	return settings, nil
}

// withLocal makes the given addresses and the node's own those of its devices.
func withLocal(f *proxier.Facts, given []netip.Addr) {
	all := slices.Clone(given)
	for _, a := range f.NodeIPs {
		if !a.IsLoopback() {
			all = append(all, a)
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	f.LocalAddrs = slices.Compact(all)
}

func problemText(p proxier.Problem) string {
	text := p.Kind + " " + p.Object.Name
	if p.Object.Namespace != "" {
		text = p.Kind + " " + p.Object.String()
	}
	if p.Field != "" {
		text += ", " + p.Field
	}
	return text + ": " + p.Message
}
