// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	"sigs.k8s.io/yaml"

	"github.com/tandem-proxy/tandem/test/golden"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// given is what a kube-proxy may be given: fields of a KubeProxyConfiguration, a
// whole file, or flags alone.
type given struct {
	flags  string
	fields string
	file   string
	// other says what upstream does otherwise; docs/configuration.md says why.
	other other
}

type other int

const (
	_            other = iota // does the same
	upstreamOnly              // is taken by upstream alone
	tandemOnly                // is taken by Tandem alone
	otherwise                 // is taken by both, and written otherwise
)

const tandemDocument = "---\napiVersion: config.tandem-proxy.dev/v1alpha1\nkind: TandemConfiguration\n"

var configs = []given{
	// Nothing is wrong with these.
	{},
	{fields: "mode: ''"},
	{fields: "mode: null\nbindAddress: ''\nhealthzBindAddress: ''\nmetricsBindAddress: ''\nconfigSyncPeriod: 0s\noomScoreAdj: null"},
	{fields: "mode: ipvs\nipvs: {scheduler: lc, strictARP: true, tcpTimeout: 1h, excludeCIDRs: [10.0.0.0/8]}\niptables: {masqueradeAll: true}"},
	{fields: "mode: iptables\niptables: {masqueradeBit: 0, masqueradeAll: true, localhostNodePorts: false, syncPeriod: 1m, minSyncPeriod: 5s}\nipvs: {syncPeriod: 7s}"},
	{fields: "clusterCIDR: 10.244.0.0/16,fd00:10:244::/48\nnodePortAddresses: [primary, 10.0.0.0/8, 'fd00::/8', localhost, all]"},
	{fields: "clusterCIDR: 010.244.000.0/16\nbindAddress: 010.0.0.1"},
	{fields: "bindAddress: '::'"},
	{fields: "bindAddress: fd00::1\nhealthzBindAddress: fd00::2\nmetricsBindAddress: 10.0.0.1"},
	{fields: "detectLocalMode: NodeCIDR\nclusterCIDR: anything"},
	{fields: "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}"},
	{fields: "detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: cali}"},
	{fields: "conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s, tcpBeLiberal: true, udpTimeout: 1m, udpStreamTimeout: 5m}"},
	{fields: "featureGates: {AllAlpha: false, KubeProxyIPVS: true, DynamicResourceAllocation: true, MemoryQoS: false, NFTablesProxyMode: true}"},
	{fields: "logging: {format: json, flushFrequency: 10s, verbosity: 4, vmodule: []}\nfeatureGates: {LoggingBetaOptions: true}"},
	{fields: "logging: {flushFrequency: 1000000000, vmodule: [{filePattern: a*, verbosity: 3}]}"},
	{fields: "showHiddenMetricsForVersion: '1.36'"},
	{fields: "bindAddressHardFail: yes\nenableProfiling: on\noomScoreAdj: 0x10"},
	{fields: "hostnameOverride: ' Node1 '\nportRange: 1-2\nwindowsRunAsService: true\nwinkernel: {networkName: a, enableDSR: true}"},
	{fields: "mode: iptables\nmode: ipvs\nwarp: 9\niptables: {warp: 9}"},
	{fields: "clientConnection: {qps: -1, burst: 100, contentType: application/json, acceptContentTypes: a, kubeconfig: /nowhere}"},
	{fields: "iptables: &a {syncPeriod: 20s}\nnftables: *a"},
	{fields: "mode: nftables"},
	{fields: "mode: nftables\nnftables: {masqueradeAll: true, masqueradeBit: 3, syncPeriod: 20s, minSyncPeriod: 0s}\niptables: {masqueradeAll: true, syncPeriod: 10s, localhostNodePorts: false}"},
	{fields: "mode: nftables\nnodePortAddresses: [10.0.0.0/8]"},
	{fields: "mode: nftables\nnftables: {masqueradeBit: 32, syncPeriod: 1s, minSyncPeriod: 2s}"},
	{fields: "mode: nftables\nnftables: {syncPeriod: -1s, minSyncPeriod: -2s}\niptables: {syncPeriod: -1s}"},
	{flags: "--proxy-mode=nftables"},
	{flags: "--proxy-mode=nftables --masquerade-all --iptables-sync-period=20s --iptables-min-sync-period=2s --iptables-masquerade-bit=3 --ipvs-sync-period=9s"},
	{fields: "mode: ipvs\niptables: {syncPeriod: -1s, minSyncPeriod: 1h}"},
	{fields: "mode: iptables\nipvs: {syncPeriod: -1s, minSyncPeriod: 1h, excludeCIDRs: [x], udpTimeout: -1s}"},
	{fields: "nftables: {masqueradeBit: 99, syncPeriod: -1s}"},
	{file: `{"apiVersion":"kubeproxy.config.k8s.io/v1alpha1","kind":"KubeProxyConfiguration","iptables":{"syncPeriod":"40s"}}`},
	{file: "{\n\t\"apiVersion\": \"kubeproxy.config.k8s.io/v1alpha1\",\n\t\"kind\": \"KubeProxyConfiguration\",\n\t\"bindAddress\": \"10.0.0.1\"\n}\n"},
	{file: "---\n# a comment\n" + kubeProxyHead + "---\n" + kubeProxyHead + "mode: ipvs\n---\nkind: ConfigMap\n---\n- a list\n"},
	{flags: "--proxy-mode= --hostname-override= --metrics-bind-address= --healthz-bind-address= --bind-address="},
	{flags: "--healthz-port=20000 --metrics-port=20001"},
	{flags: "--bind-address=10.0.0.1 --healthz-bind-address=10.0.0.1:1 --metrics-bind-address=[::1]:2"},
	{flags: "--proxy-mode=ipvs --ipvs-sync-period=1m --iptables-sync-period=2m --masquerade-all --ipvs-exclude-cidrs=10.0.0.0/8,fd00::/8"},
	{flags: "--iptables-sync-period=2m --iptables-min-sync-period=0s --ipvs-sync-period=1m --ipvs-tcp-timeout=1h"},
	{flags: "--hostname-override=Node1 --cluster-cidr=10.244.0.0/16 --detect-local-mode=ClusterCIDR --nodeport-addresses=primary,10.0.0.0/8"},
	{flags: "--conntrack-max-per-core=1 --conntrack-min=2 --conntrack-tcp-timeout-established=3s --conntrack-tcp-timeout-close-wait=4s --conntrack-udp-timeout=5s --conntrack-udp-timeout-stream=6s --conntrack-tcp-be-liberal"},
	{flags: "--v=5 --vmodule=a=1,b=2 --log-flush-frequency=1s --kube-api-qps=1.5 --kube-api-burst=3 --kube-api-content-type=application/json --profiling --oom-score-adj=5"},
	{flags: "--hostname-override=Other -v=3 --vmodule=b=2 --masquerade-all --oom-score-adj=1", fields: "hostnameOverride: one\nlogging: {verbosity: 1, vmodule: [{filePattern: a, verbosity: 1}]}"},
	{flags: "--master=https://api --cleanup --init-only", fields: "mode: ipvs"},
	{fields: "hostnameOverride: ../a\nclientConnection: {contentType: b}\nlogging: {vmodule: [{filePattern: c, verbosity: 1}]}\n" + tandemDocument + "manifests: ./d\nebpf: {cgroupRoot: e, procRoot: ../f, devices: [g+]}"},

	// These are wrong.
	{fields: "bindAddress: here"},
	{fields: "bindAddress: 10.0.0.1/24"},
	{fields: "bindAddress: fe80::1%eth0"},
	{fields: "healthzBindAddress: localhost:10256"},
	{fields: "healthzBindAddress: 10.0.0.1:0"},
	{fields: "healthzBindAddress: 10.0.0.1:65536"},
	{fields: "healthzBindAddress: 10.0.0.1:http"},
	{fields: "healthzBindAddress: ':10256'"},
	{fields: "metricsBindAddress: '[::1'"},
	{fields: "metricsBindAddress: 10.0.0.1:-1"},
	{fields: "metricsBindAddress: nonsense"},
	{fields: "configSyncPeriod: -1s"},
	{fields: "configSyncPeriod: soon"},
	{fields: "configSyncPeriod: 30"},
	{fields: "oomScoreAdj: 1001"},
	{fields: "oomScoreAdj: -1001"},
	{fields: "oomScoreAdj: low"},
	{fields: "oomScoreAdj: 1.5"},
	{fields: "oomScoreAdj: 99999999999"},
	{fields: "iptables: {masqueradeBit: 32}"},
	{fields: "iptables: {masqueradeBit: -1}"},
	{fields: "iptables: {syncPeriod: -1s}"},
	{fields: "iptables: {minSyncPeriod: -1s}"},
	{fields: "iptables: {minSyncPeriod: 1m}"},
	{fields: "iptables: {masqueradeAll: maybe}"},
	{fields: "iptables: true"},
	{fields: "iptables: [a]"},
	{fields: "mode: ipvs\nipvs: {syncPeriod: -1s}"},
	{fields: "mode: ipvs\nipvs: {minSyncPeriod: 31s}"},
	{fields: "mode: ipvs\nipvs: {minSyncPeriod: -1s}"},
	{fields: "mode: ipvs\nipvs: {tcpTimeout: -1s, tcpFinTimeout: -2s, udpTimeout: -3s}"},
	{fields: "mode: ipvs\nipvs: {excludeCIDRs: [10.0.0.0/8, ten, 10.0.0.1]}"},
	{fields: "mode: ipvs\nipvs:\n  excludeCIDRs:\n  - 10.0.0.0/8\n  - ''"},
	{fields: "mode: ipvs\nfeatureGates: {KubeProxyIPVS: false}"},
	{fields: "mode: userspace"},
	{fields: "mode: kernelspace"},
	{fields: "mode: IPTables"},
	{fields: "mode: [ipvs]"},
	{fields: "detectLocalMode: Magic"},
	{fields: "detectLocalMode: nodecidr"},
	{fields: "detectLocalMode: BridgeInterface"},
	{fields: "detectLocalMode: InterfaceNamePrefix\ndetectLocal: {bridgeInterface: cni0}"},
	{fields: "clusterCIDR: 10.244.0.0"},
	{fields: "clusterCIDR: 10.244.0.0/33"},
	{fields: "clusterCIDR: 10.244.0.0/16,10.245.0.0/16"},
	{fields: "clusterCIDR: 10.244.0.0/16,fd00::/48,fd01::/48"},
	{fields: "clusterCIDR: 10.244.0.0/16,"},
	{fields: "clusterCIDR: 10.244.0.0/16, fd00::/48"},
	{fields: "nodePortAddresses: [10.0.0.1]"},
	{fields: "nodePortAddresses: [primary, primary]"},
	{fields: "nodePortAddresses: ['']"},
	{fields: "nodePortAddresses: [Primary]"},
	{fields: "nodePortAddresses: [' primary']"},
	{fields: "nodePortAddresses: primary"},
	{fields: "nodePortAddresses: [10.0.0.0/8, ::1, 1]"},
	{fields: "conntrack: {maxPerCore: -1, min: -2}"},
	{fields: "conntrack: {tcpEstablishedTimeout: -1s, tcpCloseWaitTimeout: -2s, udpTimeout: -3s, udpStreamTimeout: -4s}"},
	{fields: "conntrack: {maxPerCore: many}"},
	{fields: "conntrack: {tcpBeLiberal: 1}"},
	{fields: "clientConnection: {burst: -1}"},
	{fields: "clientConnection: {qps: fast}"},
	{fields: "clientConnection: none"},
	{fields: "showHiddenMetricsForVersion: '1.20'"},
	{fields: "showHiddenMetricsForVersion: 1.36.0"},
	{fields: "showHiddenMetricsForVersion: last"},
	{fields: "featureGates: {Warp: true}"},
	{fields: "featureGates: {Warp: true, Weft: false, NFTablesProxyMode: false}"},
	{fields: "featureGates: {KubeProxyIPVS: maybe}"},
	{fields: "featureGates: {AllAlpha: true}"},
	{fields: "featureGates: [KubeProxyIPVS]"},
	{fields: "logging: {format: xml}"},
	{fields: "logging: {flushFrequency: -1s}"},
	{fields: "logging: {verbosity: -1}"},
	{fields: "logging: {vmodule: [{filePattern: a, verbosity: -1}]}"},
	{fields: "logging: {vmodule: [{filePattern: 'a=b', verbosity: 1}]}"},
	{fields: "logging: {format: json, vmodule: [{filePattern: a, verbosity: 1}]}"},
	{fields: "logging: {options: {text: {splitStream: true}}}"},
	{fields: "hostnameOverride: [a]"},
	{fields: "mode: {"},
	{fields: "\tmode: ipvs"},
	{fields: "mode: *nothing"},
	{file: "---\n"},
	{file: "mode: ipvs\n"},
	{file: "- a list\n"},
	{file: "\x00\x01"},
	{file: "apiVersion: kubeproxy.config.k8s.io/v1beta1\nkind: KubeProxyConfiguration\n"},
	{file: "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeletConfiguration\n"},
	{file: "apiVersion: v1\nkind: ConfigMap\n---\n" + kubeProxyHead},
	{file: "kind: KubeProxyConfiguration\n"},
	{flags: "--config=/nowhere/config.yaml"},
	{flags: "--port-range=1-2"},
	{flags: "--cleanup-ipvs"},
	{flags: "--udp-timeout=1s"},
	{flags: "--resource-container=/"},
	{flags: "start"},
	{flags: "--healthz-port=0 --metrics-port=0"}, // which is no field
	{flags: "--healthz-port=none"},
	{flags: "--bind-address=here"},
	{flags: "--healthz-bind-address=here:1"},
	{flags: "--healthz-bind-address=10.0.0.1:0"},
	{flags: "--metrics-bind-address=:10249"},
	{flags: "--proxy-mode=bpf"},
	{flags: "--detect-local-mode=Magic"},
	{flags: "--cluster-cidr=10.0.0.0/8,10.0.0.0/16"},
	{flags: "--nodeport-addresses=all,all"},
	{flags: "--oom-score-adj=2000 --iptables-masquerade-bit=32 --kube-api-burst=-1 --config-sync-period=0s"},
	{flags: "--iptables-sync-period=0s"},
	{flags: "--iptables-min-sync-period=1h"},
	{flags: "--proxy-mode=ipvs --ipvs-sync-period=0s"},
	{flags: "--proxy-mode=ipvs --ipvs-udp-timeout=-1s --ipvs-exclude-cidrs=x"},
	{flags: "--conntrack-min=-1 --conntrack-udp-timeout=-1s"},
	{flags: "--feature-gates=Warp=true"},
	{flags: "--feature-gates=Warp"},
	{flags: "--feature-gates=NFTablesProxyMode=false"},
	{flags: "--logging-format=xml"},
	{flags: "--show-hidden-metrics-for-version=1.2"},
	{flags: "--ebpf-max-slots=1"},
	{flags: "--coexist=socket-lb"},
	{flags: "--coexist=east-west --proxy-mode=ebpf"},
	{flags: "--coexist=socket-lb --proxy-mode=ebpf --ebpf-fallback=iptables"},
	{flags: "--coexist=socket-lb --proxy-mode=ebpf --coexist-clients=external,pods,pods --coexist-frontends=HostPorts"},
	{flags: "--coexist-clients=pods --proxy-mode=ebpf --ebpf-socket-lb=host --ebpf-pod-devices=tap+ --take-over-delay=0s"},

	// Upstream takes these.
	{fields: "mode: iptables\n" + tandemDocument + "ebpf: {socketLB: some, maxSlots: -1, syncPeriod: soon}", other: upstreamOnly},
	{fields: "mode: iptables\n" + tandemDocument + "ebpf: {fallback: [none, ipvs], devices: [+], nodePortRange: 9-1}\nmanifests: /m", other: upstreamOnly},
	{fields: "mode: iptables\n" + tandemDocument + "coexistence:\n  clients: [pods, everybody]", other: upstreamOnly},
	{fields: "mode: iptables\n" + tandemDocument + tandemDocument, other: upstreamOnly},
	{fields: "mode: iptables\n---\n{", other: upstreamOnly},
	{fields: "clusterCIDR: ::ffff:10.0.0.0/104", other: upstreamOnly},

	// Upstream does not take these.
	{fields: "mode: ebpf", other: tandemOnly},
	{fields: "featureGates: {SidecarContainers: true, GangScheduling: false}", other: tandemOnly},
	{flags: "--feature-gates=KubeletPSI=false", other: tandemOnly},
	{fields: "mode: ebpf\n" + tandemDocument + "coexistence: {preset: socket-lb, frontends: [ClusterIP, NodePort], clients: [pods]}\nebpf: {fallback: [none]}", other: tandemOnly},
	{flags: "--coexist=north-south --proxy-mode=ebpf", fields: "metricsBindAddress: 10.0.0.1:10249", other: tandemOnly},
	{flags: "--cluster-cidr=", other: tandemOnly},
	{flags: "--healthz-bind-address=10.0.0.1", other: tandemOnly},
	{file: strings.TrimPrefix(tandemDocument, "---\n") + "manifests: /m\n", other: tandemOnly},
	{file: "{apiVersion: kubeproxy.config.k8s.io/v1alpha1, kind: KubeProxyConfiguration}", other: tandemOnly},
	{file: "# nothing\n---\n---\n" + kubeProxyHead, other: tandemOnly},

	{flags: "--bind-address=::", other: otherwise},
	{flags: "--proxy-mode=ebpf", fields: "mode: iptables", other: otherwise}, // there the file has it
}

