// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

func healthy(n *lab.Node) func() error {
	return func() error {
		_, err := n.Fetch(context.Background(), 10256, "/healthz")
		return err
	}
}

// reaches is the condition that connections to the Service reach the pod.
func reaches(from *lab.Sandbox, to netip.AddrPort, pod string) func() error {
	return func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		defer cancel()
		reply, err := from.Ask(ctx, "tcp", to)
		if err == nil && reply.Server != pod {
			err = fmt.Errorf("%s answers, want %s", reply.Server, pod)
		}
		return err
	}
}

// TestProcess follows one node from the first start to the cleanup.
func TestProcess(t *testing.T) {
	l := lab.NewT(t, lab.Options{Pause: true})
	n := l.Node("node1")
	web, shell := serve(t, n.Pod("web")), n.Pod("shell")
	dir := t.TempDir()
	writeManifests(t, dir, clusterIPs, web)
	served := func(what string) {
		t.Helper()
		for _, from := range []*lab.Sandbox{shell.Sandbox, n.Sandbox} {
			for _, to := range []netip.AddrPort{vip4, vip6} {
				await(t, fmt.Sprintf("%s: %s to %s", what, from.Name, to), reaches(from, to, "web"))
			}
		}
	}

	first := start(t, n, dir, "--profiling", "--ebpf-service-signals")
	first.await(t, "first start", healthy(n))
	first.synced(t)
	served("first start")
	await(t, "health", func() error {
		_, body, err := n.Get(t.Context(), 10256, "/livez")
		if err == nil && (!strings.Contains(body, `"healthy":true`) || !strings.Contains(body, `"IPv6":{`)) {
			err = errors.New("/livez answers " + body)
		}
		return err
	})
	for path, want := range map[string][]string{
		"/metrics": {
			"kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv6\"}", "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
			"kubeproxy_proxy_healthz_total{code=\"200\"}", "kubeproxy_sync_proxy_rules_service_changes_total 1", "kubernetes_build_info", "process_start_time_seconds",
			`tandem_service_connects_total{namespace="shop",port="t",protocol="TCP",result="established",service="web"}`, `tandem_service_connect_duration_seconds_count{namespace="shop"`,
			"tandem_map_memory_bytes", "tandem_map_entries{map=\"frontends\"} 4", "tandem_proxy_mode{mode=\"ebpf\",reason=\"requested\"} 1", "tandem_capability{feature=\"connect4\",state=\"yes\"} 1",
		},
		"/metrics/slis":        {"process_start_time_seconds"},
		"/healthz":             {"ok"},
		"/proxyMode":           {"ebpf"},
		"/debug/status":        {`"mode":"ebpf","configuredMode":"ebpf","configuredBy":"--proxy-mode"`, `"ready":true`, `"servicePorts":[{"datapaths":["ebpf"],"count":2}]`, `"error":""`},
		"/configz":             {`"mode":"ebpf"`, `"kind":"KubeProxyConfiguration"`},
		"/debug/pprof/cmdline": {"--proxy-mode=ebpf"},
		"/debug/explain?src=127.0.0.1&dst=10.96.0.10:80": {`"verdict":"forward"`, `"kind":"host"`, `"name":"ebpf","carries":true`},
	} {
		code, body, err := n.Get(t.Context(), 10249, path)
		if err != nil || code != http.StatusOK {
			t.Errorf("%s: code %d, error %v", path, code, err)
		}
		for _, text := range want {
			if !strings.Contains(body, text) {
				t.Errorf("%s does not have %s:\n%s", path, text, body)
			}
		}
	}

	first.Terminate(t)
	served("stopped")

	second := start(t, n, dir)
	second.await(t, "second start", second.Says(`adopted=true`))
	served("second start")

	// A third process starts early, and takes over when the second one is killed. What is deleted meanwhile, it serves no more.
	writeManifest(t, dir, "old.yaml", `{apiVersion: v1, kind: Service, metadata: {namespace: shop, name: old}, spec: {clusterIP: 10.96.0.99, ports: [{port: 80}]}}`)
	third := start(t, n, dir)
	third.await(t, "third start", third.Says("Another process serves this cgroup"))
	served("two processes")
	if err := os.Remove(filepath.Join(dir, "old.yaml")); err != nil {
		t.Fatal(err)
	}
	_ = second.Close()
	third.await(t, "third start", third.Says(`adopted=true`))
	served("third start")
	third.await(t, "third start", third.Says(`"Programmed all Services" servicePorts=2 `))
	third.Terminate(t)
	served("stopped again")

	cleanup(t, n)
	for _, to := range []netip.AddrPort{vip4, vip6} {
		if reaches(shell.Sandbox, to, "web")() == nil {
			t.Errorf("%s answers after the cleanup", to)
		}
	}
}

// TestOneFamily: a host without IPv6 is a single-stack node, and the log says so.
func TestOneFamily(t *testing.T) {
	l := lab.NewT(t)
	n := l.Node("node1")
	web, client := serve(t, n.Pod("web")), n.Pod("client")
	if err := n.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0) }); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	writeManifests(t, dir, clusterIPs, web)
	for _, mode := range []string{"ebpf", "iptables"} {
		p := start(t, n, dir, "--proxy-mode="+mode)
		p.synced(t)
		for _, from := range []*lab.Sandbox{client.Sandbox, n.Sandbox} {
			p.await(t, "mode "+mode, reaches(from, vip4, "web"))
		}
		p.await(t, "health", healthy(n))
		if _, body, err := n.Get(t.Context(), 10256, "/livez"); err != nil || !strings.Contains(body, `"IPv4":{`) || strings.Contains(body, "IPv6") {
			t.Errorf("mode %s: /livez answers %s, error %v", mode, body, err)
		}
		if err := p.Says("IPv6 is disabled on this host")(); err != nil {
			t.Error(err)
		}
		p.Terminate(t)
	}
	cleanup(t, n)
}

// TestRefusals: configurations that cannot work end the process at once, with the reason.
func TestRefusals(t *testing.T) {
	l := lab.NewT(t)
	n := l.Node("node1")
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"a kernel that lacks it", []string{"--proxy-mode=ebpf", "--manifests=/", "--ebpf-capability-mask=bpf_syscall=no", "--ebpf-fallback=none"}, "mode ebpf requires bpf_syscall"},
		{"no directory", []string{"--proxy-mode=ebpf", "--manifests=/nowhere"}, "/nowhere"},
		{"no API server", []string{"--proxy-mode=ebpf", "--kubeconfig=/nowhere"}, "/nowhere"},
		{"no cgroup", []string{"--cleanup", "--ebpf-cgroup-root=/nowhere"}, "/nowhere"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := n.Command(context.Background(), os.Args[0], append([]string{"--ebpf-cgroup-root=" + n.CgroupPath()}, tt.args...)...)
			p.Env = append(os.Environ(), asProxy+"=1")
			out, err := p.CombinedOutput()
			if err == nil {
				t.Fatal("no error")
			}
			if !strings.Contains(string(out), tt.want) {
				t.Errorf("says\n%s\nwant %q in it", out, tt.want)
			}
		})
	}
}
