// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"context"
	"fmt"
	"slices"
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
	// fallbackName names what serves frontends that programs leave because of a filter; empty for nothing.
	fallbackName string
	firewalls    string // as logged last
}

// list reads them before the first sync, so that no frontend is served past them. It waits some seconds if that fails.
func (f *filters) list(ctx context.Context, known *proxier.Facts) {
	all, err := f.watcher.Await(ctx)
	if err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Cannot read all packet filter rules of this host before the first sync; retrying")
	}
	f.set(known, all)
}

// set has programs leave all clients outside while filters cannot be read, unless nothing would serve them then.
func (f *filters) set(known *proxier.Facts, all hostfilter.Filters) {
	setFilters(known, all)
	if all.Unread != "" && f.fallbackName != "" {
		known.Filters = slices.Insert(known.Filters, 0, proxier.Filter{Where: fmt.Sprintf("rules that cannot be read (%s)", all.Unread)})
	}
}

// follow keeps the facts up to date until ctx is done.
func (f *filters) follow(ctx context.Context, px *proxier.Proxier) {
	f.watcher.Watch(ctx, func(all hostfilter.Filters) {
		f.report(all)
		f.logFirewalls(ctx, all.Firewalls)
		px.UpdateFacts(func(known *proxier.Facts) { f.set(known, all) })
	})
}

// logFirewalls logs them if they are others than before.
func (f *filters) logFirewalls(ctx context.Context, list []hostfilter.Firewall) {
	text := firewallsText(list)
	if text == f.firewalls {
		return
	}
	f.firewalls = text
	if logger := klog.FromContext(ctx); len(list) == 0 {
		logger.Info("The host's firewall forwards all connections again; eBPF programs serve clients outside this node")
	} else {
		logger.Info("The host's firewall forwards only connections translated by netfilter; eBPF programs leave clients outside this node of Services with local endpoints", "leftTo", f.leftTo(), "firewalls", text)
	}
}

// leftTo names what serves the clients that programs leave.
func (f *filters) leftTo() string { return cmp.Or(f.fallbackName, "nothing, as there is no fallback") }

// report reports filters before DNAT, and that there may be some.
func (f *filters) report(all hostfilter.Filters) {
	var texts []string
	rules := len(all.BeforeDNAT)
	if all.Unread != "" {
		texts = append(texts, f.unreadText(all.Unread))
		rules++
	}
	if len(all.BeforeDNAT) > 0 {
		texts = append(texts, f.filtersText(all.BeforeDNAT))
	}
	f.count(rules, len(all.Firewalls))
	if len(texts) > 0 {
		f.reporter.Report(proxier.Problem{Kind: "Node", Reason: proxier.ReasonFiltersBeforeDNAT, Message: strings.Join(texts, "; ")})
	}
}

func (f *filters) unreadText(why string) string {
	serves := "clients outside are left to " + f.fallbackName
	if f.fallbackName == "" {
		serves = "eBPF programs serve clients outside, past filters that may be among them, as there is no fallback"
	}
	return fmt.Sprintf("rules of this host that may filter packets before DNAT cannot be read; until that works, %s: %s", serves, why)
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

func (f *filters) filtersText(rules []hostfilter.Rule) string {
	more := ""
	if n := len(rules) - 1; n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	serves := "left to " + f.fallbackName
	if f.fallbackName == "" {
		serves = "not served, as there is no fallback"
	}
	return fmt.Sprintf("rules of this host filter packets before DNAT; the affected frontends are %s, so that these filters apply: %s%s", serves, rules[0], more)
}

func firewallsText(list []hostfilter.Firewall) string {
	texts := make([]string, len(list))
	for i, f := range list {
		texts[i] = f.String()
	}
	return strings.Join(texts, "; ")
}