// arguments writes the file of a case to a directory.
func (g *given) arguments(t *testing.T, dir string) (args []string) {
	t.Helper()
	text := g.file
	if g.fields != "" || text == "" && g.flags == "" {
		text = kubeProxyHead + g.fields + "\n"
	}
	if text != "" || g.fields == "" && g.flags == "" {
		path := filepath.Join(dir, "f.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config="+path)
	}
	return append(args, strings.Fields(g.flags)...)
}

// run gives a new command arguments, and a file to write to.
func (g *given) run(t *testing.T) (written, failed string) {
	t.Helper()
	dir := t.TempDir()
	defer func() { // whatever names are in it
		all, err := os.ReadDir(dir)
		for _, f := range all {
			if f.Name() != "f.yaml" && f.Name() != "written.yaml" {
				t.Errorf("%s: %s is written", g, f.Name())
			}
		}
		if err != nil {
			t.Error(err)
		}
	}()
	back, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	defer t.Chdir(back) // golden files are there
	out := filepath.Join(dir, "written.yaml")
	cmd := newCommand(0)
	cmd.SilenceErrors = true
	cmd.SetOut(&strings.Builder{})
	cmd.SetErr(&strings.Builder{})
	cmd.SetArgs(append(g.arguments(t, dir), "--write-config-to="+out))
	if err := cmd.Execute(); err != nil {
		if _, err := os.Stat(out); err == nil {
			t.Errorf("%s: a configuration is written that is not valid", g)
		}
		return "", strings.ReplaceAll(err.Error(), dir+"/", "")
	}
	text, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return string(text), ""
}

