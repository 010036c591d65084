// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package image runs kube-proxy on real traffic as a container runtime would: on the file
// system of the image, with the mounts and capabilities of manifests, and nothing else of
// the node.
package image

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(asContainer); text != "" {
		fmt.Fprintln(os.Stderr, "container:", enter(text))
		os.Exit(1)
	}
	lab.Main()
	os.Exit(m.Run())
}

// layers are those of the image: our programs, and what they need. The latter is kept, as
// it is made of packages that are fetched.
func layers(t *testing.T) []string {
	t.Helper()
	for _, tool := range []string{"apt-get", "dpkg-deb", "go"} {
		if _, err := exec.LookPath(tool); err != nil {
			lab.SkipOrFail(t, fmt.Errorf("%w, which makes the image", err))
		}
	}
	const script = "../../deploy/image/rootfs.sh"
	text, err := os.ReadFile(script)
	if err != nil {
		t.Fatal(err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	base := filepath.Join(cache, "tandem", fmt.Sprintf("image-%s-%.6x", runtime.GOARCH, sha256.Sum256(text)))
	if _, err := os.Stat(base); err != nil {
		if err := os.MkdirAll(filepath.Dir(base), 0o755); err != nil {
			t.Fatal(err)
		}
		temp, err := os.MkdirTemp(filepath.Dir(base), "image-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(temp) })
		if out, err := exec.Command(script, filepath.Join(temp, "root"), runtime.GOARCH).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
		// Another run may have been faster.
		if err := os.Rename(filepath.Join(temp, "root"), base); err != nil && !errors.Is(err, syscall.ENOTEMPTY) && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
	top := t.TempDir()
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", filepath.Join(top, "usr/local/bin")+"/", "./cmd/...", "./deploy/image/iptables-wrapper")
	build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return []string{top, base}
}

// cluster is a node with an endpoint here, one elsewhere, a client in a pod, one outside,
// and an API server that the node's own address leads to.
type cluster struct {
	node                *lab.Node
	here, there, client *lab.Pod
	far                 *lab.Client
	api                 *fakeapi.API
	layers              []string
	authority           []byte // of the API server's certificate
	dir                 string // of what the node has: lock, configuration, token

	mu      sync.Mutex
	refused []string // requests that kubeadm's RBAC does not allow
}

const (
	serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"
	token          = "a-token-of-the-service-account"
	apiPort        = 6443
	nodePort       = 30080
	podPort        = 8080
)

var (
	vip4 = netip.MustParseAddrPort("10.96.0.10:80")
	vip6 = netip.MustParseAddrPort("[fd00:10:96::10]:80")
)

func newCluster(t *testing.T) *cluster {
	t.Helper()
	image := layers(t)
	l := lab.NewT(t, lab.Options{Pause: true})
	n := l.Node("node1")
	c := &cluster{
		node: n, here: serve(t, n.Pod("here")), there: serve(t, l.Node("node2").Pod("there")),
		client: n.Pod("client"), far: l.Client("far"), layers: image, dir: t.TempDir(), api: fakeapi.New(),
	}
	c.api.Put(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}, Status: v1.NodeStatus{Addresses: []v1.NodeAddress{
		{Type: v1.NodeInternalIP, Address: n.Addr4.String()}, {Type: v1.NodeInternalIP, Address: n.Addr6.String()},
	}}})
	c.api.Put(&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: v1.ServiceSpec{
		Type: v1.ServiceTypeNodePort, ClusterIP: vip4.Addr().String(), ClusterIPs: []string{vip4.Addr().String(), vip6.Addr().String()},
		Ports: []v1.ServicePort{{Name: "t", Port: 80, NodePort: nodePort, Protocol: v1.ProtocolTCP}, {Name: "u", Port: 80, NodePort: nodePort, Protocol: v1.ProtocolUDP}},
	}})
	c.endpoints(c.here, c.there)
	c.serveAPI(t)
	return c
}

// endpoints are now those pods.
func (c *cluster) endpoints(pods ...*lab.Pod) {
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: "web-" + strings.ToLower(string(family)), Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
			AddressType: family,
			Ports: []discoveryv1.EndpointPort{
				{Name: ptr.To("t"), Port: ptr.To[int32](podPort), Protocol: ptr.To(v1.ProtocolTCP)},
				{Name: ptr.To("u"), Port: ptr.To[int32](podPort), Protocol: ptr.To(v1.ProtocolUDP)},
			},
		}
		for _, p := range pods {
			addr := p.Addr4
			if family == discoveryv1.AddressTypeIPv6 {
				addr = p.Addr6
			}
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{addr.String()}, NodeName: &p.Node.Name})
		}
		c.api.Put(slice)
	}
}

