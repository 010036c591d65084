// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/tandem-proxy/tandem/deploy/image"
	"github.com/tandem-proxy/tandem/test/lab"
)

// source is the main module.
const source = "../.."

// PartsEnv names the directory that hack/kubeadm.sh makes.
const PartsEnv = "TANDEM_KUBEADM"

// cluster is what kubeadm made.
type cluster struct {
	top     lab.TB // the whole test, for what lives as long
	tb      lab.TB // its part that runs
	lab     *lab.Lab
	parts   string
	version string // of Kubernetes' programs
	dir     string
	nodes   []*node
	admin   *lab.Client // where kubectl runs, outside
	clients []*process
}

// newCluster returns when its nodes are Ready.
func newCluster(tb lab.TB, dir string, names ...string) *cluster {
	tb.Helper()
	c := &cluster{top: tb, tb: tb, dir: dir, parts: os.Getenv(PartsEnv)}
	if c.parts == "" {
		lab.SkipUnnamed(tb, PartsEnv, fmt.Errorf("%s is not set: it has to be the directory that hack/kubeadm.sh makes and prints", PartsEnv))
	}
	// The commands of the documentation refer to files of the repository.
	deploy, err := filepath.Abs(source + "/deploy")
	if err == nil {
		err = os.Symlink(deploy, filepath.Join(dir, "deploy"))
	}
	// An earlier version of the chart.
	var charts string
	if err == nil {
		charts, err = filepath.Abs(source + "/test/deploy/testdata")
	}
	if err == nil {
		err = os.Symlink(charts, filepath.Join(dir, "charts"))
	}
	if err != nil {
		tb.Fatalf("%v", err)
	}
	c.lab = lab.NewT(tb)
	c.admin = c.lab.Client("admin")
	c.version = strings.TrimSpace(c.kubeadm("version", "--output=short"))
	images := c.images()
	for _, name := range names {
		c.addNode(name, images)
	}
	tb.Cleanup(func() {
		if tb.Failed() {
			c.dump()
		}
	})
	for _, n := range c.nodes {
		c.kubectl("wait", "--for=condition=Ready", "--timeout=180s", "node/"+n.Name)
	}
	return c
}

// addNode has kubeadm make the cluster with its first node, and others join.
func (c *cluster) addNode(name string, images []image.Named) {
	c.tb.Helper()
	n, err := newNode(c.lab, name, c.parts, c.dir, c.imageOf("pause"))
	if err != nil {
		c.tb.Fatalf("add node: %v", err)
	}
	c.nodes = append(c.nodes, n)
	command, config := "join", fmt.Sprintf(joining, n.Addr4, n.Addr6, c.nodes[0].Addr4)
	if len(c.nodes) == 1 {
		services := fmt.Sprintf("%s,%s", lab.ServicePrefix4, lab.ServicePrefix6)
		command, config = "init", fmt.Sprintf(configuration, n.Addr4, n.Addr6, services, c.version)
	}
	if err := n.write("etc/kubeadm.yaml", config); err != nil {
		c.tb.Fatalf("%v", err)
	}
	n.start(c.tb)
	c.load(n, images)
	began := time.Now()
	if _, err := n.run(c.tb.Context(), "kubeadm", command, "--config=/etc/kubeadm.yaml", "--ignore-preflight-errors=all"); err != nil {
		c.tb.Fatalf("%v\n%s", err, n.logs())
	}
	c.tb.Logf("kubeadm %s on %s took %v", command, name, time.Since(began).Round(time.Second))
}

// dump logs what the cluster is like.
func (c *cluster) dump() {
	for _, command := range []string{
		"kubectl get pods -A -o wide", "kubectl get events -A --sort-by=.lastTimestamp | tail -n 30",
		"kubectl -n kube-system logs -l k8s-app=kube-proxy --prefix --tail=40", "kubectl -n kube-system logs -l k8s-app=kube-dns --tail=10",
	} {
		out, err := c.shell(command)
		c.tb.Logf("%s: %v\n%s", command, err, out)
	}
	for _, n := range c.nodes {
		c.tb.Logf("%s", n.logs())
	}
}

// logs are the ends of those of the node.
func (n *node) logs() string {
	var b strings.Builder
	for _, name := range []string{"containerd.log", "kubelet.log"} {
		text, _ := os.ReadFile(n.file("var/log/" + name))
		fmt.Fprintf(&b, "%s of %s:\n%s\n", name, n.Name, text[max(0, len(text)-4000):])
	}
	return b.String()
}

// kubeadm runs what needs no cluster.
func (c *cluster) kubeadm(args ...string) string {
	c.tb.Helper()
	out, err := exec.Command(filepath.Join(c.parts, "bin/kubeadm"), args...).Output()
	if err != nil {
		c.tb.Fatalf("kubeadm %s: %v", strings.Join(args, " "), err)
	}
	return string(out)
}

// shell runs commands as an administrator does, outside the cluster, and returns what they say.
func (c *cluster) shell(commands string) (string, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.tb.Context()), 2*time.Minute)
	defer cancel()
	cmd := c.admin.Command(ctx, "bash", "-e", "-c", commands)
	cmd.Dir = c.dir
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.nodes[0].file("etc/kubernetes/admin.conf"), "PATH="+filepath.Join(c.parts, "bin")+":"+os.Getenv("PATH"), "HOME="+c.dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s\n%w\n%s", commands, err, out)
	}
	return string(out), err
}

func (c *cluster) kubectl(args ...string) string {
	c.tb.Helper()
	out, err := c.shell("kubectl '" + strings.Join(args, "' '") + "'")
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	return out
}

// rollout waits until objects are rolled out.
func (c *cluster) rollout(namespace string, names ...string) {
	c.tb.Helper()
	for _, name := range names {
		c.kubectl("-n", namespace, "rollout", "status", "--timeout=90s", name)
	}
}

// apply creates objects.
func (c *cluster) apply(manifest string) {
	c.tb.Helper()
	file := filepath.Join(c.dir, "objects.yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o644); err != nil {
		c.tb.Fatalf("%v", err)
	}
	c.kubectl("apply", "-f", file)
}
