// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"k8s.io/component-base/cli"

	kubeproxy "github.com/tandem-proxy/tandem/cmd/kube-proxy/app"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// asProgram makes a copy of the test program a real one: tests also run on
// machines that have no compiler.
const asProgram = "TANDEM_TEST_AS"

func TestMain(m *testing.M) {
	switch os.Getenv(asProgram) {
	case "kube-proxy":
		os.Exit(cli.Run(kubeproxy.NewCommand()))
	case "tandemctl":
		main()
	}
	os.Exit(m.Run())
}

// program prepares a copy inside a sandbox, whose process has the program's name.
func program(t *testing.T, name string, in *lab.Sandbox, args ...string) *lab.Cmd {
	path := filepath.Join(t.TempDir(), name)
	executable, err := os.Executable()
	if err == nil {
		err = os.Symlink(executable, path)
	}
	if err != nil {
		t.Fatal(err)
	}
	c := in.Command(t.Context(), path, args...)
	// The race detector would wait a second at the end of each.
	c.Env = append(os.Environ(), asProgram+"="+name, "GORACE=atexit_sleep_ms=0")
	return c
}

// runTool runs tandemctl in a sandbox.
func runTool(t *testing.T, in *lab.Sandbox, args ...string) (out, errs string, err error) {
	t.Helper()
	var o, e bytes.Buffer
	c := program(t, "tandemctl", in, args...)
	c.Stdout, c.Stderr = &o, &e
	err = c.Run()
	return o.String(), e.String(), err
}

// startProxy starts kube-proxy on a node, with these manifests.
func startProxy(t *testing.T, on *lab.Node, manifests string, flags ...string) *lab.Watched {
	t.Helper()
	flags = append([]string{"--manifests=" + manifests, "--hostname-override=" + on.Name, "--ebpf-cgroup-root=" + on.CgroupPath()}, flags...)
	p := lab.Watch(program(t, "kube-proxy", on.Sandbox, flags...))
	p.Begin(t)
	return p
}

const explainManifests = `apiVersion: v1
kind: Node
metadata: {name: node1}
spec: {podCIDRs: [10.244.1.0/24, "fd00:10:244:1::/64"]}
status: {addresses: [{type: InternalIP, address: 172.18.0.1}]}
---
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: {name: kubernetes}
spec: {cidrs: [10.96.0.0/16]}
---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: web}
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  ports: [{name: http, port: 80, nodePort: 30080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.244.1.1], nodeName: node1}]
`