func (g *given) String() string {
	return strings.Join(slices.DeleteFunc([]string{strings.TrimSuffix(g.file+g.fields, "\n"), g.flags}, func(s string) bool { return s == "" }), "\n")
}

// What is said of configurations, most of which are wrong.
func TestConfigs(t *testing.T) {
	var text strings.Builder
	wrong := 0
	for i := range configs {
		g := &configs[i]
		_, failed := g.run(t)
		if failed == "" {
			continue
		}
		wrong++
		for line := range strings.SplitSeq(g.String(), "\n") {
			if line != "" {
				fmt.Fprintf(&text, "%s\n", printable(line))
			}
		}
		for line := range strings.SplitSeq(failed, "\n") {
			fmt.Fprintf(&text, "\t%s\n", printable(line))
		}
	}
	if wrong < 100 {
		t.Errorf("%d are wrong, want at least 100", wrong)
	}
	golden.Compare(t, "configs.golden", text.String())
}

// What is ignored is logged, also where the configuration is only written; upstream logs the same
// files, once for all fields.
func TestIgnoredFieldsAreLogged(t *testing.T) {
	for _, test := range []struct {
		fields string
		want   []string
	}{
		{fields: "mode: iptables"},
		{fields: "warp: 9\nmode: iptables", want: []string{`unknown field "warp"`}},
		{fields: "mode: ipvs\nmode: iptables\niptables: {warp: 9}", want: []string{`duplicate field "mode"`, `unknown field "iptables.warp"`}},
	} {
		dir := t.TempDir()
		path, out := filepath.Join(dir, "f.yaml"), filepath.Join(dir, "written.yaml")
		if err := os.WriteFile(path, []byte(kubeProxyHead+test.fields+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		o, err := complete(t, "", "--config="+path, "--write-config-to="+out)
		if err != nil {
			t.Fatal(err)
		}
		var logged strings.Builder
		logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&logged)))
		if err := o.Run(klog.NewContext(t.Context(), logger)); err != nil {
			t.Fatal(err)
		}
		text := strings.ReplaceAll(logged.String(), `\"`, `"`)
		if n := strings.Count(text, "Part of the configuration is ignored"); n != len(test.want) {
			t.Errorf("%s: %d messages, want %d:\n%s", test.fields, n, len(test.want), text)
		}
		for _, want := range test.want {
			if !strings.Contains(text, want) {
				t.Errorf("%s: not logged: %s\n%s", test.fields, want, text)
			}
		}
		if binary := os.Getenv("UPSTREAM_KUBE_PROXY"); binary != "" {
			said, err := exec.Command(binary, "--config="+path, "--write-config-to="+out).CombinedOutput()
			if theirs := strings.Contains(string(said), "Using lenient decoding"); err != nil || theirs != (len(test.want) > 0) {
				t.Errorf("%s: upstream ends with %v and says\n%s", test.fields, err, said)
			}
		}
	}
}

