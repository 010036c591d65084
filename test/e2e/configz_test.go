// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"encoding/json"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/test/kubeadm"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// kubeconfigFile is the file that replaces KUBECONFIG; --master has the API server's address.
const kubeconfigFile = `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://nowhere.invalid"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
users: [{name: u, user: {}}]
`

const configHead = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// shownConfigs are files, or flags. All files set conntrack.maxPerCore: with the default, upstream
// exits in network namespaces other than the initial one, where it cannot set the limit.
var shownConfigs = []struct {
	name, file string
	flags      []string
}{
	{name: "flags", flags: append([]string{"--proxy-mode=iptables", "--nodeport-addresses=primary", "--iptables-sync-period=45s", "--cluster-cidr=10.244.0.0/16",
		"--metrics-bind-address=0.0.0.0", "--v=2", "--feature-gates=AllAlpha=false", "--kube-api-qps=7", "--conntrack-udp-timeout=20s"}, upstream.Flags...)},
	{name: "no flags", flags: upstream.Flags},
	{name: "nothing", file: configHead + "conntrack: {maxPerCore: 0}"},
	{name: "kubeadm", file: strings.NewReplacer(
		"kubeconfig: /var/lib/kube-proxy/kubeconfig.conf", "kubeconfig: KUBECONFIG",
		"maxPerCore: null", "maxPerCore: 0",
	).Replace(kubeadm.Config(""))},
	{name: "everything", file: configHead + `bindAddress: 127.0.0.1
bindAddressHardFail: true
clientConnection: {acceptContentTypes: application/json, burst: 11, contentType: application/json, kubeconfig: KUBECONFIG, qps: 6.5}
clusterCIDR: 10.244.0.0/16,fd00:10:244::/48
configSyncPeriod: 10m0s
conntrack: {maxPerCore: 0, min: 4096, tcpBeLiberal: true, tcpCloseWaitTimeout: 30m, tcpEstablishedTimeout: 12h, udpStreamTimeout: 100s, udpTimeout: 25s}
detectLocal: {bridgeInterface: cni0, interfaceNamePrefix: cali}
detectLocalMode: BridgeInterface
enableProfiling: true
featureGates: {AllAlpha: false, ContextualLogging: true, LoggingAlphaOptions: true, LoggingBetaOptions: true}
healthzBindAddress: 127.0.0.1:10256
hostnameOverride: other
iptables: {localhostNodePorts: false, masqueradeAll: true, masqueradeBit: 13, minSyncPeriod: 2s, syncPeriod: 40s}
ipvs: {excludeCIDRs: [10.0.0.0/8], minSyncPeriod: 3s, scheduler: lc, strictARP: true, syncPeriod: 50s, tcpFinTimeout: 1m, tcpTimeout: 1h, udpTimeout: 2m}
logging: {format: json, flushFrequency: 7s, verbosity: 1, vmodule: [], options: {json: {splitStream: true, infoBufferSize: 1Ki}, text: {splitStream: true, infoBufferSize: 2Ki}}}
metricsBindAddress: 0.0.0.0
mode: iptables
nftables: {masqueradeAll: true, masqueradeBit: 12, minSyncPeriod: 4s, syncPeriod: 55s}
nodePortAddresses: [10.0.0.0/8, fd00::/8]
oomScoreAdj: 5
portRange: "0-0"
showHiddenMetricsForVersion: ""
windowsRunAsService: true
winkernel: {enableDSR: true, forwardHealthCheckVip: true, networkName: net, rootHnsEndpointName: endpoint, sourceVip: 10.0.0.9}`},
}

// configz is the configuration at /configz, as text and by its fields.
func configz(t *testing.T, n *lab.Node) (answer string, fields any) {
	t.Helper()
	answer = (request{http.MethodGet, netip.MustParseAddrPort("127.0.0.1:10249"), "/configz", ""}).ask(t, n)
	answer = strings.ReplaceAll(answer, n.Name, "NODE")
	at := strings.IndexByte(answer, '{')
	if at < 0 {
		t.Fatalf("/configz answers %s", answer)
	}
	if err := json.Unmarshal([]byte(answer[at:]), &fields); err != nil {
		t.Fatalf("/configz answers %s: %v", answer, err)
	}
	return answer, fields
}

// TestConfigz checks that /configz is identical to upstream's, for files and flags.
func TestConfigz(t *testing.T) {
	binary := upstream.BinaryT(t)
	for _, c := range shownConfigs {
		t.Run(c.name, func(t *testing.T) {
			l, dir := lab.NewT(t), t.TempDir()
			kubeconfig := filepath.Join(dir, "kubeconfig")
			if err := os.WriteFile(kubeconfig, []byte(kubeconfigFile), 0o600); err != nil {
				t.Fatal(err)
			}
			args := c.flags
			if c.file != "" {
				path := filepath.Join(dir, "config.yaml")
				if err := os.WriteFile(path, []byte(strings.ReplaceAll(c.file, "KUBECONFIG", kubeconfig)), 0o600); err != nil {
					t.Fatal(err)
				}
				args = []string{"--config=" + path}
			}
			shown := func(name string, opts upstream.Options) (string, any) {
				t.Helper()
				n := l.Node(name)
				opts.ClusterCIDR = upstream.NoPods
				if opts.Args = args; opts.Env != nil { // ours
					opts.Args = append(args[:len(args):len(args)], "--ebpf-cgroup-root="+n.CgroupPath())
				}
				p, err := upstream.Start(t.Context(), n, opts)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = p.Close() })
				return configz(t, n)
			}
			theirs, want := shown("theirs", upstream.Options{Binary: binary})
			ours, got := shown("ours", upstream.Options{Binary: os.Args[0], Env: []string{asProxy + "=1"}})
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("/configz (-theirs +ours):\n%s", d)
			} else if ours != theirs {
				t.Errorf("/configz (-theirs +ours):\n%s", cmp.Diff(theirs, ours))
			}
			if len(theirs) < 1000 {
				t.Errorf("/configz is short:\n%s", theirs)
			}
		})
	}
}
