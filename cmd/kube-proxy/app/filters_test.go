// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/tandem-proxy/tandem/kernel/hostfilter"
	"github.com/tandem-proxy/tandem/proxier"
)

// lastReport keeps the last problem that was reported.
type lastReport struct{ proxier.Problem }

func (l *lastReport) Report(p proxier.Problem) { l.Problem = p }

// While filters cannot be read, clients outside are left to what serves instead, and stay with the programs where nothing does. Filters that
// are known apply in any case.
func TestUnreadFilters(t *testing.T) {
	const known = "rule 1 of chain c"
	rules := []hostfilter.Rule{{Where: known}}
	for _, test := range []struct {
		name, fallback string
		all            hostfilter.Filters
		filters        []string // by how they begin
		says           []string
		count          int
	}{
		{"read", "iptables rules", hostfilter.Filters{BeforeDNAT: rules}, []string{known}, []string{"the affected frontends are left to iptables rules, ", known}, 1},
		{"read, beside another kube-proxy", "the other kube-proxy", hostfilter.Filters{BeforeDNAT: rules}, []string{known}, []string{"the affected frontends are left to the other kube-proxy, "}, 1},
		{"read, without a fallback", "", hostfilter.Filters{BeforeDNAT: rules}, []string{known}, []string{"the affected frontends are not served, as there is no fallback, "}, 1},
		{"none", "iptables rules", hostfilter.Filters{}, nil, nil, 0},
		{"unread", "iptables rules", hostfilter.Filters{Unread: "install it"}, []string{"rules that cannot be read (install it)"}, []string{"are left to iptables rules: install it"}, 1},
		{"unread, and one known", "the other kube-proxy", hostfilter.Filters{Unread: "install it", BeforeDNAT: rules}, []string{"rules that cannot be read", known}, []string{"are left to the other kube-proxy", known}, 2},
		{"unread without a fallback", "", hostfilter.Filters{Unread: "install it", BeforeDNAT: rules}, []string{known}, []string{"programs serve clients outside", "install it", known}, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			var reported lastReport
			counted := -1
			f := filters{reporter: &reported, fallbackName: test.fallback, count: func(beforeDNAT, _ int) { counted = beforeDNAT }}
			var facts proxier.Facts
			f.set(&facts, test.all)
			if len(facts.Filters) != len(test.filters) {
				t.Fatalf("filters %+v, want %q", facts.Filters, test.filters)
			}
			for i, want := range test.filters {
				if got := facts.Filters[i].Where; !strings.HasPrefix(got, want) {
					t.Errorf("filter %d is %q, want %q", i, got, want)
				}
			}
			f.report(test.all)
			if counted != test.count {
				t.Errorf("counted %d, want %d", counted, test.count)
			}
			if (reported.Reason != "") != (test.says != nil) {
				t.Errorf("reported %+v", reported.Problem)
			}
			for _, want := range test.says {
				if !strings.Contains(reported.Message, want) {
					t.Errorf("the message is %q, without %q", reported.Message, want)
				}
			}
		})
	}
}

// A firewall is logged when it appears, with what the clients are left to that programs do not serve, and when it has gone.
func TestLogFirewalls(t *testing.T) {
	firewall := []hostfilter.Firewall{{Where: "chain FORWARD"}}
	for name, leftTo := range map[string]string{"the other kube-proxy": "the other kube-proxy", "": "nothing, as there is no fallback"} {
		var log strings.Builder
		ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
		f := filters{fallbackName: name}
		for _, list := range [][]hostfilter.Firewall{nil, firewall, firewall, nil, nil} {
			f.logFirewalls(ctx, list)
		}
		lines := strings.SplitAfter(log.String(), "\n")
		if len(lines) != 3 || !strings.Contains(lines[0], fmt.Sprintf("leftTo=%q", leftTo)) || !strings.Contains(lines[1], "again") {
			t.Errorf("fallback %q: %q", name, lines)
		}
	}
}