func printable(line string) string {
	quoted := fmt.Sprintf("%q", line)
	if quoted = quoted[1 : len(quoted)-1]; strings.ContainsAny(line, "\x00\x01\t") {
		return quoted
	}
	return line
}

// TestUpstreamConfigs puts upstream's binary beside: it takes and refuses the same, and
// makes the same of what both take, but for what is known.
func TestUpstreamConfigs(t *testing.T) {
	binary := upstream.BinaryT(t)
	for i := range configs {
		g := &configs[i]
		ours, refused := g.run(t)
		dir := t.TempDir()
		out := filepath.Join(dir, "written.yaml")
		said, err := exec.Command(binary, append(g.arguments(t, dir), "--write-config-to="+out)...).CombinedOutput()
		if takes := refused == ""; (err == nil) != takes {
			if g.other != upstreamOnly && takes == false || g.other != tandemOnly && takes {
				t.Errorf("%s\n\tours: %s\n\tupstream: %s", g, refused, lastLine(said))
			}
			continue
		} else if g.other == upstreamOnly || g.other == tandemOnly {
			t.Errorf("%s\n\tboth do the same by now: taken %t", g, takes)
		}
		if err != nil {
			continue
		}
		theirs, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		first, _, _ := strings.Cut(ours, "---\n")
		if d := cmp.Diff(string(theirs), first); (d != "") != (g.other == otherwise) {
			t.Errorf("%s\n\twritten (-upstream +ours):\n%s", g, d)
		}
	}
}

