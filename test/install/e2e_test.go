// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/deploy/image"
	"github.com/tandem-proxy/tandem/test/lab"
)

// E2EEnv names the directory that hack/e2e.sh makes.
const E2EEnv = "TANDEM_E2E"

// TestE2E runs Kubernetes' own end-to-end tests of what a kube-proxy does, with this project's on a cluster
// that kubeadm made. One that fails runs again with upstream's kube-proxy: if it fails there as well, the
// cluster lacks what it needs, unless it has to pass.
func TestE2E(t *testing.T) {
	e := &e2e{parts: os.Getenv(E2EEnv)}
	if e.parts == "" {
		lab.SkipUnnamed(t, E2EEnv, fmt.Errorf("%s is not set: it has to be the directory that hack/e2e.sh makes and prints", E2EEnv))
	}
	p, err := readPage(source + "/docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	// Tests of traffic distribution want three zones.
	e.install = &install{cluster: newCluster(t, directory(t), "node1", "node2", "node3"), page: p}
	for i, n := range e.nodes {
		e.kubectl("label", "node", n.Name, fmt.Sprintf("topology.kubernetes.io/zone=zone%d", i+1))
	}
	e.addImages()
	e.serve()
	e.upstream()
	e.patch()
	e.hostPorts()
	e.serviceLB()
	specs := e.list()
	t.Logf("%d tests", len(specs))
	var failed []spec
	for _, s := range e.play("tandem", specs) {
		if s.State != "passed" && e2ePass.MatchString(s.name()) {
			t.Errorf("it has to pass: %s: %s: %s", s.name(), s.State, s.Failure.Message)
		}
		switch s.State {
		case "passed":
			t.Logf("passed in %3.0f s: %s", s.RunTime.Seconds(), s.name())
		case "skipped":
			t.Logf("skipped: %s: %s", s.name(), s.Failure.Message)
		default:
			failed = append(failed, s)
		}
	}
	if len(failed) == 0 {
		return
	}
	e.rollBack()
	for i, s := range e.play("upstream", failed) {
		about := fmt.Sprintf("%s: %s\n%s", s.name(), failed[i].State, failed[i].Failure.Message)
		switch s.State {
		case "passed":
			t.Errorf("with upstream's kube-proxy it passes: %s", about)
		case "failed", "timedout":
			t.Logf("with upstream's kube-proxy it fails, too: %s\nand with upstream's: %s", about, s.Failure.Message)
		default:
			t.Errorf("%s, and with upstream's kube-proxy it is %s: %s", about, s.State, s.Failure.Message)
		}
	}
}

// e2e runs upstream's tests.
type e2e struct {
	*install
	parts string // of hack/e2e.sh
}

// spec is what ginkgo reports of a test.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeType            string
	LeafNodeText            string
	State                   string
	RunTime                 time.Duration
	Failure                 struct{ Message string }
}

func (s *spec) name() string {
	return strings.Join(append(slices.Clone(s.ContainerHierarchyTexts), s.LeafNodeText), " ")
}

// e2eTests are those whose subject a kube-proxy has a part in.
var e2eTests = regexp.MustCompile(`^\[sig-network\] (Services|LoadBalancers|Networking|HostPort|KubeProxy|Conntrack|Connectivity Pod Lifecycle|EndpointSlice|Endpoints|DNS|Proxy|Traffic Distribution|\[Feature:Traffic Distribution\]|Service endpoints latency|Internal|Netpol)`)

// e2eWithout need what this cluster has not.
var e2eWithout = regexp.MustCompile(`\[Disruptive\]|\[Alpha\]|\[Feature:(SCTPConnectivity|NetworkPolicy|Networking-Performance|Networking-IPv4|Networking-DNS|Networking-IPv6|Example|NEG|Ingress|ClusterSizeAutoscaling)` +
	`|FeatureGate:|via ssh|in different node pools|ServiceCIDR|should resolve DNS of partial|externalName|Netpol` +
	// One waits for a finalizer; ServiceLB sets none, as there is nothing to be cleaned up. Others want an address for a Service with
	// externalTrafficPolicy Local before it has endpoints; ServiceLB advertises nodes with endpoints, as K3s does. And one wants the
	// address of a node to lead to endpoints on others, with that policy.
	`|load balancer cleanup finalizer|LoadBalancers ExternalTrafficPolicy: Local|switch session affinity for LoadBalancer service with Local`)

