// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/test/lab"
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
	c, err = complete(t, kubeProxyHead+"mode: nftables\niptables: {syncPeriod: 61s, minSyncPeriod: 2s}\nnftables: {syncPeriod: 64s, minSyncPeriod: 5s}\n")
	if err != nil {
		t.Fatal(err)
	}
	r := (&iptablesMode{&host{config: c.Config}}).intervals()
	got = append(got, fmt.Sprint("nftables ", r.MinInterval, " ", r.MaxInterval))
	if d := cmp.Diff([]string{"ebpf 4s 1m3s", "ipvs 3s 1m2s", "iptables 2s 1m1s", "nftables 5s 1m4s"}, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// What the running mode manages itself is not left over.
func TestLeftoversOf(t *testing.T) {
	const tables, counters, servers, programs = "tables of mode nftables", "counters of mode iptables", "virtual servers of mode ipvs", "programs of mode ebpf"
	for name, want := range map[capabilities.Mode][]string{
		capabilities.ModeEBPF:     {tables, servers},
		capabilities.ModeIPVS:     {tables, programs, counters},
		capabilities.ModeIPTables: {tables, programs, servers},
	} {
		var got []string
		h := &host{config: config.New()}
		for _, l := range leftoversOf(modeNamed(h, name), h, &parts{}, nil).list {
			got = append(got, l.what())
		}
		if !slices.Equal(got, want) {
			t.Errorf("mode %s removes %q, want %q", name, got, want)
		}
	}
	h := &host{config: config.New()}
	h.config.KubeProxy.Mode, h.config.Tandem.EBPF.Fallback = config.ModeEBPF, []string{config.FallbackNone}
	var got []string
	for _, l := range leftoversOf(modeNamed(h, capabilities.ModeEBPF), h, &parts{}, nil).list {
		got = append(got, l.what())
	}
	if want := []string{tables, servers, "rules of mode iptables"}; !slices.Equal(got, want) {
		t.Errorf("mode ebpf without a fallback removes %q, want %q", got, want)
	}
	h = &host{config: config.New()}
	h.config.Tandem.Coexistence.Preset = config.CoexistSocketLB
	if l := leftoversOf(modeNamed(h, capabilities.ModeEBPF), h, &parts{}, nil).list; len(l) > 0 {
		t.Errorf("beside another kube-proxy, %d leftovers are removed", len(l))
	}
}

// Where no rules were left, looking for them creates no table.
func TestRetireCreatesNoTable(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	h := &host{config: config.New()}
	h.config.KubeProxy.Mode, h.config.Tandem.EBPF.Fallback = config.ModeEBPF, []string{config.FallbackNone}
	if err := n.Do(func() error { return modeNamed(h, capabilities.ModeIPTables).retire(t.Context(), &parts{}) }); err != nil {
		t.Error(err)
	}
	for _, c := range [][]string{{"nft", "list", "tables"}, {"cat", "/proc/net/ip_tables_names", "/proc/net/ip6_tables_names"}} {
		if out, err := n.Command(t.Context(), c[0], c[1:]...).Output(); c[0] == "nft" && err != nil || len(out) > 0 {
			t.Errorf("%v: %q, %v", c, out, err)
		}
	}
}

func TestEnoughFiles(t *testing.T) {
	for limit, want := range map[uint64]string{minFiles: "", math.MaxUint64: "", 64: "only 64 open files"} {
		if err := enoughFiles(limit); (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%d: %v", limit, err)
		}
	}
}

// failingMode is one whose trial run fails.
type failingMode struct {
	mode
	err error
}

func (m failingMode) check(context.Context) error { return m.err }

// A mode that this node can run by its capabilities, and whose trial run fails, gives way to
// the next one.
func TestSelectMode(t *testing.T) {
	everything := capabilities.Probe(t.Context(), capabilities.Options{Mask: allYes(t)})
	for _, test := range []struct {
		name, fallback, configured string
		failing                    []capabilities.Mode
		want, wantErr, reason      string
	}{
		{name: "the configured one", fallback: "ipvs,iptables", want: "ebpf"},
		{name: "the first fallback", fallback: "ipvs,iptables", failing: []capabilities.Mode{capabilities.ModeEBPF}, want: "ipvs"},
		{name: "the second fallback", fallback: "ipvs,iptables", failing: []capabilities.Mode{capabilities.ModeEBPF, capabilities.ModeIPVS}, want: "iptables"},
		{name: "no fallback", fallback: "none", failing: []capabilities.Mode{capabilities.ModeEBPF}, wantErr: "mode ebpf failed a trial run: no luck"},
		{name: "mode nftables", configured: "nftables", fallback: "none", want: "iptables", reason: "mode iptables serves with the nft variant of iptables"},
		{
			name: "mode nftables without iptables", configured: "nftables", fallback: "none", failing: []capabilities.Mode{capabilities.ModeIPTables},
			wantErr: "mode iptables failed a trial run: no luck",
		},
	} {
		if test.configured == "" {
			test.configured = "ebpf"
		}
		o, err := complete(t, "", "--proxy-mode="+test.configured, "--ebpf-fallback="+test.fallback)
		if err != nil {
			t.Fatal(err)
		}
		var all []mode
		for _, m := range modesOf(&host{config: o.Config, report: everything}) {
			var err error
			if slices.Contains(test.failing, m.name()) {
				err = errors.New("no luck")
			}
			all = append(all, failingMode{m, err})
		}
		m, decision, err := selectModeOf(t.Context(), &host{config: o.Config, report: everything}, all)
		switch {
		case test.wantErr != "":
			if err == nil || !strings.Contains(err.Error(), test.wantErr) {
				t.Errorf("%s: error %v, want %s", test.name, err, test.wantErr)
			}
		case err != nil || string(m.name()) != test.want:
			t.Errorf("%s: mode %v, error %v, want %s", test.name, m, err, test.want)
		case !strings.Contains(fmt.Sprint(texts(decision.Reasons)), test.reason):
			t.Errorf("%s: %q, want %q", test.name, texts(decision.Reasons), test.reason)
		}
	}
}

// allYes masks every capability as present.
func allYes(t *testing.T) map[capabilities.Feature]capabilities.State {
	t.Helper()
	mask := map[capabilities.Feature]capabilities.State{}
	for _, r := range capabilities.Probe(canceled(t), capabilities.Options{}).Results {
		mask[r.Feature] = capabilities.Yes
	}
	return mask
}

// canceled is a context in which nothing is probed.
func canceled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}
