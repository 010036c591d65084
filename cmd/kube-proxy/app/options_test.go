// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/test/golden"
)

const kubeProxyHead = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// complete parses and completes; %FILE% in an argument is a file of that text.
func complete(t *testing.T, file string, args ...string) (*Options, error) {
	t.Helper()
	o := NewOptions()
	var sets cliflag.NamedFlagSets
	sets.NormalizeNameFunc = cliflag.WordSepNormalizeFunc
	o.AddFlags(&sets)
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	fs.SetNormalizeFunc(cliflag.WordSepNormalizeFunc)
	for _, name := range sets.Order {
		fs.AddFlagSet(sets.FlagSets[name])
	}
	if file != "" {
		path := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append([]string{"--config=" + path}, args...)
	}
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if err := o.Complete(fs); err != nil {
		return o, err
	}
	return o, o.Validate()
}

func TestDefaults(t *testing.T) {
	o, err := complete(t, "", "--proxy-mode=ebpf", "--hostname-override=node1")
	if err != nil {
		t.Fatal(err)
	}
	k, e := o.Config.KubeProxy, o.Config.Tandem.EBPF
	got := map[string]any{
		"bind": k.BindAddress, "hard-fail": k.BindAddressHardFail, "healthz": k.HealthzBindAddress, "metrics": k.MetricsBindAddress,
		"qps": k.ClientConnection.QPS, "burst": k.ClientConnection.Burst, "content": k.ClientConnection.ContentType,
		"config-sync": k.ConfigSyncPeriod.Duration, "profiling": k.EnableProfiling, "oom": *k.OOMScoreAdj, "v": int(k.Logging.Verbosity),
		"format": k.Logging.Format, "min-sync": e.MinSyncPeriod.Duration, "sync": e.SyncPeriod.Duration, "lb": e.SocketLB,
		"proc": e.ProcRoot, "cgroup": e.CgroupRoot, "frontends": e.MaxFrontends, "node": o.nodeName, "cleanup": o.Cleanup,
	}
	want := map[string]any{
		"bind": "0.0.0.0", "hard-fail": false, "healthz": "0.0.0.0:10256", "metrics": "127.0.0.1:10249",
		"qps": float32(5), "burst": int32(10), "content": "application/vnd.kubernetes.protobuf",
		"config-sync": 15 * time.Minute, "profiling": false, "oom": int32(-999), "v": 0,
		"format": "text", "min-sync": 10 * time.Millisecond, "sync": 30 * time.Second, "lb": "all",
		"proc": "/proc", "cgroup": "", "frontends": uint32(1 << 17), "node": "node1", "cleanup": false,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("defaults (-want +got):\n%s", d)
	}
}

