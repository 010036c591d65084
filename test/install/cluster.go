// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	build "github.com/tandem-proxy/tandem/test/image"
	"github.com/tandem-proxy/tandem/test/kubeadm"
	"github.com/tandem-proxy/tandem/test/lab"
)

// source is the main module.
const source = "../.."

// PartsEnv names the directory that hack/kubeadm.sh makes.
const PartsEnv = "TANDEM_KUBEADM"

// The names of images: ours as in the documentation.
const (
	ours  = "registry.internal.example/tandem:v1"
	next  = "registry.internal.example/tandem:v2"
	other = "registry.internal.example/tandem:v3" // whose maps have another layout
	tools = "registry.internal.example/tools:v1"  // this program, as server and client
)

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

const token = "abcdef.0123456789abcdef"

// configuration is kubeadm's. Nodes of this test get their CIDRs of pods from the lab. The limit of
// conntrack is that of the machine, and no file of another network namespace has it.
const configuration = `apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
bootstrapTokens: [{token: ` + token + `}]
localAPIEndpoint: {advertiseAddress: "%[1]s"}
nodeRegistration:
  criSocket: unix:///run/containerd/containerd.sock
  imagePullPolicy: Never
  taints: []
  kubeletExtraArgs: [{name: node-ip, value: "%[1]s,%[2]s"}]
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: %[4]s
networking: {podSubnet: "` + kubeadm.PodSubnet + `", serviceSubnet: "%[3]s"}
controllerManager: {extraArgs: [{name: allocate-node-cidrs, value: "false"}]}
etcd: {local: {extraArgs: [{name: unsafe-no-fsync, value: "true"}]}}
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
seccompDefault: true
failSwapOn: false
imageGCHighThresholdPercent: 100
evictionHard: {nodefs.available: "0%%", imagefs.available: "0%%", nodefs.inodesFree: "0%%"}
---
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
conntrack: {maxPerCore: 0}
`