func lastLine(b []byte) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return lines[len(lines)-1]
}

// shownFlag is one in a help.
var shownFlag = regexp.MustCompile(`(?m)^ +(?:-\w, )?--([\w-]+)(?: (\S+))? .*?(?:\(default (.*)\))?$`)

// TestUpstreamFlags compares all flags that upstream shows: ours have the same type and
// default.
func TestUpstreamFlags(t *testing.T) {
	binary := upstream.BinaryT(t)
	said, err := exec.Command(binary, "--help").Output()
	if err != nil {
		t.Fatal(err)
	}
	flags := newCommand(0).Flags()
	var compared []string
	for _, m := range shownFlag.FindAllStringSubmatch(string(said), -1) {
		name, value := m[1], strings.Trim(m[3], `"`)
		f := flags.Lookup(name)
		if f == nil {
			t.Errorf("--%s is not there", name)
			continue
		}
		compared = append(compared, name)
		if value != "" && value != f.DefValue {
			t.Errorf("--%s is %s, want %s", name, f.DefValue, value)
		}
	}
	if len(compared) < 55 {
		t.Errorf("%d flags are compared, want all of upstream's: %q", len(compared), compared)
	}
	for _, gone := range []string{"boot-id-file", "machine-id-file", "healthz-port", "metrics-port"} {
		if f := flags.Lookup(gone); f == nil || !f.Hidden {
			t.Errorf("--%s is not there, or shown", gone)
		}
	}

	// The gates that are shown, with stage and default.
	shown := regexp.MustCompile(`\w+=true\|false \(.*`)
	theirs := shown.FindAllString(string(said), -1)
	ours := shown.FindAllString(flags.Lookup("feature-gates").Usage, -1)
	slices.Sort(theirs)
	slices.Sort(ours)
	// Of this one upstream tells both defaults that it can have.
	theirs = slices.DeleteFunc(theirs, func(s string) bool { return strings.HasPrefix(s, "DRAFractionalCapacityRange=") })
	ours = slices.DeleteFunc(ours, func(s string) bool { return strings.HasPrefix(s, "DRAFractionalCapacityRange=") })
	if d := cmp.Diff(theirs, ours); d != "" {
		t.Errorf("feature gates (-upstream +ours):\n%s", d)
	}
}

// What is written is a file that both read, and that says the same when it is read.
func TestWrittenConfig(t *testing.T) {
	for _, g := range []given{{flags: "--proxy-mode=iptables"}, {flags: "--proxy-mode=ipvs --ipvs-scheduler=mh"}, {flags: "--proxy-mode=ebpf --ebpf-socket-lb=host --healthz-port=0"}} {
		written, failed := g.run(t)
		if failed != "" {
			t.Fatal(failed)
		}
		golden.Compare(t, "written-"+strings.TrimPrefix(strings.Fields(g.flags)[0], "--proxy-mode=")+".golden", written)
		again := given{file: written}
		if text, failed := again.run(t); failed != "" || text != written {
			t.Errorf("%s: %s, read and written again (-first +second):\n%s", g.flags, failed, cmp.Diff(written, text))
		}
		var any map[string]any
		if err := yaml.Unmarshal([]byte(written), &any); err != nil || any["kind"] != "KubeProxyConfiguration" {
			t.Errorf("%s: upstream's first document is %v, error %v", g.flags, any["kind"], err)
		}
	}
}