func TestOptions(t *testing.T) {
	const tandem = "---\napiVersion: config.tandem-proxy.dev/v1alpha1\nkind: TandemConfiguration\n"
	tests := []struct {
		name  string
		file  string
		args  []string
		check func(*Options) (got, want any)
		fail  []string // what the error has to say
		warn  string
	}{
		{
			name: "the mode flag takes precedence over the file", file: kubeProxyHead + "mode: iptables\n", args: []string{"--proxy-mode=ebpf"},
			check: func(o *Options) (any, any) { return string(o.Config.KubeProxy.Mode), "ebpf" },
		},
		{
			name: "the file counts without the flag", file: kubeProxyHead + "mode: ebpf\n",
			check: func(o *Options) (any, any) { return string(o.Config.KubeProxy.Mode), "ebpf" },
		},
		{
			name: "mode nftables has a section and defaults of its own", file: kubeProxyHead + "mode: nftables\nnftables: {masqueradeBit: 5, masqueradeAll: true, syncPeriod: 9s, minSyncPeriod: 2s}\niptables: {masqueradeBit: 6}\n",
			check: func(o *Options) (any, any) {
				return o.Config.Rules(), config.Rules{MasqueradeBit: 5, MasqueradeAll: true, SyncPeriod: 9 * time.Second, MinSyncPeriod: 2 * time.Second, NodePortAddresses: []string{"primary"}}
			},
		},
		{
			name: "the mode flag takes precedence over mode nftables", file: kubeProxyHead + "mode: nftables\nnftables: {masqueradeBit: 5}\n", args: []string{"--proxy-mode=ebpf"},
			check: func(o *Options) (any, any) {
				return o.Config.Rules(), config.Rules{MasqueradeBit: 14, SyncPeriod: 30 * time.Second, MinSyncPeriod: time.Second, LocalhostNodePorts: true}
			},
		},
		{
			name: "invalid values of mode nftables", file: kubeProxyHead + "mode: nftables\nnftables: {masqueradeBit: 32, syncPeriod: 1s, minSyncPeriod: 2s}\n",
			fail: []string{"config.yaml:4: nftables.masqueradeBit: Invalid value: 32", "config.yaml:4: nftables.minSyncPeriod: Invalid value"},
		},
		{name: "iptables", args: []string{"--proxy-mode=iptables"}},
		{
			name: "nftables", args: []string{"--proxy-mode=nftables", "--iptables-sync-period=9s", "--masquerade-all", "--iptables-masquerade-bit=5", "--nodeport-addresses=10.0.0.0/8"},
			check: func(o *Options) (any, any) {
				return o.Config.Rules(), config.Rules{MasqueradeBit: 14, MasqueradeAll: true, SyncPeriod: 9 * time.Second, MinSyncPeriod: time.Second, NodePortAddresses: []string{"10.0.0.0/8"}}
			},
		},
		{name: "ipvs", args: []string{"--proxy-mode=ipvs", "--ipvs-scheduler=mh"}, check: func(o *Options) (any, any) { return o.Config.KubeProxy.IPVS.Scheduler, "mh" }},
		{name: "no mode is iptables", check: func(o *Options) (any, any) { return string(o.Config.KubeProxy.Mode), "iptables" }},
		{name: "unknown mode", args: []string{"--proxy-mode=bpf"}, fail: []string{`unknown mode "bpf": must be one of ebpf, ipvs, iptables, nftables`}},
		{name: "cleanup asks for no mode", args: []string{"--cleanup"}},
		{
			name: "other flags do not count with a file", file: kubeProxyHead + "mode: ebpf\nbindAddress: 10.0.0.1\n",
			args:  []string{"--bind-address=10.0.0.2", "--profiling"},
			check: func(o *Options) (any, any) { return o.Config.KubeProxy.BindAddress, "10.0.0.1" },
			warn:  "--config is given, so these flags have no effect: --bind-address, --profiling",
		},
		{
			name: "flags upstream does not have win over the file", file: kubeProxyHead + "mode: ebpf\n" + tandem + "ebpf: {maxSlots: 100, maxBackends: 200}\n",
			args: []string{"--ebpf-max-slots=300", "--manifests=/m", "--strict-source-ranges"},
			check: func(o *Options) (any, any) {
				e := o.Config.Tandem
				return []any{e.EBPF.MaxSlots, e.EBPF.MaxBackends, e.Manifests, e.StrictSourceRanges}, []any{uint32(300), uint32(200), "/m", true}
			},
		},
		{
			name: "strict source ranges in the file", file: kubeProxyHead + "mode: ebpf\n" + tandem + "strictSourceRanges: true\n",
			check: func(o *Options) (any, any) { return o.Config.Tandem.StrictSourceRanges, true },
		},
		{
			name: "traffic",
			args: []string{
				"--proxy-mode=ebpf", "--cluster-cidr=10.244.0.0/16", "--nodeport-addresses=primary,10.0.0.0/8", "--nodeport-addresses=localhost",
				"--iptables-localhost-nodeports=false", "--masquerade-all",
			},
			check: func(o *Options) (any, any) {
				k := o.Config.KubeProxy
				return []any{k.ClusterCIDR, k.NodePortAddresses, *k.IPTables.LocalhostNodePorts, k.IPTables.MasqueradeAll},
					[]any{"10.244.0.0/16", []string{"primary", "10.0.0.0/8", "localhost"}, false, true}
			},
		},
		{
			name: "flags for logs win, vmodule is merged",
			file: kubeProxyHead + "mode: ebpf\nlogging: {verbosity: 2, vmodule: [{filePattern: a, verbosity: 1}]}\n",
			args: []string{"-v=5", "--vmodule=b=3"},
			check: func(o *Options) (any, any) {
				l := o.Config.KubeProxy.Logging
				var patterns []string
				for _, m := range l.VModule {
					patterns = append(patterns, m.FilePattern)
				}
				return []any{int(l.Verbosity), patterns}, []any{5, []string{"b", "a"}}
			},
		},
		{
			name: "the host name wins, trimmed and in lower case", file: kubeProxyHead + "mode: ebpf\nhostnameOverride: other\n", args: []string{"--hostname-override= Node1 "},
			check: func(o *Options) (any, any) { return o.nodeName, "node1" },
		},
		{name: "a blank host name", args: []string{"--proxy-mode=ebpf", "--hostname-override=  "}, fail: []string{"the name is blank"}},
		{
			name: "underscores in flags", args: []string{"--proxy_mode=ebpf"},
			check: func(o *Options) (any, any) { return string(o.Config.KubeProxy.Mode), "ebpf" },
		},
		{
			name: "an IPv6 bind address moves the servers", args: []string{"--proxy-mode=ebpf", "--bind-address=::"},
			check: func(o *Options) (any, any) {
				return []string{o.Config.KubeProxy.HealthzBindAddress, o.Config.KubeProxy.MetricsBindAddress}, []string{"[::]:10256", "[::1]:10249"}
			},
		},
		{
			name: "an empty address is the default", args: []string{"--proxy-mode=ebpf", "--metrics-bind-address=", "--healthz-bind-address=10.0.0.1"},
			check: func(o *Options) (any, any) {
				return []string{o.Config.KubeProxy.HealthzBindAddress, o.Config.KubeProxy.MetricsBindAddress}, []string{"10.0.0.1:10256", "127.0.0.1:10249"}
			},
		},
		{
			name: "everything wrong is told at once",
			args: []string{
				"--proxy-mode=ebpf", "--oom-score-adj=2000", "--ebpf-socket-lb=some", "--ebpf-sync-period=0s", "--bind-address=x",
				"--master=https://api", "--manifests=/m", "--kubeconfig=/k", "--logging-format=xml",
			},
			fail: []string{
				"--oom-score-adj: Invalid value: 2000", "--ebpf-socket-lb: Unsupported value", "--ebpf-sync-period: Invalid value", "--bind-address: Invalid value",
				"--manifests replaces the API server, but --master", "--manifests: Invalid value", "--logging-format: Invalid value",
			},
		},
		{
			name: "feature gates of upstream", args: []string{"--proxy-mode=ebpf", "--feature-gates=NFTablesProxyMode=true,KubeProxyIPVS=false,AllBeta=false"},
		},
		{
			name: "the health server is off, by a flag of old alone", args: []string{"--healthz-port=0", "--healthz-bind-address=10.0.0.1"},
			check: func(o *Options) (any, any) { return o.Config.KubeProxy.HealthzBindAddress, "" },
		},
		{
			name: "ports of old", args: []string{"--healthz-port=1", "--metrics-port=2", "--metrics-bind-address=10.0.0.1"},
			check: func(o *Options) (any, any) {
				return []string{o.Config.KubeProxy.HealthzBindAddress, o.Config.KubeProxy.MetricsBindAddress}, []string{"0.0.0.0:10256", "10.0.0.1:2"}
			},
		},
		{name: "the metrics server is never off", args: []string{"--metrics-port=0"}, fail: []string{`--metrics-port: Invalid value: "": must be IP:port`}},
		{
			name: "flags that are empty leave it to the file", file: kubeProxyHead + "mode: ebpf\nhostnameOverride: Node1\n", args: []string{"--proxy-mode=", "--hostname-override="},
			check: func(o *Options) (any, any) {
				return []string{string(o.Config.KubeProxy.Mode), o.nodeName}, []string{"ebpf", "node1"}
			},
		},
		{name: "mode ipvs turned off", args: []string{"--proxy-mode=ebpf", "--ebpf-fallback=ipvs,iptables", "--feature-gates=KubeProxyIPVS=false"}, fail: []string{"mode ipvs is turned off by the feature gate KubeProxyIPVS"}},
		{
			name: "feature gates of older versions", args: []string{"--proxy-mode=ebpf", "--feature-gates=SidecarContainers=true"},
			warn: "--feature-gates: feature gate SidecarContainers has no effect: Kubernetes 1.36 was the last version that had it",
		},
		{name: "feature gates that an older version did not lock", args: []string{"--proxy-mode=ebpf", "--feature-gates=KubeletPSI=false"}},
		{name: "feature gates that every version locks", args: []string{"--proxy-mode=ebpf", "--feature-gates=NFTablesProxyMode=false"}, fail: []string{"cannot set feature gate NFTablesProxyMode to false"}},
		{name: "unknown feature gate", args: []string{"--proxy-mode=ebpf", "--feature-gates=Warp=true"}, fail: []string{"--feature-gates: unrecognized feature gate: Warp"}},
		{name: "unknown feature of the kernel", args: []string{"--proxy-mode=ebpf", "--ebpf-capability-mask=warp=no"}, fail: []string{"--ebpf-capability-mask", "warp"}},
		{name: "unknown flag", args: []string{"--port-range=1-2"}, fail: []string{"unknown flag: --port-range"}},
		{name: "no such file", args: []string{"--config=/nowhere/config.yaml"}, fail: []string{"read configuration: open /nowhere/config.yaml"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			o, err := complete(t, tt.file, tt.args...)
			if len(tt.fail) == 0 && err != nil {
				t.Fatal(err)
			}
			for _, want := range tt.fail {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("error %v, want one with %q", err, want)
				}
			}
			if got := strings.Join(o.warnings, "\n"); got != tt.warn {
				t.Errorf("warnings %q, want %q", got, tt.warn)
			}
			if tt.check != nil {
				got, want := tt.check(o)
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("(-want +got):\n%s", d)
				}
			}
		})
	}
}