const joining = `apiVersion: kubeadm.k8s.io/v1beta4
kind: JoinConfiguration
discovery: {bootstrapToken: {apiServerEndpoint: "%[3]s:6443", token: ` + token + `, unsafeSkipCAVerification: true}}
nodeRegistration:
  criSocket: unix:///run/containerd/containerd.sock
  imagePullPolicy: Never
  kubeletExtraArgs: [{name: node-ip, value: "%[1]s,%[2]s"}]
`

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
func (c *cluster) addNode(name string, images []image) {
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

// imageOf is the name that kubeadm has for an image.
func (c *cluster) imageOf(what string) string {
	c.tb.Helper()
	all := c.kubeadm("config", "images", "list", "--kubernetes-version="+c.version)
	for line := range strings.Lines(all) {
		name := strings.TrimSpace(line)
		if base, _, _ := strings.Cut(path.Base(name), ":"); base == what {
			return name
		}
	}
	c.tb.Fatalf("kubeadm knows no image of %s, only\n%s", what, all)
	return ""
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

// load imports images.
func (c *cluster) load(n *node, images []image) {
	c.tb.Helper()
	began := time.Now()
	cmd, err := n.within(c.tb.Context(), "ctr", "-n", "k8s.io", "images", "import", "-")
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	in, out := io.Pipe()
	cmd.Stdin = in
	go func() { out.CloseWithError(save(out, images...)) }()
	if said, err := cmd.CombinedOutput(); err != nil {
		c.tb.Fatalf("import images: %v\n%s", err, said)
	}
	c.tb.Logf("images on %s took %v", n.Name, time.Since(began).Round(time.Second))
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

// server is a Deployment whose pods answer with their names, and its Service.
const server = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      terminationGracePeriodSeconds: 1
      topologySpreadConstraints: [{maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {app: %[1]s}}}]
      containers:
      - name: server
        image: ` + tools + `
        env: [{name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}, {name: TANDEM_LAB_HELPER, value: "$(POD) 8080"}]
        readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: %[1]s}
spec:
  type: NodePort
  ipFamilyPolicy: RequireDualStack
  clusterIP: 10.96.0.%[3]d
  clusterIPs: [10.96.0.%[3]d, "fd00:10:96::%[3]d"]
  selector: {app: %[1]s}
  ports:
  - {name: tcp, port: 80, targetPort: 8080, nodePort: 300%[3]d}
  - {name: udp, port: 80, targetPort: 8080, nodePort: 300%[3]d, protocol: UDP}
`

// The Services: connections are counted at one, and endpoints change of the other. Their number is the
// last one of their ClusterIPs and NodePorts.
const (
	steady   = "steady"
	changing = "changing"

	numberOfSteady   = 80
	numberOfChanging = 81
)

// pod is that of clients.
const pod = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: client}
spec:
  selector: {matchLabels: {app: client}}
  template:
    metadata: {labels: {app: client}}
    spec:
      nodeName: node1
      terminationGracePeriodSeconds: 1
      containers: [{name: client, image: "` + tools + `", env: [{name: TANDEM_LAB_HELPER, value: "client 8080"}]}]
`

// serve deploys servers and clients, and waits until all of the cluster is Ready.
func (c *cluster) serve() {
	c.tb.Helper()
	c.apply(fmt.Sprintf(server, steady, 3, numberOfSteady) + "---" + fmt.Sprintf(server, changing, 2, numberOfChanging) + "---" + pod)
	c.rollout("kube-system", "daemonset/kube-proxy", "deployment/coredns")
	c.rollout("default", "deployment/"+steady, "deployment/"+changing, "deployment/client")
}

// addresses are those of a Service, for clients in the cluster and outside.
func (c *cluster) addresses(number int) (inside, outside []string) {
	for _, n := range c.nodes {
		for _, addr := range []netip.Addr{n.Addr4, n.Addr6} {
			outside = append(outside, netip.AddrPortFrom(addr, uint16(30000+number)).String())
		}
	}
	return []string{fmt.Sprintf("10.96.0.%d:80", number), fmt.Sprintf("[fd00:10:96::%d]:80", number)}, outside
}

// startClients starts those in a pod, on a node and outside.
func (c *cluster) startClients() {
	c.tb.Helper()
	inside, outside := c.addresses(numberOfSteady)
	n := c.nodes[0]
	id := c.kubectl("get", "pods", "--selector=app=client", "-o=jsonpath={.items[0].status.containerStatuses[0].containerID}")
	pid, err := n.run(c.tb.Context(), "bash", "-c", `ctr -n k8s.io tasks ls | while read -r id pid _; do [[ $id != "$0" ]] || echo $pid; done`, strings.TrimPrefix(id, "containerd://"))
	if err != nil {
		c.tb.Fatalf("find the client's pod: %v", err)
	}
	const asPod = `cgroup=$(sed -n s/^0:://p /proc/$0/cgroup) && echo 0 >/sys/fs/cgroup$cgroup/cgroup.procs && exec nsenter --target $0 --net /opt/client`
	pod, err := n.within(c.tb.Context(), "env", asClient+"="+strings.Join(inside, ","), "bash", "-c", asPod, strings.TrimSpace(pid))
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	host, err := n.within(c.tb.Context(), "env", asClient+"="+strings.Join(inside, ","), "/opt/client")
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	far := c.admin.Command(c.tb.Context(), n.file("opt/client"))
	far.Env = []string{asClient + "=" + strings.Join(outside, ",")}
	defer c.counted() // begin when all of them run
	for where, cmd := range map[string]*lab.Cmd{"pod": pod, "host": host, "outside": far} {
		p, err := startClient(where, cmd)
		if err != nil {
			c.tb.Fatalf("start the client %s: %v", where, err)
		}
		c.clients = append(c.clients, p)
	}
}

// stopClients ends those at a place, or all.
func (c *cluster) stopClients(where ...string) {
	c.clients = slices.DeleteFunc(c.clients, func(p *process) bool {
		ends := len(where) == 0 || slices.Contains(where, p.where)
		if ends {
			_ = p.Close()
		}
		return ends
	})
}

// counted is what clients counted since the last call, by where they are.
func (c *cluster) counted() map[string]*counts {
	c.tb.Helper()
	all := map[string]*counts{}
	for _, p := range c.clients {
		counted, err := p.take()
		if err != nil {
			c.tb.Fatalf("%v", err)
		}
		all[p.where] = counted
	}
	return all
}

// follows replaces the endpoints of a Service, and waits until every client gets answers from new
// ones only.
func (c *cluster) follows() {
	c.tb.Helper()
	c.kubectl("rollout", "restart", "deployment/"+changing)
	c.rollout("default", "deployment/"+changing)
	inside, outside := c.addresses(numberOfChanging)
	lab.Await(c.tb, time.Minute, "answers from new endpoints alone", func() error {
		now := c.kubectl("get", "pods", "--selector=app="+changing, "-o=jsonpath={.items[*].metadata.name}")
		for _, p := range c.clients {
			targets := inside
			if p.where == "outside" {
				targets = outside
			}
			for _, to := range targets {
				for range 8 { // as endpoints are chosen at random
					for _, network := range []string{"tcp", "udp"} {
						if server, err := p.server(network, to); err != nil {
							return err
						} else if !strings.Contains(now, server) {
							return fmt.Errorf("%s gets an answer of %s, which is gone; there are %s", p.where, server, now)
						}
					}
				}
			}
		}
		return nil
	})
}

// images are kubeadm's, and ours.
func (c *cluster) images() []image {
	c.tb.Helper()
	pack := func(name string, content map[string]string) layer {
		l, err := newLayer(filepath.Join(c.dir, name+".tar"), content)
		if err != nil {
			c.tb.Fatalf("make an image: %v", err)
		}
		return l
	}
	program := func(name string) map[string]string {
		return map[string]string{"usr/local/bin/" + name: filepath.Join(c.parts, "bin", name)}
	}
	base := pack("base", map[string]string{"": build.RootFS(c.tb, source)})
	programs := func(version string, flags ...string) string {
		dir := filepath.Join(c.dir, "programs-"+version)
		build.Build(c.tb, source, dir, append(flags, "-ldflags=-s -w -X main.version="+version)...)
		return dir
	}
	ofOurs := programs("v1")
	var all []image
	for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd", "coredns", "pause"} {
		all = append(all, image{c.imageOf(name), []string{"/usr/local/bin/" + name}, []layer{pack(name, program(name))}})
	}
	wrapper := pack("wrapper", map[string]string{"usr/local/bin/iptables-wrapper": filepath.Join(ofOurs, "iptables-wrapper")})
	all = append(all, image{c.imageOf("kube-proxy"), []string{"/usr/local/bin/kube-proxy"}, []layer{base, wrapper, pack("kube-proxy", program("kube-proxy"))}})
	for name, dir := range map[string]string{ours: ofOurs, next: programs("v2"), other: programs("v3", "-overlay="+c.otherLayout())} {
		all = append(all, image{name, []string{"/usr/local/bin/kube-proxy"}, []layer{base, pack(strings.ReplaceAll(path.Base(name), ":", "-"), map[string]string{"usr/local/bin": dir})}})
	}
	self, err := os.Executable()
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	all = append(all, image{tools, []string{"/client"}, []layer{pack("tools", map[string]string{"client": self})}})
	return all
}

// otherLayout has go build take another version of the maps' layout.
func (c *cluster) otherLayout() (overlay string) {
	c.tb.Helper()
	const file = source + "/proxier/ebpf/lbmap/enums.go"
	path, err := filepath.Abs(file)
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	changed := regexp.MustCompile(`LayoutVersion = \d+`).ReplaceAll(text, []byte("LayoutVersion = 1000"))
	if bytes.Equal(changed, text) {
		c.tb.Fatalf("%s has no LayoutVersion", file)
	}
	replacement, overlay := filepath.Join(c.dir, "enums.go"), filepath.Join(c.dir, "overlay.json")
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{path: replacement}})
	if err == nil {
		err = errors.Join(os.WriteFile(replacement, changed, 0o644), os.WriteFile(overlay, replace, 0o644))
	}
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	return overlay
}
