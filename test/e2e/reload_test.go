// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/test/configmap"
	"github.com/tandem-proxy/tandem/test/lab"
)

// configFile is a configuration file as kubeadm writes it, with placeholders.
func configFile(verbosity int, syncPeriod, clusterCIDR string, localhost bool) string {
	return fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
bindAddress: 0.0.0.0
clusterCIDR: %[1]s
mode: ebpf
configSyncPeriod: 0s
iptables: {masqueradeBit: null, syncPeriod: %[3]s, localhostNodePorts: %[4]t}
logging: {flushFrequency: 0, verbosity: %[2]d}
---
apiVersion: config.tandem-proxy.dev/v1alpha1
kind: TandemConfiguration
ebpf:
  syncPeriod: %[3]s
`, clusterCIDR, verbosity, syncPeriod, localhost)
}

const anotherService = `apiVersion: v1
kind: Service
metadata: {namespace: shop, name: more}
spec:
  clusterIP: 10.96.0.11
  ports:
  - {name: t, port: 80, protocol: TCP}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  namespace: shop
  name: more
  labels: {kubernetes.io/service-name: more}
addressType: IPv4
ports:
- {name: t, port: 8080, protocol: TCP}
endpoints:
- {addresses: [%q]}
`

// The ConfigMap changes under traffic: changes that can be applied are, invalid ones are
// reported and ignored, and the others end the process for a restart. No connection is lost.
func TestReload(t *testing.T) {
	for _, mode := range []string{"ebpf", "iptables"} {
		t.Run(mode, func(t *testing.T) { testReload(t, mode) })
	}
}

func testReload(t *testing.T, mode string) {
	const pods, morePods = "10.244.0.0/16,fd00:10:244::/48", "10.240.0.0/12,fd00:10:244::/48"
	needs(t, []string{"--proxy-mode=" + mode})
	s := newStage(t)
	volume := t.TempDir()
	update := func(text string) {
		t.Helper()
		if err := configmap.Update(volume, map[string]string{"config.conf": text, "kubeconfig.conf": "unused"}); err != nil {
			t.Fatal(err)
		}
	}
	run := func() {
		t.Helper()
		s.process = begin(t, command(s.node, "--config="+filepath.Join(volume, "config.conf"), "--hostname-override="+s.node.Name, "--manifests="+s.dir, "--proxy-mode="+mode))
		s.synced(t)
		if mode == "ebpf" {
			s.serves(t)
		}
	}
	shows := func(texts ...string) {
		t.Helper()
		s.await(t, "metrics", func() error {
			_, body, err := s.node.Get(t.Context(), 10249, "/metrics")
			for _, text := range texts {
				if err == nil && !strings.Contains(body, "\n"+text+"\n") {
					err = fmt.Errorf("/metrics does not have %s", text)
				}
			}
			return err
		})
	}

	update(configFile(2, "30s", pods, true))
	run()
	defer s.end()
	long := s.open()
	w := lab.NewLoad(t)
	defer w.End()
	s.ask(w, gently)
	loopback := netip.MustParseAddrPort("127.0.0.1:30080")
	s.await(t, "NodePorts at loopback addresses", reaches(s.node.Sandbox, loopback, s.here.Name))
	if strings.Contains(s.Log.String(), `reason="periodic"`) {
		t.Error("there was a periodic sync before the configuration changed")
	}

	update(configFile(3, "1s", pods, true))
	shows(`tandem_config_reloads_total{result="applied"} 1`, "tandem_config_last_reload_successful 1")
	s.await(t, "the verbosity and period of the file", s.Says(`"Synced" reason="periodic"`))
	if _, body, err := s.node.Get(t.Context(), 10249, "/configz"); err != nil || !strings.Contains(body, `"verbosity":3`) {
		t.Errorf("/configz does not have the new file: %v %s", err, body)
	}

	update(configFile(4, "2s", "10.244.0.0/16,10.245.0.0/16", true))
	shows(`tandem_config_reloads_total{result="failed"} 1`, "tandem_config_last_reload_successful 0", `tandem_problems_total{kind="Node",reason="InvalidConfig"} 1`)
	s.await(t, "what is bad", s.Says(volume+"/config.conf:4: clusterCIDR: Invalid value"))
	writeManifest(t, s.dir, "more.yaml", fmt.Sprintf(anotherService, s.there.Addr4))
	s.await(t, "a change while the file is bad", reaches(s.client.Sandbox, netip.MustParseAddrPort("10.96.0.11:80"), s.there.Name))

	update(configFile(3, "1s", pods, true) + "# in order\n")
	shows(`tandem_config_reloads_total{result="unchanged"} 1`, "tandem_config_last_reload_successful 1")
	w.More(200)
	if s.Ended() {
		t.Fatal("the process has ended")
	}

	update(configFile(3, "1s", morePods, false))
	shows(`tandem_config_reloads_total{result="applied"} 2`)
	s.await(t, "other pods", func() error {
		_, body, err := s.node.Get(t.Context(), 10249, "/debug/explain?src=10.241.0.1&dst=10.96.0.10:80")
		if err == nil && !strings.Contains(body, `"kind":"pod"`) {
			err = fmt.Errorf("explain says %s", body)
		}
		return err
	})
	s.await(t, "no NodePorts at loopback addresses", func() error {
		if reaches(s.node.Sandbox, loopback, s.here.Name)() == nil || reaches(s.node.Sandbox, loopback, s.there.Name)() == nil {
			return errors.New("they are served")
		}
		return nil
	})
	w.More(200)
	checkAll(t, long)

	update(configFile(3, "1s", morePods, false) + "  devices: [eth0]\n")
	var exit *exec.ExitError
	if err := s.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("a change that takes a restart: %v, want exit code 1", err)
	}
	if err := s.Says(`has changed, and these fields need a restart: TandemConfiguration.ebpf.devices`)(); err != nil {
		t.Error(err)
	}
	w.More(200)
	checkAll(t, long)
	run()
	w.More(200)
	checkAll(t, long)
	w.End()
	few(t, w)
}
