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
		klog.FromContext(ctx).Error(err, "Cannot read all rules of this host that filter packets; Services are served past those that are not known")
	}
	setFilters(known, all)
}

// follow keeps the facts up to date until ctx is done.
func (f *filters) follow(ctx context.Context, px *proxier.Proxier) {
	var reported string
	f.watcher.Watch(ctx, func(all hostfilter.Filters) {
		f.count(len(all.BeforeDNAT), len(all.Firewalls))
		if len(all.BeforeDNAT) > 0 {
			f.reporter.Report(proxier.Problem{Kind: "Node", Reason: proxier.ReasonFiltersBeforeDNAT, Message: filtersText(all.BeforeDNAT)})
		}
		if text := firewallsText(all.Firewalls); text != reported {
			reported = text
			klog.FromContext(ctx).Info("Firewalls that forward only connections that netfilter translates; rules serve clients outside of Services with endpoints on this node", "firewalls", text)
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
	return fmt.Sprintf("rules of this host filter packets before DNAT; rules instead of programs serve the Services that they may be about, so that they apply: %s%s", rules[0], more)
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
