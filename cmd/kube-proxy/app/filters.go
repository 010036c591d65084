// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/hostfilter"
	"github.com/tandem-proxy/tandem/proxier"
)

// filters follows rules of this host that treat a connection according to where it is translated. They
// matter where programs translate packets ahead of netfilter.
type filters struct {
	watcher  hostfilter.Watcher
	reporter proxier.Reporter
	count    func(beforeDNAT, firewalls int) // is told how many there are
}

// list reads them before the first sync, so that no frontend is served past them.
func (f *filters) list(ctx context.Context, known *proxier.Facts) {
	all, err := f.watcher.Look(ctx)
	if err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Cannot read all packet filter rules of this host; until that works, eBPF programs leave clients outside to iptables rules, or with --coexist to the other kube-proxy")
	}
	setFilters(known, all)
}

// follow keeps the facts up to date until ctx is done.
func (f *filters) follow(ctx context.Context, px *proxier.Proxier) {
	reported := firewallsText(nil)
	f.watcher.Watch(ctx, func(all hostfilter.Filters) {
		f.count(len(all.BeforeDNAT), len(all.Firewalls))
		if len(all.BeforeDNAT) > 0 {
			f.reporter.Report(proxier.Problem{Kind: "Node", Reason: proxier.ReasonFiltersBeforeDNAT, Message: filtersText(all.BeforeDNAT)})
		}
		if text := firewallsText(all.Firewalls); text != reported {
			reported = text
			if logger := klog.FromContext(ctx); len(all.Firewalls) == 0 {
				logger.Info("The host's firewall forwards all connections again; eBPF programs serve clients outside this node")
			} else {
				logger.Info("The host's firewall forwards only connections translated by netfilter; eBPF programs leave clients outside this node of Services with local endpoints to iptables rules, or with --coexist to the other kube-proxy", "firewalls", text)
			}
		}
		px.UpdateFacts(func(known *proxier.Facts) { setFilters(known, all) })
	})
}

func setFilters(known *proxier.Facts, all hostfilter.Filters) {
	known.Filters, known.Firewalls = nil, nil
	for _, r := range all.BeforeDNAT {
		known.Filters = append(known.Filters, proxier.Filter(r))
	}
	for _, f := range all.Firewalls {
		known.Firewalls = append(known.Firewalls, proxier.Firewall(f))
	}
}

func filtersText(rules []hostfilter.Rule) string {
	more := ""
	if n := len(rules) - 1; n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("rules of this host filter packets before DNAT, or may do so; iptables rules serve the affected Services, so that these filters apply: %s%s", rules[0], more)
}

// firewallsText is "none" without any.
func firewallsText(list []hostfilter.Firewall) string {
	texts := make([]string, len(list))
	for i, f := range list {
		texts[i] = f.String()
	}
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(texts, "; ")
}
