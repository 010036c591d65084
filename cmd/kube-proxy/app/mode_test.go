// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2/ktesting"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
)

// Every mode of this build can be configured, and every mode that capabilities can select is
// in this build.
func TestModes(t *testing.T) {
	if d := cmp.Diff([]string{config.ModeEBPF, config.ModeIPVS, config.ModeIPTables}, modeNames()); d != "" {
		t.Errorf("modes (-want +got):\n%s", d)
	}
	for _, name := range modeNames() {
		if m := modeNamed(&host{}, capabilities.Mode(name)); string(m.name()) != name {
			t.Errorf("mode %s is %s", name, m.name())
		}
	}
}

// The intervals between syncs are those of the mode's own section.
func TestIntervals(t *testing.T) {
	c, err := complete(t, kubeProxyHead+"iptables: {syncPeriod: 61s, minSyncPeriod: 2s}\nipvs: {syncPeriod: 62s, minSyncPeriod: 3s}\n---\n"+
		tandemHead+"ebpf: {syncPeriod: 63s, minSyncPeriod: 4s}\n")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range modesOf(&host{config: c.Config}) {
		r := m.intervals()
		got = append(got, fmt.Sprint(m.name(), " ", r.MinInterval, " ", r.MaxInterval))
	}
	if d := cmp.Diff([]string{"ebpf 4s 1m3s", "ipvs 3s 1m2s", "iptables 2s 1m1s"}, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// What the running mode manages itself is not left over.
func TestLeftoversOf(t *testing.T) {
	const tables, counters, servers, programs = "table of mode nftables", "counters of mode iptables", "virtual servers of mode ipvs", "programs of mode ebpf"
	for name, want := range map[capabilities.Mode][]string{
		capabilities.ModeEBPF:     {tables, servers},
		capabilities.ModeIPVS:     {tables, programs, counters},
		capabilities.ModeIPTables: {tables, programs, servers},
	} {
		var got []string
		h := &host{}
		for _, l := range leftoversOf(modeNamed(h, name), h, &parts{}).list {
			got = append(got, l.what())
		}
		if !slices.Equal(got, want) {
			t.Errorf("mode %s removes %q, want %q", name, got, want)
		}
	}
}

// A program that the verifier rejects is logged in full, but at -v=4 only.
func TestLogVerifier(t *testing.T) {
	rejected := &ciliumebpf.VerifierError{Cause: fmt.Errorf("load program: permission denied")}
	for i := range 50 {
		rejected.Log = append(rejected.Log, fmt.Sprintf("%d: (85) call bpf_no_such_helper", i))
	}
	err := fmt.Errorf("load programs: %w", rejected)
	for _, test := range []struct {
		verbosity int
		err       error
		want      []string
		not       []string
	}{
		{2, err, []string{"The verifier rejected a program", "lines=50"}, []string{"7: (85) call"}},
		{4, err, []string{"The verifier rejected a program", "7: (85) call bpf_no_such_helper", "49: (85) call bpf_no_such_helper"}, nil},
		{4, fmt.Errorf("no memory"), nil, []string{"erifier"}},
	} {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(test.verbosity)))
		logVerifier(logger, test.err)
		text := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
		for _, want := range test.want {
			if !strings.Contains(text, want) {
				t.Errorf("-v=%d: no %q in %s", test.verbosity, want, text)
			}
		}
		for _, not := range test.not {
			if strings.Contains(text, not) {
				t.Errorf("-v=%d: %q in %s", test.verbosity, not, text)
			}
		}
	}
	if text := err.Error(); strings.Contains(text, "7: (85)") && strings.Contains(text, "1: (85)") {
		t.Errorf("the error has the whole log: %s", text)
	}
}
