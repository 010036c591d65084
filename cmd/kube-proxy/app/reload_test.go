// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	k8smetrics "k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/observe/events"
	"github.com/tandem-proxy/tandem/observe/metrics"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/configmap"
)

// reloading is a reloader on a file of a volume, and what comes of it.
type reloading struct {
	*reloader
	t     *testing.T
	dir   string
	lines chan string
}

// newReloading starts from a file with that text.
func newReloading(t *testing.T, text string, args ...string) *reloading {
	t.Helper()
	f := &reloading{t: t, dir: t.TempDir(), lines: make(chan string, 100)}
	f.volume(text)
	o, err := complete(t, "", append([]string{"--config=" + filepath.Join(f.dir, "config.conf"), "--hostname-override=node1"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	f.reloader = &reloader{
		start: o, running: o.Config, mode: &ebpfMode{}, metrics: metrics.New(nil), settle: 20 * time.Millisecond, clock: clocktesting.NewFakeClock(time.Now()),
		check: func(context.Context, *Options) error { return nil },
		apply: func(_ *Options, changed []config.Difference) error {
			f.lines <- fmt.Sprint("applied ", changed)
			return nil
		},
		reporter: proxier.ReporterFunc(func(p proxier.Problem) {
			f.lines <- strings.ReplaceAll(fmt.Sprintf("%s %s %s", p.Kind, p.Reason, p.Message), f.dir, "DIR")
		}),
	}
	return f
}

// volume updates the ConfigMap that the file is a key of.
func (f *reloading) volume(text string) {
	f.t.Helper()
	if err := configmap.Update(f.dir, map[string]string{"config.conf": text, "kubeconfig.conf": ""}); err != nil {
		f.t.Fatal(err)
	}
}

func (f *reloading) expect(want string) {
	f.t.Helper()
	select {
	case got := <-f.lines:
		if !strings.Contains(got, want) {
			f.t.Errorf("got %q, want %q in it", got, want)
		}
	case <-time.After(20 * time.Second):
		f.t.Fatalf("timed out waiting for %q", want)
	}
}

// quiet says that nothing else came of it.
func (f *reloading) quiet() {
	f.t.Helper()
	select {
	case got := <-f.lines:
		f.t.Errorf("got %q, want nothing", got)
	default:
	}
}

const reloadText = kubeProxyHead + "mode: ebpf\nclusterCIDR: 10.244.0.0/16\n"

// A volume of a ConfigMap, with the kernel's help alone.
func TestReload(t *testing.T) {
	f := newReloading(t, reloadText)
	f.clock = clock.RealClock{}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- f.run(ctx) }()

	f.volume(reloadText + "# a comment\n")
	f.volume(reloadText + "logging: {verbosity: 3}\niptables: {syncPeriod: 45s}\n")
	f.expect("applied [iptables.syncPeriod from \"30s\" to \"45s\" logging.verbosity from 0 to 3]")
	f.volume(reloadText + "logging: {verbosity: 4}\niptables: {syncPeriod: 45s}\n")
	f.expect("applied [logging.verbosity from 3 to 4]")

	// Bad in each of the ways: what it is and where is told, and no more comes of it.
	f.volume("kind: [\n")
	f.expect("Node InvalidConfig invalid configuration file DIR/config.conf; keeping the previous configuration, but a restart would fail: DIR/config.conf:")
	f.volume(reloadText + "logging: {verbosity: 5}\niptables:\n  masqueradeBit: 99\noomScoreAdj: 5000\n")
	f.expect("DIR/config.conf:7: iptables.masqueradeBit: Invalid value: 99: must be within the range [0, 31]")
	f.volume(reloadText + "logging: {verbosity: much}\n")
	f.expect("DIR/config.conf:5: KubeProxyConfiguration.logging.verbosity: a string is not allowed here")
	f.volume(reloadText + "featureGates: {Warp: true}\n")
	f.expect("DIR/config.conf:5: featureGates: unrecognized feature gate: Warp")
	if err := configmap.Update(f.dir, map[string]string{"kubeconfig.conf": ""}); err != nil { // the key is gone
		t.Fatal(err)
	}
	f.expect("read configuration: open DIR/config.conf: no such file or directory")

	// As it was, nothing has to be done; what is in force is what was before it was bad.
	f.volume(reloadText + "logging: {verbosity: 4}\niptables: {syncPeriod: 45s}\n")
	f.volume(reloadText + "logging: {verbosity: 6}\niptables: {syncPeriod: 45s}\n")
	f.expect("applied [logging.verbosity from 4 to 6]")

	f.volume(strings.Replace(reloadText, "mode: ebpf", "mode: iptables", 1) + "logging: {verbosity: 7}\niptables: {syncPeriod: 45s}\n")
	select {
	case err := <-done:
		if want := "the configuration file " + f.dir + "/config.conf has changed, and these fields need a restart: mode"; err == nil || err.Error() != want {
			t.Errorf("error %v, want %s", err, want)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("a change that takes a restart does not end it")
	}
	f.quiet()
}

// A file counts once it has stayed as it is for a while: the half that an editor has
// written may well be in order.
func TestReloadSettles(t *testing.T) {
	f := newReloading(t, reloadText, "-v=2")
	clock := f.clock.(*clocktesting.FakeClock)
	path := filepath.Join(f.dir, "config.conf")
	write := func(text string) {
		t.Helper()
		_ = os.Remove(path) // the link
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// look looks now, and expects to be asked again or not.
	look := func(again bool) {
		t.Helper()
		at, err := f.look(t.Context())
		if err != nil || at.IsZero() == again {
			t.Fatalf("again at %v, error %v", at, err)
		}
	}
	f.settle = time.Second
	// What runs is not tried once more.
	f.check = func(context.Context, *Options) error {
		t.Error("checked without a change")
		return nil
	}
	look(true)
	clock.Step(time.Second)
	look(false)
	write(reloadText + "# a comment\n")
	look(true)
	clock.Step(time.Second)
	look(false)
	f.quiet()
	f.check = func(context.Context, *Options) error { return nil }

	write(kubeProxyHead + "mode: ebpf\n") // half of it
	look(true)
	clock.Step(900 * time.Millisecond)
	look(true)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	clock.Step(900 * time.Millisecond)
	look(true)
	write(reloadText + "oomScoreAdj: -998\nlogging: {verbosity: 9}\n")
	clock.Step(900 * time.Millisecond)
	look(true)
	f.quiet()
	clock.Step(time.Second)
	look(false)
	f.expect("applied [oomScoreAdj from -999 to -998]") // the flag wins as at the start
	clock.Step(time.Minute)
	look(false)
	f.quiet()

	f.check = func(context.Context, *Options) error { return errors.New("no such kubeconfig") }
	write(reloadText + "clientConnection: {kubeconfig: /nowhere}\n")
	look(true)
	clock.Step(time.Second)
	look(false)
	f.expect("a restart would fail: no such kubeconfig")
	// A file that cannot take effect is no reason to end, and one that can is. What changes
	// while it is read counts later.
	f.check = func(context.Context, *Options) error {
		write(reloadText + "clientConnection: {kubeconfig: /somewhere} # else\n")
		return nil
	}
	write(reloadText + "clientConnection: {kubeconfig: /somewhere}\n")
	look(true)
	clock.Step(time.Second)
	look(true)
	look(true)
	clock.Step(time.Second)
	if _, err := f.look(t.Context()); err == nil || !strings.Contains(err.Error(), "clientConnection.kubeconfig") {
		t.Errorf("error %v", err)
	}
}

func TestReloadMetrics(t *testing.T) {
	f := newReloading(t, reloadText)
	registry := k8smetrics.NewKubeRegistry()
	if err := f.metrics.Register(kubeRegistry{registry}, nil, nil, nil); err != nil {
		t.Fatal(err)
	}
	look := func() {
		t.Helper()
		for range 3 { // it is seen, counts, and is the same
			if _, err := f.look(t.Context()); err != nil {
				t.Fatal(err)
			}
			f.clock.(*clocktesting.FakeClock).Step(f.settle)
		}
	}
	values := func() string {
		t.Helper()
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, family := range families {
			for _, m := range family.GetMetric() {
				switch name := strings.TrimPrefix(family.GetName(), "tandem_config_"); name {
				case "reloads_total":
					got = append(got, fmt.Sprint(m.GetLabel()[0].GetValue(), " ", m.GetCounter().GetValue()))
				case "last_reload_successful":
					got = append(got, fmt.Sprint("successful ", m.GetGauge().GetValue()))
				}
			}
		}
		return strings.Join(got, ", ")
	}
	for _, step := range []struct{ text, want string }{
		{reloadText, "successful 1, applied 0, failed 0, unchanged 0"},
		{reloadText + "oomScoreAdj: -998\n", "successful 1, applied 1, failed 0, unchanged 0"},
		{"", "successful 0, applied 1, failed 1, unchanged 0"},
		{reloadText + "oomScoreAdj: -998 # again\n", "successful 1, applied 1, failed 1, unchanged 1"},
	} {
		f.volume(step.text)
		look()
		if got := values(); got != step.want {
			t.Errorf("after %q: %s, want %s", step.text, got, step.want)
		}
	}
}

type kubeRegistry struct{ k8smetrics.KubeRegistry }

// Every field that is applied at runtime exists, or a name that changed upstream would go
// unnoticed.
func TestReloadedFieldsExist(t *testing.T) {
	changed, err := complete(t, kubeProxyHead+`mode: ebpf
logging: {verbosity: 1, flushFrequency: 1s}
oomScoreAdj: 1
clusterCIDR: 10.244.0.0/16
detectLocalMode: NodeCIDR
detectLocal: {bridgeInterface: br0}
nodePortAddresses: [primary]
iptables: {syncPeriod: 1h, minSyncPeriod: 2s, masqueradeAll: true, localhostNodePorts: false}
ipvs: {syncPeriod: 1h, minSyncPeriod: 2s}
configSyncPeriod: 1h
nftables: {syncPeriod: 1h, masqueradeAll: true}
portRange: 1-2
windowsRunAsService: true
winkernel: {sourceVip: 10.0.0.1}
---
apiVersion: config.tandem-proxy.dev/v1alpha1
kind: TandemConfiguration
strictSourceRanges: true
loadBalancer: {algorithm: maglev, maglevTableSize: 509, maglevSeed: 7}
takeOverDelay: 1h
ebpf: {syncPeriod: 1h, minSyncPeriod: 2s, masqueradeLocalBackends: true}
`)
	if err != nil {
		t.Fatal(err)
	}
	before, err := complete(t, kubeProxyHead+"mode: ebpf\n")
	if err != nil {
		t.Fatal(err)
	}
	nftables, err := complete(t, kubeProxyHead+"mode: nftables\n")
	if err != nil {
		t.Fatal(err)
	}
	differences, err := config.Differences(before.Config, changed.Config)
	if err != nil {
		t.Fatal(err)
	}
	left := slices.Concat(reloadedPolicy, reloadedRest)
	for _, d := range differences {
		left = slices.DeleteFunc(left, func(at string) bool { return among([]string{at}, d.Path) })
	}
	if len(left) > 0 {
		t.Errorf("no such fields: %q", left)
	}
	for _, test := range []struct {
		mode mode
		path string
		want bool
	}{
		{&ebpfMode{}, "iptables.masqueradeAll", false}, {&ipvsMode{}, "iptables.masqueradeAll", true},
		{&iptablesMode{&host{config: before.Config}}, "nftables.masqueradeBit", false},
		{&iptablesMode{&host{config: nftables.Config}}, "nftables.masqueradeBit", true}, {&iptablesMode{&host{config: nftables.Config}}, "nftables.syncPeriod", false},
		{&ebpfMode{}, "detectLocal.bridgeInterface", false}, {&ebpfMode{}, "detectLocalModes", true},
	} {
		if needsRestart(test.mode, test.path) != test.want {
			t.Errorf("mode %s needs a restart for %s: %v", test.mode.name(), test.path, !test.want)
		}
	}
}

func TestApplyToProcess(t *testing.T) {
	score, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		t.Fatal(err)
	}
	before := config.New()
	c := config.New()
	c.KubeProxy.Logging.Verbosity = 7
	c.KubeProxy.OOMScoreAdj = new(int32(17))
	t.Cleanup(func() {
		_ = os.WriteFile("/proc/self/oom_score_adj", score, 0)
		if err := applyToProcess(before, []config.Difference{{Path: "logging.verbosity"}}); err != nil {
			t.Error(err)
		}
	})
	changed, err := config.Differences(before, c)
	if err != nil {
		t.Fatal(err)
	}
	if err := applyToProcess(c, changed); err != nil {
		t.Fatal(err)
	}
	if now, err := os.ReadFile("/proc/self/oom_score_adj"); err != nil || strings.TrimSpace(string(now)) != "17" {
		t.Errorf("oom_score_adj is %s, error %v", now, err)
	}
	if !klog.V(7).Enabled() || klog.V(8).Enabled() {
		t.Error("the verbosity is not 7")
	}
	// The verbosity was changed at /debug/flags/v meanwhile.
	c.KubeProxy.OOMScoreAdj = new(int32(18))
	if err := applyToProcess(before, []config.Difference{{Path: "logging.verbosity"}}); err != nil {
		t.Fatal(err)
	}
	if err := applyToProcess(c, []config.Difference{{Path: "oomScoreAdj"}}); err != nil || klog.V(1).Enabled() {
		t.Errorf("error %v, or the verbosity changed", err)
	}
}

// What a process could not start with is no reason to end one that runs.
func TestCouldRun(t *testing.T) {
	rulesAlone := map[capabilities.Feature]capabilities.State{capabilities.BPFSyscall: capabilities.No, capabilities.IPTables: capabilities.Yes}
	p := &proxy{host: &host{report: capabilities.Probe(t.Context(), capabilities.Options{CgroupRoot: "/nowhere", Mask: rulesAlone})}}
	for _, test := range []struct{ name, text, want string }{
		{"a mode that the kernel does not support", "mode: ebpf\n---\n" + tandemHead + "manifests: /\nebpf: {fallback: [none]}\n", "no fallback is configured"},
		{"one with a fallback", "mode: ebpf\n---\n" + tandemHead + "manifests: /\n", ""},
		{"no manifests", "mode: iptables\n---\n" + tandemHead + "manifests: /nowhere\n", "/nowhere does not exist"},
		{"a family that this host does not have", "mode: iptables\nbindAddress: fd00::1\n---\n" + tandemHead + "manifests: /\n", "bindAddress is fd00::1, but this host has no IPv6"},
		{"no kubeconfig", "mode: iptables\nclientConnection: {kubeconfig: /nowhere}\n", "/nowhere"},
	} {
		o, err := complete(t, kubeProxyHead+test.text)
		if err != nil {
			t.Fatalf("%s: %v", test.name, err)
		}
		err = p.couldRun(t.Context(), o)
		if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s: error %v, want %q", test.name, err, test.want)
		}
	}
}

const tandemHead = "apiVersion: config.tandem-proxy.dev/v1alpha1\nkind: TandemConfiguration\n"

// The Event of a bad file is about the Node, as nothing else in the cluster knows of it.
func TestReloadEvent(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	var recorded eventRecorder
	f := newReloading(t, reloadText)
	f.reporter = events.New(ctx, events.Options{NodeName: "node1", Recorder: &recorded})
	f.failed(fmt.Errorf("%s:3: mode: %w\nmore", f.start.ConfigFile, io.ErrUnexpectedEOF))
	want := eventRecorder{"Node node1 Warning InvalidConfig invalid configuration file " + f.start.ConfigFile + "; keeping the previous configuration, but a restart would fail: " +
		f.start.ConfigFile + ":3: mode: unexpected EOF; more"}
	if d := cmp.Diff(want, recorded); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// eventRecorder writes Events down.
type eventRecorder []string

func (r *eventRecorder) Eventf(ref *v1.ObjectReference, kind, reason, _, note string, args ...any) {
	*r = append(*r, fmt.Sprintf("%s %s %s %s %s", ref.Kind, ref.Name, kind, reason, fmt.Sprintf(note, args...)))
}
