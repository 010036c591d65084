// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/observe/explain"
)

// cluster is a directory of manifests.
const cluster = "../../observe/explain/testdata"

func TestExplainOffline(t *testing.T) {
	configFile := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(configFile, []byte(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: ebpf
detectLocalMode: NodeCIDR
featureGates: {AllowServiceExternalIPs: false}
---
apiVersion: config.tandem-proxy.dev/v1alpha1
kind: TandemConfiguration
strictSourceRanges: true
`), 0o600); err != nil {
		t.Fatal(err)
	}
	const conflict = "is served for shop/web:http"
	for _, test := range []struct {
		args []string
		want []string
		warn string
	}{
		{
			args: []string{"10.244.1.7", "10.96.0.10:80", "--node=node1", "--cluster-cidr=10.244.0.0/16"},
			want: []string{"forward: to one of 2 endpoints", "pod: source address is in pod CIDR 10.244.0.0/16", "10.244.2.10:8080  web-4a  no       no        other-zone"},
			warn: conflict,
		},
		{
			args: []string{"172.18.0.1", "10.96.99.99:80", "--node=node1"},
			want: []string{"reject: no Service has this port", "host: source address is one of this node's"},
		},
		{
			args: []string{"172.18.0.1", "172.18.0.9:30053/udp", "--node=node2", "--local-address=172.18.0.9"},
			want: []string{"outside", "UDP 172.18.0.1 -> 172.18.0.9:30053", "10.244.2.20:5353  near-1  yes"},
			warn: "the manifests have no Node node2",
		},
		{ // pods by the Node's own range
			args: []string{"10.244.2.7", "10.96.0.10:80", "--node=node1", "--config=" + configFile},
			want: []string{"outside: source address is not one of this node's, nor in a pod CIDR"},
		},
		{
			args: []string{"2001:db8::7", "[2001:db8:203:113::9]:80", "--node=node1", "--config=" + configFile},
			want: []string{"drop: loadBalancerSourceRanges do not admit the source"},
		},
		{ // the gate
			args: []string{"10.244.1.7", "203.0.113.20:80", "--node=node1", "--config=" + configFile},
			want: []string{"pass"},
		},
	} {
		t.Run(strings.Join(test.args[:2], " "), func(t *testing.T) {
			a, out, errs := newTestApp(nil)
			if code := a.run(append([]string{"explain", "--manifests", cluster}, test.args...)); code != exitOK {
				t.Fatalf("exit code %d: %s", code, errs)
			}
			for _, want := range test.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("%q is missing in\n%s", want, out)
				}
			}
			if !strings.Contains(errs.String(), test.warn) {
				t.Errorf("warnings %q, want %q", errs, test.warn)
			}
		})
	}

	a, out, _ := newTestApp(nil)
	if code := a.run([]string{"explain", "172.18.0.1", "10.96.0.10:80", "-o", "json", "--manifests", cluster, "--node=node1"}); code != exitOK {
		t.Fatalf("exit code %d", code)
	}
	checkJSON(t, out.Bytes())
}

// What is wrong with the manifests is told, and the rest explained.
func TestExplainBadManifests(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.yaml"), []byte("kind: [\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	a, out, errs := newTestApp(nil)
	if code := a.run([]string{"explain", "10.0.0.1", "10.96.0.10:80", "--manifests", dir, "--node=node1"}); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	if !strings.HasPrefix(out.String(), "pass: ") || !strings.Contains(errs.String(), "tandemctl: warning: File "+dir+"/a.yaml: a.yaml:1: not valid YAML") {
		t.Errorf("%s\n%s", out, errs)
	}
}

func TestExplainServer(t *testing.T) {
	answer := explain.Explanation{Node: "node1", Verdict: "pass", Reason: "no frontend has this address and port"}
	var asked string
	code := http.StatusOK
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = r.URL.Path + " " + r.URL.Query().Encode()
		if code != http.StatusOK {
			http.Error(w, "not now", code)
			return
		}
		_ = json.NewEncoder(w).Encode(answer)
	}))
	defer server.Close()
	address := server.Listener.Addr().String()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	unused := free.Addr().String()
	free.Close()

	another := httptest.NewServer(http.NotFoundHandler()) // of upstream's kube-proxy
	defer another.Close()
	var found []string
	run := func(servers []string, args ...string) (int, string, string) {
		a, out, errs := newTestApp(nil)
		a.servers, a.findServers = servers, func(context.Context) []string { return found }
		c := a.run(append([]string{"explain"}, args...))
		return c, out.String(), errs.String()
	}
	for _, how := range []struct {
		servers []string
		found   []string
		args    []string
	}{
		{servers: []string{unused, address}}, // the second address
		{servers: []string{another.Listener.Addr().String(), address}},
		{servers: []string{unused}, found: []string{address}},
		{servers: []string{another.Listener.Addr().String()}, found: []string{another.Listener.Addr().String(), address}},
		{args: []string{"--server", address}},
		{args: []string{"--server", "http://" + address + "/"}},
	} {
		found = how.found
		c, out, errs := run(how.servers, append(how.args, "[fd00::7]:1", "[fd00::10]:53/udp", "--in-interface=eth0")...)
		if c != exitOK || !strings.HasPrefix(out, "pass: no frontend has this address and port\n") {
			t.Errorf("%+v: exit code %d\n%s%s", how, c, out, errs)
		}
		if want := "/debug/explain device=eth0&dst=%5Bfd00%3A%3A10%5D%3A53&protocol=UDP&src=%5Bfd00%3A%3A7%5D%3A1"; asked != want {
			t.Errorf("asked %q, want %q", asked, want)
		}
	}
	found = []string{address} // of no interest if a server is given
	if c, _, errs := run(nil, "--server", unused, "10.0.0.1", "10.96.0.1:80"); c != exitError || !strings.Contains(errs, unused) {
		t.Errorf("with another server: exit code %d: %s", c, errs)
	}
	found = nil
	if c, out, _ := run(nil, "--server", address, "10.0.0.1", "10.96.0.1:80", "-o", "json"); c != exitOK || !strings.Contains(out, `"verdict": "pass"`) {
		t.Errorf("exit code %d\n%s", c, out)
	}

	for wrong, want := range map[int]string{http.StatusServiceUnavailable: "not now", http.StatusNotFound: "not Tandem"} {
		code = wrong
		if c, _, errs := run(nil, "--server", address, "10.0.0.1", "10.96.0.1:80"); c != exitError || !strings.Contains(errs, want) {
			t.Errorf("with code %d: exit code %d: %s", wrong, c, errs)
		}
	}
	c, _, errs := run([]string{unused}, "10.0.0.1", "10.96.0.1:80")
	if c != exitError || !strings.Contains(errs, "cannot connect to kube-proxy") || !strings.Contains(errs, unused) || !strings.Contains(errs, "--metrics-bind-address") {
		t.Errorf("with no server: exit code %d: %s", c, errs)
	}
}