func TestArgumentsAreErrors(t *testing.T) {
	for _, tt := range []struct{ arg, want string }{
		{"start", `unexpected argument "start"`},
		{"--warp", "unknown flag: --warp"},
		{"--ebpf-max-slots=many", "invalid argument"},
	} {
		cmd := NewCommand()
		cmd.SilenceErrors = true
		cmd.SetArgs([]string{tt.arg})
		if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v, want one with %q", tt.arg, err, tt.want)
		}
	}
}

func TestHelp(t *testing.T) {
	cmd := newCommand(0)
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"--help"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "help.golden", out.String())
	if strings.Contains(out.String(), "capability-mask") {
		t.Error("a flag for tests is shown")
	}
}

// Every flag that can be wrong is named in errors about its field.
func TestFlagsAreNamedInErrors(t *testing.T) {
	_, err := complete(t, "", "--proxy-mode=ebpf", "--ebpf-max-frontends=1", "--ebpf-max-services=1", "--ebpf-max-backends=1", "--ebpf-max-slots=1",
		"--ebpf-max-affinity=1", "--ebpf-max-udp-peers=1", "--ebpf-max-opt-outs=1", "--ebpf-min-sync-period=0s", "--healthz-bind-address=x:1",
		"--metrics-bind-address=x:1", "--config-sync-period=0s", "--kube-api-burst=-1", "--show-hidden-metrics-for-version=x",
		"--cluster-cidr=x", "--nodeport-addresses=x")
	if err == nil {
		t.Fatal("no error")
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != 15 {
		t.Errorf("%d errors, want 15", len(lines))
	}
	for _, line := range lines {
		if !strings.HasPrefix(line, "--") {
			t.Errorf("not named: %s", line)
		}
	}
	for _, args := range [][]string{{"--detect-local-mode=x"}, {"--detect-local-mode=BridgeInterface", "--pod-bridge-interface="}, {"--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix="}} {
		if _, err := complete(t, "", append(args, "--proxy-mode=ebpf")...); err == nil || !strings.HasPrefix(err.Error(), strings.Split(args[len(args)-1], "=")[0]) {
			t.Errorf("%q: error %v", args, err)
		}
	}
	if config.New().Validate() != nil {
		t.Error("the defaults do not validate")
	}
}