// TestExplainOnNode asks the real kube-proxy, which learns of its node from
// manifests and the kernel. Its metrics server is at an address of the node
// and another port than the default one, so the tool has to find it.
func TestExplainOnNode(t *testing.T) {
	kernel.NeedsPrograms(t)
	l := lab.NewT(t)
	n := l.Node("node1")
	pod := n.Pod("web")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(explainManifests), 0o644); err != nil {
		t.Fatal(err)
	}
	tool := func(in *lab.Sandbox, args ...string) (out, errs string, err error) {
		return runTool(t, in, append([]string{"explain"}, args...)...)
	}
	ask := func(source, destination string) (*explain.Explanation, error) {
		out, errs, err := tool(n.Sandbox, source, destination, "-o", "json")
		if err != nil {
			return nil, fmt.Errorf("%w: %s", err, errs)
		}
		var e explain.Explanation
		return &e, json.Unmarshal([]byte(out), &e)
	}
	// await asks until the answer is that one: verdict, origin and frontend.
	await := func(source, destination, want string) *explain.Explanation {
		t.Helper()
		got := ""
		for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
			e, err := ask(source, destination)
			if err != nil {
				got = err.Error()
				continue
			}
			kind := "none"
			if e.Frontend != nil {
				kind = e.Frontend.Kind
			}
			if got = fmt.Sprint(e.Verdict, " ", e.Origin.Kind, " ", kind); got == want {
				return e
			}
		}
		t.Fatalf("%s to %s: %s, want %s", source, destination, got, want)
		return nil
	}

	if _, errs, err := tool(n.Sandbox, "10.244.1.1", "10.96.0.10:80"); err == nil || !strings.Contains(errs, "cannot connect to kube-proxy") {
		t.Errorf("before it runs: %v, %s", err, errs)
	}
	t.Cleanup(func() {
		if _, err := removal.Cleanup(t.Context(), n.CgroupPath()); err != nil {
			t.Error(err)
		}
	})
	startProxy(t, n, dir, "--proxy-mode=ebpf", "--detect-local-mode=NodeCIDR", "--metrics-bind-address=172.18.0.1:20249")

	e := await("10.244.1.1", "10.96.0.10:80", "forward pod ClusterIP")
	if len(e.Tiers) != 1 || e.Tiers[0].Name != "ebpf" || !e.Tiers[0].Carries {
		t.Errorf("tiers %+v", e.Tiers)
	}
	if len(e.Endpoints) != 1 || !e.Endpoints[0].Hairpin || !e.Endpoints[0].OnNode {
		t.Errorf("endpoints %+v", e.Endpoints)
	}
	await("172.18.0.1", "172.18.0.1:30080", "forward host NodePort")
	await("127.0.0.1", "127.0.0.1:30080", "forward host NodePort")
	await("198.51.100.1", "10.96.0.10:80", "forward outside ClusterIP")
	await("172.18.0.1", "10.96.0.11:80", "reject host none")
	await("172.18.0.1", "192.0.2.1:30080", "pass host none")

	// The node gets an address, and loses it again.
	eth0, err := n.Netlink().LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	added, err := netlink.ParseAddr("192.0.2.1/32")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Netlink().AddrAdd(eth0, added); err != nil {
		t.Fatal(err)
	}
	await("192.0.2.1", "192.0.2.1:30080", "forward host NodePort")
	if err := n.Netlink().AddrDel(eth0, added); err != nil {
		t.Fatal(err)
	}
	await("192.0.2.1", "192.0.2.1:30080", "pass outside none")

	// The text, and nothing of it for others.
	out, errs, err := tool(n.Sandbox, "10.244.1.1", "10.96.0.10:80")
	if err != nil || !strings.HasPrefix(out, "forward: ") {
		t.Errorf("%v\n%s%s", err, out, errs)
	}
	t.Logf("\n%s", out)
	if _, errs, err := tool(pod.Sandbox, "10.244.1.1", "10.96.0.10:80", "--server=172.18.0.1:20249"); err == nil || !strings.Contains(errs, "answered on the node itself") {
		t.Errorf("from a pod: %v, %s", err, errs)
	}
}

// TestLeftToAnother: beside another kube-proxy, services and explain say what is left to it although it is of the kinds
// that this proxy serves: SCTP, and what does not fit.
func TestLeftToAnother(t *testing.T) {
	kernel.NeedsPrograms(t)
	n := lab.NewT(t).Node("node1")
	dir := t.TempDir()
	manifests := strings.Replace(explainManifests, "nodePort: 30080}", "nodePort: 30080}, {name: signals, port: 80, protocol: SCTP, nodePort: 30081}", 1) + `---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: z}
spec: {clusterIP: 10.96.0.99, ports: [{port: 80}]}
`
	if err := os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(manifests), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := removal.Cleanup(t.Context(), n.CgroupPath()); err != nil {
			t.Error(err)
		}
	})
	p := startProxy(t, n, dir, "--proxy-mode=ebpf", "--coexist=socket-lb", "--ebpf-max-frontends=2")
	p.Await(t, testPatience, "the first sync", p.Says(`"Programmed all Services"`))
	out, errs, err := runTool(t, n.Sandbox, "services", "--cgroup-root="+n.CgroupPath())
	if err != nil {
		t.Fatalf("%v\n%s", err, errs)
	}
	t.Logf("\n%s", out)
	const sctp, full = "the eBPF datapath does not support SCTP", "frontends full"
	for address, want := range map[string]string{"10.96.0.10:80": sctp, "0.0.0.0:30081": sctp, "10.96.0.99:80": full} {
		found := false
		for line := range strings.Lines(out) {
			found = found || strings.Contains(line, address) && strings.Contains(line, "foreign") && strings.Contains(line, want)
		}
		if !found {
			t.Errorf("services has no line that leaves %s to foreign: %s", address, want)
		}
	}
	for to, want := range map[string]string{"10.96.0.10:80/sctp": sctp, "10.96.0.99:80": full} {
		if out, errs, err := runTool(t, n.Sandbox, "explain", "172.18.0.1", to); err != nil || !strings.Contains(out, "foreign") || !strings.Contains(out, want) {
			t.Errorf("explain %s: %v\n%s%s", to, err, out, errs)
		}
	}
}