// e2ePass have to pass with this project, whatever they do with upstream's kube-proxy: on a network that
// masquerades nothing it fails the one for clients on other nodes.
var e2ePass = regexp.MustCompile(`Services should fallback to local terminating endpoints when there are no ready endpoints with externalTrafficPolicy=Local`)

// hostPorts has this project serve hostPorts, as docs/hostport.md says, and takes the portmap plugin away from the CNI.
func (e *e2e) hostPorts() {
	e.tb.Helper()
	for _, n := range e.nodes {
		without := strings.Replace(networkFor(n.Node), ",\n    {\"type\": \"portmap\", \"capabilities\": {\"portMappings\": true}}", "", 1)
		if strings.Contains(without, "portmap") {
			e.tb.Fatalf("the configuration of the CNI still has portmap:\n%s", without)
		}
		if err := n.write(networkFile, without); err != nil {
			e.tb.Fatalf("%v", err)
		}
	}
	e.run("kubectl apply -f deploy/kubeadm/opt-outs.yaml")
	e.run(`kubectl -n kube-system patch daemonset kube-proxy --type=json -p '[{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--host-port"}]'`)
	e.rollout("kube-system", "daemonset/kube-proxy")
	e.serves("ebpf")
}

// serviceLB has nodes stand in for a cloud's load balancer.
func (e *e2e) serviceLB() {
	e.tb.Helper()
	p, err := readPage(source + "/docs/servicelb.md")
	if err != nil {
		e.tb.Fatalf("%v", err)
	}
	i := *e.install
	i.page = p
	i.follow("Turn it on", 1)
	e.rollout("kube-system", "deployment/tandem-kube-proxy-servicelb")
}

// list asks for all tests, and runs none.
func (e *e2e) list() (list []spec) {
	e.tb.Helper()
	all, err := e.ginkgo("list", "--ginkgo.dry-run", `--ginkgo.focus=\[sig-network\]`)
	if err != nil {
		e.tb.Fatalf("%v", err)
	}
	for _, s := range all {
		if s.LeafNodeType == "It" && e2eTests.MatchString(s.name()) && !e2eWithout.MatchString(s.name()) {
			list = append(list, s)
		}
	}
	if !slices.ContainsFunc(list, func(s spec) bool { return e2ePass.MatchString(s.name()) }) {
		e.tb.Errorf("there is none that has to pass: %s", e2ePass)
	}
	if chosen := os.Getenv("TANDEM_E2E_FOCUS"); chosen != "" {
		only := regexp.MustCompile(chosen)
		list = slices.DeleteFunc(list, func(s spec) bool { return !only.MatchString(s.name()) })
	}
	if len(list) == 0 {
		e.tb.Fatalf("there are no tests")
	}
	return list
}

// e2eAtOnce is how many tests run at a time: they wait most of theirs.
const e2eAtOnce = 6

// play runs tests with a kube-proxy, and returns the results in the same order. Serial ones run alone.
func (e *e2e) play(with string, specs []spec) []spec {
	e.tb.Helper()
	var shares [e2eAtOnce][]string
	var alone []string
	for i, s := range specs {
		if strings.Contains(s.name(), "[Serial]") || strings.Contains(s.name(), "LoadBalancers") { // these want the same ports of the nodes
			alone = append(alone, s.name())
		} else {
			shares[i%e2eAtOnce] = append(shares[i%e2eAtOnce], s.name())
		}
	}
	results := map[string]spec{}
	var broken error
	var mu sync.Mutex
	run := func(report string, names []string) {
		if len(names) == 0 {
			return
		}
		for i, name := range names {
			names[i] = regexp.QuoteMeta(name)
		}
		got, err := e.ginkgo(with+"-"+report, "--ginkgo.focus=("+strings.Join(names, "|")+")$") // of the suite's name and a test's
		mu.Lock()
		defer mu.Unlock()
		broken = errors.Join(broken, err)
		for _, s := range got {
			if s.LeafNodeType == "It" && s.State != "skipped" || s.Failure.Message != "" {
				results[s.name()] = s
			}
		}
	}
	var wg sync.WaitGroup
	for i, names := range shares {
		wg.Go(func() { run(fmt.Sprintf("share%d", i), names) })
	}
	wg.Wait()
	run("alone", alone)
	if broken != nil { // tests that were not run are errors below
		e.tb.Errorf("%v", broken)
	}
	var list []spec
	for _, s := range specs {
		got, ok := results[s.name()]
		if !ok {
			got = s
			got.State, got.Failure.Message = "not run", "it is in no report"
		}
		list = append(list, got)
	}
	return list
}

