// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/sources/backendstates"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

const backendManifests = `apiVersion: v1
kind: Service
metadata: {namespace: shop, name: web}
spec:
  clusterIP: 10.96.0.10
  ports: [{name: http, port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.244.1.1], nodeName: node1}, {addresses: [10.244.1.2], nodeName: node1}]
`

// backendNode is a node with a Service that has two backends, web1 and web2.
type backendNode struct {
	t                       *testing.T
	node                    *lab.Node
	manifests, states, mode string
	proxy                   *lab.Watched
}

// start starts kube-proxy, after it killed the one before.
func (b *backendNode) start() {
	b.t.Helper()
	b.kill()
	b.proxy = startProxy(b.t, b.node, b.manifests, "--proxy-mode="+b.mode, "--cluster-cidr=10.244.0.0/16",
		"--state-dir="+b.states, "--conntrack-max-per-core=0", "--conntrack-min=0")
}

func (b *backendNode) kill() {
	if b.proxy != nil {
		_ = b.proxy.Close()
		b.proxy = nil
	}
}

// run runs tandemctl backend.
func (b *backendNode) run(args ...string) (out string, err error) {
	out, errs, err := runTool(b.t, b.node.Sandbox, append([]string{"backend", args[0], "--state-dir=" + b.states}, args[1:]...)...)
	if err != nil {
		err = fmt.Errorf("%w: %s", err, errs)
	}
	return out, err
}

func (b *backendNode) must(args ...string) string {
	b.t.Helper()
	out, err := b.run(args...)
	if err != nil {
		b.t.Fatalf("tandemctl backend %s: %v", args, err)
	}
	return out
}