func serve(t *testing.T, p *lab.Pod) *lab.Pod {
	t.Helper()
	for _, listen := range []func(uint16) (*lab.Server, error){p.ServeTCP, p.ServeUDP} {
		if _, err := listen(podPort); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func (c *cluster) serveAPI(t *testing.T) {
	t.Helper()
	var listener net.Listener
	if err := c.node.Do(func() (err error) {
		listener, err = net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", apiPort))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !allowed(r) {
			c.mu.Lock()
			c.refused = append(c.refused, r.Method+" "+r.URL.String())
			c.mu.Unlock()
			http.Error(w, "forbidden", http.StatusForbidden)
			return
		}
		c.api.ServeHTTP(w, r)
	}))
	server.Listener.Close()
	server.Listener = listener
	server.StartTLS()
	t.Cleanup(func() {
		server.CloseClientConnections() // watches never end by themselves
		server.Close()
	})
	c.authority = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
}

// allowed is the ClusterRole system:node-proxier, for the ServiceAccount of the pod.
func allowed(r *http.Request) bool {
	read := r.Method == http.MethodGet
	switch r.URL.Path {
	case "/api/v1/services", "/api/v1/endpoints", "/api/v1/nodes", "/apis/discovery.k8s.io/v1/endpointslices", "/apis/networking.k8s.io/v1/servicecidrs":
	case "/apis/events.k8s.io/v1/namespaces/default/events", "/api/v1/namespaces/default/events":
		read = !read && r.Method != http.MethodDelete
	default:
		return false
	}
	return read && r.Header.Get("Authorization") == "Bearer "+token
}