// ginkgo runs the program outside the cluster, and reads its report. What tests print is in a file, in the directory
// that TANDEM_E2E_LOGS names if it is to be kept.
func (e *e2e) ginkgo(report string, args ...string) (specs []spec, err error) {
	file := filepath.Join(e.dir, report+".json")
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.tb.Context()), time.Hour)
	defer cancel()
	cmd := e.admin.Command(ctx, filepath.Join(e.parts, "bin/e2e.test"), append(args,
		"--kubeconfig="+e.nodes[0].file("etc/kubernetes/admin.conf"), "--provider=skeleton", fmt.Sprintf("--num-nodes=%d", len(e.nodes)),
		"--kubectl-path="+filepath.Join(e.cluster.parts, "bin/kubectl"), "--ginkgo.json-report="+file, "--ginkgo.no-color", "--ginkgo.timeout=1h",
		"--dump-logs-on-failure=false")...)
	cmd.Dir, cmd.Env = e.dir, append(os.Environ(), "HOME="+e.dir)
	log, err := os.Create(filepath.Join(cmp.Or(os.Getenv("TANDEM_E2E_LOGS"), e.dir), report+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	err = cmd.Run()
	if _, failed := errors.AsType[*exec.ExitError](err); failed {
		err = nil // as it does if a test fails; the report tells
	}
	var reports []struct{ SpecReports []spec }
	text, readErr := os.ReadFile(file)
	if readErr == nil {
		readErr = json.Unmarshal(text, &reports)
	}
	if readErr != nil {
		said, _ := os.ReadFile(log.Name())
		return nil, fmt.Errorf("run upstream's tests: %w\n%s", errors.Join(err, readErr), said[max(0, len(said)-4000):])
	}
	for _, r := range reports {
		specs = append(specs, r.SpecReports...)
	}
	return specs, err
}

// addImages gives nodes those that pods of the tests run.
func (e *e2e) addImages() {
	e.tb.Helper()
	out, err := e.admin.Command(e.tb.Context(), filepath.Join(e.parts, "bin/e2e.test"), "--list-images").Output()
	if err != nil {
		e.tb.Fatalf("ask for images: %v", err)
	}
	pack := func(name string, content map[string]string) image.Layer { return e.layer("e2e-"+name, content) }
	agnhost := []image.Layer{pack("root", map[string]string{"": filepath.Join(e.parts, "root")}), pack("agnhost", map[string]string{
		"agnhost": filepath.Join(e.parts, "bin/agnhost"), "coredns": filepath.Join(e.cluster.parts, "bin/coredns"),
	})}
	pause := []image.Layer{pack("pause", map[string]string{"usr/local/bin/pause": filepath.Join(e.cluster.parts, "bin/pause")})}
	tables := []image.Layer{pack("iptables", map[string]string{"": filepath.Join(e.cluster.parts, "root")})}
	var images []image.Named
	add := func(name string, entrypoint []string, layers ...image.Layer) {
		images = append(images, named(name, entrypoint, layers...))
	}
	for name := range strings.Lines(string(out)) {
		name = strings.TrimSpace(name)
		switch base, _, _ := strings.Cut(path.Base(name), ":"); base {
		case "agnhost":
			add(name, []string{"/bin/sh", "-c", `exec /agnhost "${@:-pause}"`, "agnhost"}, agnhost...)
		case "glibc-dns-testing", "busybox": // their pods name a command
			add(name, []string{"/bin/sh"}, agnhost[0])
		case "distroless-iptables": // likewise, with iptables and conntrack
			add(name, []string{"/bin/sh"}, tables...)
		case "regression-issue-74839":
			add(name, []string{"/" + base}, pack(base, map[string]string{base: filepath.Join(e.parts, "bin", base)}))
		case "pause":
			add(name, []string{"/usr/local/bin/pause"}, pause...)
		}
	}
	if len(images) == 0 {
		e.tb.Fatalf("no image of agnhost is among\n%s", out)
	}
	slices.SortFunc(images, func(a, b image.Named) int { return cmp.Compare(a.Name, b.Name) })
	for _, n := range e.nodes {
		e.load(n, images)
	}
}
