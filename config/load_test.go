// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"

	"github.com/tandem-proxy/tandem/test/kubeadm"
)

var kubeadmDocument = kubeadm.Config(ModeEBPF)

const (
	kubeProxyHead = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
	tandemHead    = "apiVersion: config.tandem-proxy.dev/v1alpha1\nkind: TandemConfiguration\n"
)

func TestKubeadmFileHasDefaults(t *testing.T) {
	got, warnings, err := parse("config.conf", []byte(kubeadmDocument))
	if err != nil || len(warnings) > 0 {
		t.Fatalf("error %v, warnings %q", err, warnings)
	}
	want := New()
	want.KubeProxy.Mode = ModeEBPF
	want.KubeProxy.IPVS.MinSyncPeriod.Duration = 0 // which only the flag has a default for
	want.KubeProxy.ClusterCIDR = kubeadm.PodSubnet
	want.KubeProxy.ClientConnection.Kubeconfig = "/var/lib/kube-proxy/kubeconfig.conf"
	if d := cmp.Diff(want, got, cmpopts.IgnoreUnexported(Config{}), cmpopts.EquateEmpty()); d != "" {
		t.Errorf("configuration (-want +got):\n%s", d)
	}
	if errs := got.Validate(); len(errs) > 0 {
		t.Errorf("validation: %v", errs)
	}
}