// configMap is that of kubeadm, with a mode. It is laid out as kubelet does.
func (c *cluster) configMap(t *testing.T, mode string) string {
	t.Helper()
	dir := filepath.Join(c.dir, "config-"+mode)
	data := filepath.Join(dir, "..data")
	if err := os.MkdirAll(filepath.Join(dir, "..1"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("..1", data); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"config.conf": fmt.Sprintf(kubeadmConfig, mode),
		"kubeconfig.conf": fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: default, cluster: {certificate-authority: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt, server: "https://127.0.0.1:%d"}}]
contexts: [{name: default, context: {cluster: default, namespace: default, user: default}}]
current-context: default
users: [{name: default, user: {tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token}}]
`, apiPort),
	} {
		if err := os.WriteFile(filepath.Join(data, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("..data/"+name, filepath.Join(dir, name)); err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
	return dir
}

// kubeadmConfig has the fields that kubeadm writes, most of them empty.
const kubeadmConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16,fd00:10:244::/48
configSyncPeriod: 0s
conntrack: {maxPerCore: null, min: null, tcpBeLiberal: false, tcpCloseWaitTimeout: null, tcpEstablishedTimeout: null, udpStreamTimeout: 0s, udpTimeout: 0s}
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 0s, tcpFinTimeout: 0s, tcpTimeout: 0s, udpTimeout: 0s}
logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
metricsBindAddress: ""
mode: %q
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
`

// pod is a kube-proxy in its container.
type pod struct {
	*lab.Cmd
	log  *lab.Log
	made container
}

// kubeadm is the container of kubeadm's DaemonSet.
func (c *cluster) kubeadm(t *testing.T, mode string) container {
	t.Helper()
	lock, account := filepath.Join(c.dir, "xtables.lock"), filepath.Join(c.dir, "account")
	if err := os.MkdirAll(account, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, file := range []struct{ name, text string }{{lock, ""}, {filepath.Join(account, "token"), token}, {filepath.Join(account, "ca.crt"), string(c.authority)}} {
		if err := os.WriteFile(file.name, []byte(file.text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	modules := "/lib/modules"
	if _, err := os.Stat(modules); err != nil {
		modules = t.TempDir() // the kernel has none
	}
	return container{
		Layers: c.layers, Cgroup: c.node.CgroupPath(), Privileged: true,
		Args: []string{"/usr/local/bin/kube-proxy", "--config=/var/lib/kube-proxy/config.conf", "--hostname-override=" + c.node.Name, "-v=2"},
		Mounts: []volume{
			{From: c.configMap(t, mode), To: "/var/lib/kube-proxy", ReadOnly: true},
			{From: lock, To: "/run/xtables.lock"},
			{From: modules, To: "/lib/modules", ReadOnly: true},
			{From: account, To: serviceAccount, ReadOnly: true},
		},
	}
}

// command is a container with pids of its own, or the node's.
func (c *cluster) command(t *testing.T, made container, hostPID bool) *pod {
	t.Helper()
	made.Dir = t.TempDir()
	text, err := json.Marshal(made)
	if err != nil {
		t.Fatal(err)
	}
	p := &pod{c.node.Command(context.Background(), os.Args[0]), &lab.Log{}, made}
	p.Env = []string{asContainer + "=" + string(text)}
	p.Stdout, p.Stderr = p.log, p.log
	p.SysProcAttr.Cloneflags = syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS
	if !hostPID {
		p.SysProcAttr.Cloneflags |= syscall.CLONE_NEWPID
	}
	return p
}

func (c *cluster) start(t *testing.T, made container, hostPID bool) *pod {
	t.Helper()
	p := c.command(t, made, hostPID)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Close()
		if t.Failed() {
			t.Logf("log of kube-proxy:\n%s", p.log)
		}
	})
	p.await(t, `"Synced"`)
	return p
}

// run runs another command in a container of the same kind.
func (c *cluster) run(t *testing.T, made container, hostPID bool, args ...string) string {
	t.Helper()
	made.Args = args
	p := c.command(t, made, hostPID)
	if err := p.Run(); err != nil {
		t.Fatalf("%s: %v\n%s", args, err, p.log)
	}
	return p.log.String()
}

// await waits until the log says something.
func (p *pod) await(t *testing.T, text string) {
	t.Helper()
	await(t, "the log says "+text, func() error {
		if !strings.Contains(p.log.String(), text) {
			return errors.New("it does not")
		}
		return nil
	})
}

func await(t *testing.T, what string, condition func() error) {
	t.Helper()
	var last error
	if err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, 30*time.Second, true, func(context.Context) (bool, error) {
		last = condition()
		return last == nil, nil
	}); err != nil {
		t.Fatalf("%s: %v", what, last)
	}
}

// serves waits until every client gets an answer by every way from an endpoint.
func (c *cluster) serves(t *testing.T) {
	t.Helper()
	type way struct {
		from *lab.Sandbox
		to   netip.AddrPort
	}
	ways := []way{
		{c.client.Sandbox, vip4}, {c.client.Sandbox, vip6}, {c.node.Sandbox, vip4}, {c.node.Sandbox, vip6},
		{c.far.Sandbox, netip.AddrPortFrom(c.node.Addr4, nodePort)}, {c.far.Sandbox, netip.AddrPortFrom(c.node.Addr6, nodePort)},
	}
	for _, w := range ways {
		for _, network := range []string{"tcp", "udp"} {
			await(t, fmt.Sprintf("%s from %s to %s", network, w.from.Name, w.to), func() error {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				_, err := w.from.Ask(ctx, network, w.to)
				return err
			})
		}
	}
}

// asked is the answer of a path at the metrics address.
func (c *cluster) asked(t *testing.T, path string) string {
	t.Helper()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return c.node.Dial(ctx, "tcp", netip.MustParseAddrPort("127.0.0.1:10249"))
		},
	}, Timeout: 5 * time.Second}
	response, err := client.Get("http://node" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestKubeadm: swapping the image in kubeadm's DaemonSet, and the mode in its ConfigMap or
// by a flag, is all it takes. The container that comes after one that was killed goes on
// with what that left, and rules take over from programs on the way back.
func TestKubeadm(t *testing.T) {
	c := newCluster(t)
	var made container
	for i, mode := range []string{"iptables", "ebpf", "ebpf", "iptables"} {
		if made = c.kubeadm(t, mode); i == 2 {
			made = c.kubeadm(t, "iptables")
			made.Args = append(made.Args, "--proxy-mode=ebpf")
		}
		p := c.start(t, made, false)
		c.serves(t)
		if got := c.asked(t, "/proxyMode"); got != mode {
			t.Errorf("/proxyMode says %q in mode %s", got, mode)
		}
		if mode == "iptables" && i > 0 {
			p.await(t, `serve no new connections`)
		}
		_ = p.Close() // killed
		c.serves(t)
		p = c.start(t, made, false)
		if mode == "ebpf" {
			p.await(t, `adopted=true`)
			c.run(t, made, false, "/usr/local/bin/tandemctl", "status")
		}
		c.serves(t)
		_ = p.Close()
	}
	if out := c.run(t, made, false, "/usr/local/sbin/iptables-save"); !strings.Contains(out, "KUBE-SERVICES") {
		t.Errorf("the plain iptables-save of the image does not show the rules:\n%s", out)
	}
	c.run(t, made, false, "/usr/local/bin/kube-proxy", "--cleanup", "--config=/var/lib/kube-proxy/config.conf")
	if out := c.run(t, made, false, "/usr/local/sbin/iptables-save"); strings.Contains(out, "KUBE-SERVICES") {
		t.Errorf("left by --cleanup:\n%s", out)
	}
	if len(c.refused) > 0 {
		t.Errorf("requests that kubeadm's RBAC does not allow: %q", c.refused)
	}
}