// answer says which backends answer 40 new connections; refused for none.
func (b *backendNode) answer() string {
	var names []string
	for range 40 {
		r, err := b.node.Ask(b.t.Context(), "tcp", netip.MustParseAddrPort("10.96.0.10:80"))
		name := r.Server
		if err != nil {
			name = err.Error()
			if strings.Contains(name, "refused") {
				name = "refused"
			}
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

func (b *backendNode) wants(want string) {
	b.t.Helper()
	if got := b.answer(); got != want {
		b.t.Errorf("new connections: %s, want %s", got, want)
	}
}

func (b *backendNode) awaits(want string) {
	b.t.Helper()
	lab.Await(b.t, testPatience, "new connections: "+want, func() error {
		if got := b.answer(); got != want {
			return errors.New(got)
		}
		return nil
	})
}

// isInForce waits until the running process says so of what was kept.
func (b *backendNode) isInForce() {
	b.t.Helper()
	lab.Await(b.t, testPatience, "the next process to have it in force", func() error {
		if out, err := b.run("list"); err != nil || !strings.HasSuffix(out, "  yes\n") {
			return fmt.Errorf("%s, %w", out, err)
		}
		return nil
	})
}

// TestBackend: an operator drains, quarantines and restores backends of a running kube-proxy, which confirms it. The states outlive
// a killed process, and end by themselves.
func TestBackend(t *testing.T) {
	for _, mode := range []string{"ebpf", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			if mode == "ebpf" {
				kernel.NeedsPrograms(t)
			}
			n := lab.NewT(t).Node("node1")
			b := &backendNode{t: t, node: n, manifests: t.TempDir(), states: filepath.Join(t.TempDir(), "states"), mode: mode}
			for _, name := range []string{"web1", "web2"} {
				if _, err := n.Pod(name).ServeTCP(8080); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(filepath.Join(b.manifests, "a.yaml"), []byte(backendManifests), 0o644); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if _, err := removal.Cleanup(t.Context(), n.CgroupPath()); err != nil && mode == "ebpf" {
					t.Error(err)
				}
			})
			b.start()
			b.awaits("web1 web2")
			// Connections succeed a moment before the first sync is done.
			lab.Await(t, testPatience, "the first sync", func() error {
				_, err := n.Fetch(t.Context(), config.MetricsPort, explain.BackendsPath)
				return err
			})

			// Drained.
			out := b.must("drain", "10.244.1.1")
			if !strings.HasPrefix(out, "backend 10.244.1.1 drained\n") || !strings.Contains(out, "shop/web:http  TCP       10.244.1.1:8080  no: maintenance  1\n") {
				t.Errorf("drain says\n%s", out)
			}
			b.wants("web2")
			b.start() // after a kill
			b.wants("web2")
			b.isInForce()
			b.wants("web2")
			if out := b.must("drain", "10.244.1.2:8080", "--service=shop/web", "-o", "json"); !isChange(t, out, func(c *backendChange) bool {
				return c.InForce && c.Service == "shop/web" && len(c.ServicePorts) == 1 && c.ServicePorts[0].Others == 0
			}) {
				t.Errorf("drain says\n%s", out)
			}
			b.wants("refused")
			if out := b.must("list"); strings.Count(out, "\n") != 3 || strings.Count(out, "  yes\n") != 2 {
				t.Errorf("list says\n%s", out)
			}
			b.must("restore", "10.244.1.1")
			b.wants("web1")
			b.must("restore", "10.244.1.2:8080", "--service=shop/web")
			b.wants("web1 web2")

			// Quarantined, for a while.
			b.must("quarantine", "10.244.1.2")
			b.wants("web1")
			soon := fmt.Sprint("--for=", 3*lab.Slower()*time.Second)
			b.must("quarantine", "10.244.1.1", soon)
			b.wants("web1 web2")
			b.awaits("web1")

			// Where another directory is taken for that of kube-proxy, that is said.
			other := "--state-dir=" + t.TempDir()
			if out := b.must("list", other); !strings.HasPrefix(out, "BACKEND") || !strings.HasSuffix(out, "  yes, from another directory\n") {
				t.Errorf("list of another directory says\n%s", out)
			}
			if _, err := b.run("restore", "10.244.1.2", other); err == nil || !strings.Contains(err.Error(), "from another directory than /") {
				t.Errorf("restore in another directory says %v", err)
			}
			if _, err := b.run("quarantine", "10.244.1.2", other, "--for=10m", "--timeout=1s"); err == nil || !strings.Contains(err.Error(), "kube-proxy has not taken over") {
				t.Errorf("quarantine in another directory says %v", err)
			}

			b.must("drain", "10.244.1.2", soon)
			b.awaits("web1 web2")
			lab.Await(t, testPatience, "an empty list", func() error {
				if out := b.must("list"); !strings.HasPrefix(out, "No backend") {
					return errors.New(out)
				}
				return nil
			})

			// Mistakes change nothing.
			for _, test := range []struct {
				args []string
				want string
			}{
				{[]string{"drain", "10.244.9.9"}, "no Service port of this node has a backend 10.244.9.9\n"},
				{[]string{"drain", "10.244.1.1:81"}, "no Service port of this node has a backend 10.244.1.1:81\n"},
				{[]string{"drain", "10.244.1.1", "--service=shop/wep"}, "no Service port of this node has a backend 10.244.1.1 of Service shop/wep\n"},
				{[]string{"drain", "10.244.1.1", "--service=web"}, `service "web" is not NAMESPACE/NAME`},
				{[]string{"drain", "web-1"}, `backend "web-1" is neither an address nor an address and port`},
				{[]string{"drain"}, "accepts 1 arg(s), received 0"},
				{[]string{"quarantine", "10.244.1.1", "--for=-1m"}, "--for -1m0s: want a duration greater than 0"},
				{[]string{"restore", "10.244.1.1"}, " has no state of backend 10.244.1.1; "},
				{[]string{"drain", "10.244.1.1", "--state-dir=" + t.TempDir(), "--timeout=1s"}, "kube-proxy has not taken over"},
			} {
				if out, err := b.run(test.args...); err == nil || !strings.Contains(err.Error(), test.want) {
					t.Errorf("%s: %v, want %q\n%s", test.args, err, test.want, out)
				}
			}
			b.wants("web1 web2")

			// Without a process it is in force with the next one. A file that cannot be read costs nothing.
			b.kill()
			if out := b.must("drain", "10.244.1.2"); !strings.Contains(out, "no kube-proxy serves on this node yet") {
				t.Errorf("drain says\n%s", out)
			}
			b.start()
			b.isInForce()
			b.wants("web1")
			file := filepath.Join(b.states, backendstates.FileName)
			good, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(`{"backends": [{"address": "10.244.1.1", "state": "gone"}]}`), 0o644); err != nil {
				t.Fatal(err)
			}
			b.proxy.Await(t, testPatience, "a complaint", b.proxy.Says("unknown state"))
			b.wants("web1")
			if _, err := b.run("restore", "10.244.1.2"); err == nil || !strings.Contains(err.Error(), file) {
				t.Errorf("with a bad file, restore says %v", err)
			}
			if err := os.WriteFile(file, good, 0o644); err != nil {
				t.Fatal(err)
			}
			b.must("restore", "10.244.1.2")
			b.wants("web1 web2")
		})
	}
}

func isChange(t *testing.T, text string, is func(*backendChange) bool) bool {
	t.Helper()
	var c backendChange
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		t.Error(err)
	}
	return is(&c)
}