func TestParse(t *testing.T) {
	tests := []struct {
		name  string
		text  string
		check func(t *testing.T, c *Config)
		warn  []string
		fail  []string
	}{
		{
			name: "both documents",
			text: kubeProxyHead + "mode: ebpf\n---\n" + tandemHead + `
ebpf:
  socketLB: host
  syncPeriod: 1m
  maxFrontends: 1024
`,
			check: func(t *testing.T, c *Config) {
				e := c.Tandem.EBPF
				if c.KubeProxy.Mode != "ebpf" || e.SocketLB != "host" || e.SyncPeriod.Duration != time.Minute || e.MaxFrontends != 1024 {
					t.Errorf("got %+v", c)
				}
				if e.MaxSlots != New().Tandem.EBPF.MaxSlots || e.MinSyncPeriod.Duration != 10*time.Millisecond {
					t.Errorf("defaults are missing: %+v", e)
				}
			},
		},
		{
			name:  "an IPv6 bind address moves the defaults",
			text:  kubeProxyHead + "bindAddress: '::'\n",
			check: addresses("[::]:10256", "[::1]:10249"),
		},
		{
			name:  "an address without port gets one",
			text:  kubeProxyHead + "healthzBindAddress: 10.0.0.1\nmetricsBindAddress: fd00::1\n",
			check: addresses("10.0.0.1:10256", "[fd00::1]:10249"),
		},
		{
			name: "empty documents and comments",
			text: "# nothing\n---\n" + kubeProxyHead + "---\n# nothing\n---\n",
		},
		{
			name: "unknown fields are left out",
			text: kubeProxyHead + "iptables:\n  speed: fast\nMode: ebpf\n---\n" + tandemHead + "ebpf:\n  warp: 9\n",
			warn: []string{
				`f.yaml:4: KubeProxyConfiguration: unknown field "iptables.speed" (ignored)`,
				`f.yaml:5: KubeProxyConfiguration: unknown field "Mode" (ignored)`,
				`f.yaml:10: TandemConfiguration: unknown field "ebpf.warp" (ignored)`,
			},
		},
		{
			name: "the last of two counts",
			text: kubeProxyHead + "mode: iptables\nmode: ebpf\n",
			check: func(t *testing.T, c *Config) {
				if c.KubeProxy.Mode != "ebpf" {
					t.Errorf("mode %q", c.KubeProxy.Mode)
				}
			},
			warn: []string{`f.yaml:4: KubeProxyConfiguration: duplicate field "mode"; the last one is used`},
		},
		{
			name: "the wrong order is no use to upstream",
			text: tandemHead + "---\n" + kubeProxyHead,
			warn: []string{`f.yaml:4: KubeProxyConfiguration is not the first document, so upstream's proxy would not read it`},
		},
		{
			name: "all that does not decode is named",
			text: kubeProxyHead + `oomScoreAdj: low
iptables:
  syncPeriod: soon
  masqueradeAll: 7
mode: [ebpf]
clientConnection: none
conntrack:
  min:
    a: 1
---
` + tandemHead + `ebpf:
  maxSlots: -1
  syncPeriod: 30
  minSyncPeriod: 99999999999999999999s
  warp: 9
`,
			check: func(t *testing.T, c *Config) {
				if *c.KubeProxy.OOMScoreAdj != -999 || c.KubeProxy.Mode != "iptables" {
					t.Errorf("what does not decode does not have its default: %+v", c.KubeProxy)
				}
			},
			warn: []string{`f.yaml:19: TandemConfiguration: unknown field "ebpf.warp" (ignored)`},
			fail: []string{
				"f.yaml:3: KubeProxyConfiguration.oomScoreAdj: got string, want a whole number",
				`f.yaml:5: KubeProxyConfiguration.iptables.syncPeriod: time: invalid duration "soon"`,
				"f.yaml:6: KubeProxyConfiguration.iptables.masqueradeAll: got number, want true or false",
				"f.yaml:7: KubeProxyConfiguration.mode: a list is not allowed here",
				"f.yaml:8: KubeProxyConfiguration.clientConnection: a string is not allowed here",
				"f.yaml:11: KubeProxyConfiguration.conntrack.min: got mapping, want a whole number",
				"f.yaml:16: TandemConfiguration.ebpf.maxSlots: got number -1, want a whole number of 0 or more",
				"f.yaml:17: TandemConfiguration.ebpf.syncPeriod: got number, want a string",
				`f.yaml:18: TandemConfiguration.ebpf.minSyncPeriod: time: invalid duration "99999999999999999999s"`,
			},
		},
		{
			name: "documents of other kinds",
			text: "apiVersion: v1\nkind: ConfigMap\n---\n- a list\n",
			fail: []string{
				`f.yaml:1: apiVersion "v1", kind "ConfigMap": want kubeproxy.config.k8s.io/v1alpha1, kind KubeProxyConfiguration, or config.tandem-proxy.dev/v1alpha1, kind TandemConfiguration`,
			},
			warn: []string{"f.yaml:4: ignoring a document: a document must be a mapping with apiVersion and kind"},
		},
		{
			name: "documents of others behind, which upstream does not read either",
			text: kubeProxyHead + "mode: ebpf\n---\n" + kubeProxyHead + "mode: ipvs\n---\napiVersion: v1\nkind: ConfigMap\n",
			check: func(t *testing.T, c *Config) {
				if c.KubeProxy.Mode != "ebpf" {
					t.Errorf("mode %q", c.KubeProxy.Mode)
				}
			},
			warn: []string{
				"f.yaml:5: ignoring a second KubeProxyConfiguration; the first is in line 1",
				`f.yaml:9: ignoring a document: apiVersion "v1", kind "ConfigMap": want kubeproxy.config.k8s.io/v1alpha1, kind KubeProxyConfiguration, or config.tandem-proxy.dev/v1alpha1, kind TandemConfiguration`,
			},
		},
		{
			name: "what only just misses ours, or is there twice",
			text: kubeProxyHead + "---\n" + tandemHead + "---\n" + tandemHead + "---\napiVersion: config.tandem-proxy.dev/v1\nkind: TandemConfiguration\n",
			fail: []string{
				"f.yaml:7: found a second TandemConfiguration; the first is in line 4",
				`f.yaml:10: apiVersion "config.tandem-proxy.dev/v1", kind "TandemConfiguration": want kubeproxy.config.k8s.io/v1alpha1, kind KubeProxyConfiguration, or config.tandem-proxy.dev/v1alpha1, kind TandemConfiguration`,
			},
		},
		{name: "nothing", text: "", fail: []string{"f.yaml: found no KubeProxyConfiguration"}},
		{name: "not YAML", text: kubeProxyHead + "mode: {\n", fail: []string{"f.yaml:3: did not find expected node content"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, warnings, err := parse("f.yaml", []byte(tt.text))
			var errs []string
			if err != nil {
				errs = strings.Split(err.Error(), "\n")
			}
			if d := cmp.Diff(tt.fail, errs); d != "" {
				t.Errorf("errors (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tt.warn, warnings); d != "" {
				t.Errorf("warnings (-want +got):\n%s", d)
			}
			if tt.check != nil && c != nil {
				tt.check(t, c)
			}
		})
	}
}

// Values that go together, or do not.
func TestTraffic(t *testing.T) {
	for _, test := range []struct{ fields, fail string }{
		{"clusterCIDR: 10.244.0.0/16,fd00:10:244::/48", ""},
		{"clusterCIDR: fd00:10:244::/48", ""},
		{"clusterCIDR: 10.244.0.0", `f.yaml:3: clusterCIDR: Invalid value: "10.244.0.0": must be a valid CIDR block (e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48): "10.244.0.0" is not a CIDR`},
		{"clusterCIDR: 010.244.000.0/16", ""}, // as upstream
		{"clusterCIDR: '10.244.0.0/16, fd00::/48'", `" fd00::/48" is not a CIDR`},
		{"clusterCIDR: 10.244.0.0/16,10.245.0.0/16", "must be either a single CIDR or a dual-stack pair of CIDRs"},
		{"clusterCIDR: 10.244.0.0/16,fd00::/48,fd01::/48", "must be either a single CIDR or a dual-stack pair of CIDRs"},
		{"clusterCIDR: here\ndetectLocalMode: NodeCIDR", ""}, // not used
		{"detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}", ""},
		{"detectLocalMode: BridgeInterface", "detectLocal.bridgeInterface: Required value: must not be empty with detectLocalMode BridgeInterface"},
		{"detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: cali}", ""},
		{"detectLocalMode: InterfaceNamePrefix", "detectLocal.interfaceNamePrefix: Required value"},
		{"detectLocalMode: Magic", `f.yaml:3: detectLocalMode: Unsupported value: "Magic": supported values: "ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"`},
		{"nodePortAddresses: [primary, 10.0.0.0/8, 'fd00::/8', localhost, all]", ""},
		{"nodePortAddresses: [10.0.0.1]", `f.yaml:3: nodePortAddresses[0]: Invalid value: "10.0.0.1": must be a valid CIDR or one of the keywords 'primary', 'localhost', 'all'`},
		{"nodePortAddresses:\n- primary\n- 10.0.0.0/8\n- primary", `f.yaml:6: nodePortAddresses[2]: Duplicate value: "primary"`},
	} {
		c, _, err := parse("f.yaml", []byte(kubeProxyHead+test.fields+"\n"))
		if err == nil {
			err = c.Explain(c.Validate())
		}
		if test.fail == "" && err != nil || test.fail != "" && (err == nil || !strings.Contains(err.Error(), test.fail)) {
			t.Errorf("%s: error %v, want %q", test.fields, err, test.fail)
		}
	}
	if k := New().KubeProxy; !*k.IPTables.LocalhostNodePorts || k.DetectLocalMode != "ClusterCIDR" || k.IPTables.MasqueradeAll {
		t.Errorf("defaults: %+v", k)
	}
}

func addresses(healthz, metrics string) func(*testing.T, *Config) {
	return func(t *testing.T, c *Config) {
		t.Helper()
		if k := c.KubeProxy; k.HealthzBindAddress != healthz || k.MetricsBindAddress != metrics {
			t.Errorf("got %s and %s, want %s and %s", k.HealthzBindAddress, k.MetricsBindAddress, healthz, metrics)
		}
	}
}

// given are flags as on a command line, which set a configuration.
func given(t *testing.T, c *Config, args ...string) *pflag.FlagSet {
	t.Helper()
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	var sets cliflag.NamedFlagSets
	c.AddFlags(&sets)
	for _, name := range sets.Order {
		fs.AddFlagSet(sets.FlagSets[name])
	}
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return fs
}

// Lists that are given win over a file, too, and are the same lists then.
func TestListsBesideFile(t *testing.T) {
	c, _, err := parse("f.yaml", []byte(kubeProxyHead+"---\n"+tandemHead+"ebpf: {devices: [lan0], fallback: [iptables]}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if ignored, err := c.OverrideWithFlags(given(t, New(), "--ebpf-fallback=none", "--ebpf-devices=eth0,bond+", "--ebpf-pod-devices=vm+")); err != nil || len(ignored) > 0 {
		t.Fatal(ignored, err)
	}
	e := &c.Tandem.EBPF
	if got := [][]string{e.Fallback, e.Devices, e.PodDevices}; !cmp.Equal(got, [][]string{{"none"}, {"eth0", "bond+"}, {"vm+"}}) {
		t.Errorf("got %q", got)
	}
	if err := c.Validate(); len(err) > 0 {
		t.Error(err)
	}
}

// What is wrong with a flag is said of the flag.
func TestBadFlags(t *testing.T) {
	for _, test := range []struct{ flag, want string }{
		{"--ebpf-fallback=none,iptables", `--ebpf-fallback: Unsupported value: "none": supported values: "ipvs", "iptables", "none (alone)"`},
		{"--ebpf-fallback=nftables", `--ebpf-fallback: Unsupported value: "nftables": supported values: "ipvs", "iptables", "none (alone)"`},
		{"--ebpf-node-port-range=9-1", `--ebpf-node-port-range: Invalid value: "9-1": must be two ports separated by a -, the lower one first`},
		{"--ebpf-node-port-range=30000", `--ebpf-node-port-range: Invalid value: "30000": must be two ports separated by a -, the lower one first`},
		{"--ebpf-devices=+", `--ebpf-devices: Invalid value: "+": must be the name of a device, or a name prefix followed by a +: up to 15 characters without spaces, / and :`},
		{"--ebpf-devices=eth0:1", `--ebpf-devices: Invalid value: "eth0:1": must be the name of a device, or a name prefix followed by a +: up to 15 characters without spaces, / and :`},
		{"--ebpf-pod-devices=eth0,net/1", `--ebpf-pod-devices: Invalid value: "net/1": must be the name of a device, or a name prefix followed by a +: up to 15 characters without spaces, / and :`},
		{"--ebpf-tcp-opening-timeout=0s", `--ebpf-tcp-opening-timeout: Invalid value: "0s": must be greater than 0`},
		{"--ebpf-tcp-closed-timeout=-1s", `--ebpf-tcp-closed-timeout: Invalid value: "-1s": must be greater than 0`},
		{"--iptables-masquerade-bit=32", `--iptables-masquerade-bit: Invalid value: 32: must be within the range [0, 31]`},
		{"--iptables-sync-period=0s", `--iptables-sync-period: Invalid value: "0s": must be greater than 0`},
		{"--iptables-min-sync-period=1h", `--iptables-min-sync-period: Invalid value: "1h0m0s": must not be greater than syncPeriod, which is 30s`},
		{"--proxy-mode=ipvs --ipvs-sync-period=0s", `--ipvs-sync-period: Invalid value: "0s": must be greater than 0`},
		{"--proxy-mode=ipvs --ipvs-min-sync-period=1h", `--ipvs-min-sync-period: Invalid value: "1h0m0s": must not be greater than syncPeriod, which is 30s`},
		{"--proxy-mode=ipvs --ipvs-exclude-cidrs=10.0.0.0/8,ten", `--ipvs-exclude-cidrs: Invalid value: "ten": must be a valid CIDR`},
		{"--proxy-mode=ipvs --ipvs-udp-timeout=-1s", `--ipvs-udp-timeout: Invalid value: "-1s": must be greater than or equal to 0`},
		{"--proxy-mode=ipvs --ipvs-drain-timeout=0s", `--ipvs-drain-timeout: Invalid value: "0s": must be greater than 0`},
		{"--ready-max-api-age=1m", `--ready-max-api-age: Invalid value: "1m0s": must be 0, which means never, or at least 2m0s`},
		{"--ready-max-api-age=-1s", `--ready-max-api-age: Invalid value: "-1s": must be 0, which means never, or at least 2m0s`},
		{"--manifests=/m --host-port", `--host-port: Invalid value: true: hostPorts are those of Pods, which only an API server has; manifests replaces it`},
		{"--ebpf-max-young-flows=1", `--ebpf-max-young-flows: Invalid value: 1: must be between 2 and 16777216`},
		{"--ebpf-max-ranges=0", `--ebpf-max-ranges: Invalid value: 0: must be between 2 and 16777216`},
		{"--ebpf-max-tcp-flows=20000000", `--ebpf-max-tcp-flows: Invalid value: 20000000: must be between 2 and 16777216`},
	} {
		c := New()
		c.CompleteFromFlags(given(t, c, strings.Fields(test.flag)...))
		if got := c.Explain(c.Validate()); got == nil || got.Error() != test.want {
			t.Errorf("%s: got\n%v\nwant\n%s", test.flag, got, test.want)
		}
	}
}

// TestOriginOfMode: a mode that is given empty is the default one, as in files of kubeadm.
func TestOriginOfMode(t *testing.T) {
	for _, test := range []struct{ file, flag, want string }{
		{"", "", ""},
		{"", "--proxy-mode=ebpf", "--proxy-mode"},
		{"", "--proxy-mode=", ""},
		{`mode: ""`, "", ""},
		{"mode: ipvs", "", "f.yaml:3"},
		{"mode: ipvs", "--proxy-mode=", "f.yaml:3"},
		{"mode: ipvs", "--proxy-mode=ebpf", "--proxy-mode"},
	} {
		c, flags := New(), strings.Fields(test.flag)
		if test.file == "" {
			c.CompleteFromFlags(given(t, c, flags...))
		} else {
			var err error
			if c, _, err = parse("f.yaml", []byte(kubeProxyHead+test.file+"\n")); err != nil {
				t.Fatal(err)
			}
			if _, err := c.OverrideWithFlags(given(t, New(), flags...)); err != nil {
				t.Fatal(err)
			}
		}
		if got := c.Origin("mode"); got != test.want {
			t.Errorf("file %q, flag %q: set by %q, want %q", test.file, test.flag, got, test.want)
		}
	}
}

func TestValuesAreExplained(t *testing.T) {
	c, _, err := parse("f.yaml", []byte(kubeProxyHead+`bindAddress: here
healthzBindAddress: 1.2.3.4:0
metricsBindAddress: localhost:1
configSyncPeriod: -1s
oomScoreAdj: 1001
showHiddenMetricsForVersion: "1.2"
clientConnection: {burst: -1, kubeconfig: /kubeconfig}
---
`+tandemHead+`
manifests: /manifests
ebpf: {socketLB: pods, syncPeriod: 1s, minSyncPeriod: 2s, maxSlots: 1, yieldGracePeriod: 1s}
`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.OverrideWithFlags(given(t, New(), "--ebpf-max-backends=1")); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"f.yaml:9: clientConnection.burst: Invalid value: -1: must be greater than or equal to 0",
		`f.yaml:3: bindAddress: Invalid value: "here": not a valid textual representation of an IP address`,
		`f.yaml:4: healthzBindAddress: Invalid value: "1.2.3.4:0": "0" must be a valid port, from 1 to 65535`,
		`f.yaml:5: metricsBindAddress: Invalid value: "localhost:1": "localhost" must be a valid IP`,
		`f.yaml:6: configSyncPeriod: Invalid value: "-1s": must be greater than 0`,
		"f.yaml:7: oomScoreAdj: Invalid value: 1001: must be within the range [-1000, 1000]",
		`f.yaml:8: showHiddenMetricsForVersion: Invalid value: "1.2": must be the previous version, 1.36`,
		`f.yaml:15: TandemConfiguration.ebpf.minSyncPeriod: Invalid value: "2s": must not be greater than syncPeriod, which is 1s`,
		`f.yaml:15: TandemConfiguration.ebpf.yieldGracePeriod: Invalid value: "1s": must be 0, which means never, or at least 2s`,
		`f.yaml:15: TandemConfiguration.ebpf.socketLB: Unsupported value: "pods": supported values: "all", "host"`,
		"--ebpf-max-backends: Invalid value: 1: must be between 2 and 16777216",
		"f.yaml:15: TandemConfiguration.ebpf.maxSlots: Invalid value: 1: must be between 2 and 16777216",
		`f.yaml:14: TandemConfiguration.manifests: Invalid value: "/manifests": replaces the API server, but clientConnection.kubeconfig names one: "/kubeconfig"`,
	}
	if d := cmp.Diff(want, strings.Split(c.Explain(c.Validate()).Error(), "\n")); d != "" {
		t.Errorf("errors (-want +got):\n%s", d)
	}
}

// Whatever is in a file, reading it ends with a configuration, and with errors that
// name the file if that is not all of it. What can be read is written so that it is
// read the same again.
func FuzzParse(f *testing.F) {
	f.Add([]byte(kubeadmDocument + "---\n" + tandemHead))
	f.Add([]byte(kubeProxyHead + "iptables: {syncPeriod: x, <<: *a}"))
	f.Add([]byte(kubeProxyHead + "iptables: &a {masqueradeBit: 0x1F, <<: {masqueradeAll: yes}}\nnftables: *a\n"))
	f.Add([]byte("a: &a [*a]"))
	f.Add([]byte(`{"apiVersion":"kubeproxy.config.k8s.io/v1alpha1","kind":"KubeProxyConfiguration","mode":"ebpf","featureGates":{"AllAlpha":true}}`))
	f.Add([]byte(kubeProxyHead + "hostnameOverride: ../../../etc/passwd\nclientConnection: {kubeconfig: '\x00'}\n---\n" + tandemHead + "manifests: /dev/zero\nebpf: {cgroupRoot: /proc/self, devices: ['+', '']}\n"))
	f.Add([]byte(kubeProxyHead + "logging: {flushFrequency: 0, vmodule: [{filePattern: a=b, verbosity: -1}]}\nconntrack: {min: -1, udpTimeout: -5s}\nipvs: {excludeCIDRs: [010.0.0.0/8, x]}\nmode: ipvs\n"))
	f.Add([]byte("? [" + kubeProxyHead + "]\n: - 1\n--- !!binary |\n  AAAA\n...\n%TAG ! tag:x,2000:\n---\nx"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, _, err := parse("f.yaml", data)
		if c == nil {
			t.Fatalf("no configuration, error %v", err)
		}
		if err != nil && !strings.HasPrefix(err.Error(), "f.yaml") {
			t.Fatalf("error %v", err)
		}
		wrong := c.Explain(c.Validate())
		if err != nil || wrong != nil {
			return
		}
		text, err := c.Encode()
		if err != nil {
			t.Fatal(err)
		}
		again, warnings, err := parse("f.yaml", text)
		if err != nil || len(warnings) > 0 {
			t.Fatalf("error %v, warnings %q, of\n%s", err, warnings, text)
		}
		twice, err := again.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(string(text), string(twice)); d != "" {
			t.Fatalf("written again (-first +second):\n%s", d)
		}
	})
}

func TestDeviceNames(t *testing.T) {
	for name, want := range map[string]bool{
		"eth0": true, "br-1.5@x": true, "enp0s31f6np0123": true, "enp0s31f6np01234": false,
		"": false, "eth0 ": false, "eth\t0": false, "eth0:1": false, "net/1": false, ".": false, "..": false,
	} {
		if got := isDeviceName(name); got != want {
			t.Errorf("%q can be the name of a device: %v, want %v", name, got, want)
		}
	}
}
