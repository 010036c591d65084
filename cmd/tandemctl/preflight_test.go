// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/hostfilter"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/observe/preflight"
	"github.com/tandem-proxy/tandem/test/golden"
)

// samplePreflight has something in each section.
func samplePreflight() *preflightReport {
	frontend := func(address, kind, carrier, reason string) explain.Placement {
		return explain.Placement{
			Namespace: "shop", Name: "web", Port: "http", Protocol: "TCP", Kind: kind, Address: netip.MustParseAddrPort(address),
			Clients: "all", Carrier: carrier, Reason: reason,
		}
	}
	return &preflightReport{
		Node: "node1", Verdict: "go with remarks", Mode: "ebpf", Requested: "ebpf",
		Kernel:   capabilities.Report{Kernel: "6.12.0", Results: []capabilities.Result{{Feature: capabilities.Connect4, State: capabilities.Yes}}},
		Reasons:  []capabilities.Reason{{Text: "mode ebpf is configured"}},
		Degraded: []capabilities.Reason{{Text: "something is missing"}},
		Uplinks:  []string{"eth0 (2): node address 172.18.0.1"},
		Settings: []sysctl.Change{{Setting: "net.a", From: "1", To: "2"}, {Setting: "net.b", To: "3"}},
		Services: []explain.Placement{
			frontend("10.96.0.1:80", "ClusterIP", "ebpf", ""), frontend("10.96.0.2:90", "ClusterIP", "iptables", "SCTP"), frontend("10.96.0.3:90", "ClusterIP", "", "no fallback"),
		},
		Problems: []string{"Service shop/web, spec.externalIPs[0]: bad"},
		Findings: []preflight.Finding{
			{Severity: preflight.Info, Subject: "cni", What: "flannel", Means: "Nothing."},
			{Severity: preflight.Remark, Subject: "firewall", What: "ufw", Means: "It filters.", Set: "Allow it."},
		},
		Unseen: []preflight.Unseen{{What: "BPF programs on devices", Why: "operation not permitted"}},
	}
}

func TestPreflightText(t *testing.T) {
	empty := &preflightReport{Node: "node1", Verdict: "no"}
	for name, test := range map[string]struct {
		report *preflightReport
		wide   bool
	}{"preflight": {samplePreflight(), false}, "preflight-wide": {samplePreflight(), true}, "preflight-no-mode": {empty, false}} {
		var out bytes.Buffer
		if err := writePreflight(&out, test.report, test.wide); err != nil {
			t.Fatal(err)
		}
		golden.Compare(t, name+".golden", out.String())
	}
	a, out, _ := newTestApp(sample())
	a.output = outputJSON
	if err := a.writeData("PreflightReport", samplePreflight()); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "preflight-json.golden", out.String())
}

func TestPreflightCode(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*preflightReport)
		noMode error
		want   int
	}{
		{"go", func(*preflightReport) {}, nil, exitGo},
		{"information", func(r *preflightReport) { r.Findings = []preflight.Finding{{}} }, nil, exitGo},
		{"a remark", func(r *preflightReport) { r.Findings = []preflight.Finding{{Severity: preflight.Remark}, {}} }, nil, exitRemarks},
		{"a blocker", func(r *preflightReport) { r.Findings = []preflight.Finding{{Severity: preflight.Blocker}} }, nil, exitNo},
		{"another mode", func(r *preflightReport) { r.Mode = "iptables" }, nil, exitRemarks},
		{"unseen", func(r *preflightReport) { r.Unseen = []preflight.Unseen{{}} }, nil, exitRemarks},
		{"unserved", func(r *preflightReport) { r.Services = []explain.Placement{{Carrier: "ebpf"}, {}} }, nil, exitRemarks},
		{"no mode", func(r *preflightReport) { r.Mode = "" }, errors.New("nothing"), exitNo},
	} {
		r := &preflightReport{Mode: "ebpf", Requested: "ebpf"}
		test.change(r)
		if got := r.code(test.noMode); got != test.want {
			t.Errorf("%s: %d, want %d", test.name, got, test.want)
		}
		if test.noMode != nil && (len(r.Findings) != 1 || r.Findings[0].What != "nothing") {
			t.Errorf("%s: findings %+v", test.name, r.Findings)
		}
	}
}

// TestPreflightUsage: what is wrong is named, and nothing is done.
func TestPreflightUsage(t *testing.T) {
	for args, want := range map[string]string{
		"preflight node1":                                   `unknown command "node1"`,
		"preflight --proxy-mode=fast":                       `"fast"`,
		"preflight --config=/nowhere.yaml":                  "/nowhere.yaml",
		"preflight -- --cluster-cidr=10.244.0.0":            "10.244.0.0",
		"preflight -- --no-such-flag":                       "flags of kube-proxy: unknown flag: --no-such-flag",
		"preflight -- word":                                 `unexpected argument "word"`,
		"shadow --for=0s":                                   "--for has to be positive",
		"shadow --for=1s -- --nodeport-addresses=elsewhere": "elsewhere",
		"shadow -o xml":                                     "want table, wide, json, yaml",
	} {
		var out, errs bytes.Buffer
		if code := newApp(&out, &errs).run(strings.Fields(args)); code != exitUsage || !strings.Contains(errs.String(), want) || out.Len() > 0 {
			t.Errorf("%s: exit code %d, want %q in %s%s", args, code, want, &errs, &out)
		}
	}
}

// TestPreflightPage: docs/preflight.md shows what preflight says about a node with a kube-proxy, a CNI and a firewall.
func TestPreflightPage(t *testing.T) {
	findings := preflight.Findings(&preflight.Facts{
		Programmable: true,
		Devices:      []preflight.Device{{Name: "eth0"}, {Name: "flannel.1", Type: "vxlan"}},
		Servers: []preflight.Server{{
			Role: preflight.RoleMetrics, Address: netip.MustParseAddrPort("127.0.0.1:10249"), Listening: true, KubeProxy: true, Mode: "nftables",
		}},
		Firewalls: []hostfilter.Firewall{{Where: "chain FORWARD in table ip filter of nf_tables"}},
	})
	r := &preflightReport{
		Node: "node1", Mode: "ebpf", Requested: "ebpf", Kernel: capabilities.Report{Kernel: "6.18.44"},
		Reasons: capabilities.Select(capabilities.Report{}, capabilities.Request{
			Mode: capabilities.ModeEBPF, Available: []capabilities.Mode{capabilities.ModeEBPF},
		}).Reasons,
		Uplinks:  []string{"eth0 (2): node address 172.18.0.1"},
		Settings: []sysctl.Change{{Setting: "net.netfilter.nf_conntrack_tcp_timeout_close_wait", From: "60", To: "3600"}},
		Findings: findings,
	}
	r.Services = append(slices.Repeat([]explain.Placement{{Clients: "all", Carrier: "ebpf"}}, 12), explain.Placement{
		Namespace: "shop", Name: "web", Port: "sctp", Protocol: "SCTP", Kind: "ClusterIP", Address: netip.MustParseAddrPort("10.96.0.10:90"), Clients: "all", Carrier: "iptables",
		Reason: "the eBPF datapath does not support SCTP",
	})
	r.Verdict = verdicts[r.code(nil)]
	var out bytes.Buffer
	if err := writePreflight(&out, r, false); err != nil {
		t.Fatal(err)
	}
	golden.Shown(t, "../../docs/preflight.md", "tandemctl preflight", out.String())
}
