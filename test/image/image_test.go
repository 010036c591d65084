// SPDX-License-Identifier: Apache-2.0

//go:build linux

package image_test

import (
	"context"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/configmap"
	"github.com/tandem-proxy/tandem/test/container"
	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/image"
	"github.com/tandem-proxy/tandem/test/kubeadm"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

func TestMain(m *testing.M) {
	container.Main()
	lab.Main()
	os.Exit(m.Run())
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
	token    = "a-token-of-the-service-account"
	apiURL   = "https://127.0.0.1:6443"
	nodePort = 30080
	podPort  = 8080
)

var (
	vip4 = netip.MustParseAddrPort("10.96.0.10:80")
	vip6 = netip.MustParseAddrPort("[fd00:10:96::10]:80")
)

func newCluster(t *testing.T) *cluster {
	t.Helper()
	if err := lab.Available(); err != nil {
		lab.SkipOrFail(t, err) // before the image is made
	}
	built := image.Layers(t, "../..")
	l := lab.NewT(t, lab.Options{Pause: true})
	n := l.Node("node1")
	c := &cluster{
		node: n, here: serve(t, n.Pod("here")), there: serve(t, l.Node("node2").Pod("there")),
		client: n.Pod("client"), far: l.Client("far"), layers: built, dir: t.TempDir(), api: fakeapi.New(),
	}
	c.api.Put(upstream.NodeObject(n))
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
	listener, err := c.node.Listen(strings.TrimPrefix(apiURL, "https://"))
	if err != nil {
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

// allowed is what kubeadm lets the ServiceAccount of the pod do.
func allowed(r *http.Request) bool {
	return kubeadm.IsAllowed(kubeadm.Needs(r)) && r.Header.Get("Authorization") == "Bearer "+token
}

// volume makes files the volume of a ConfigMap.
func (c *cluster) volume(t *testing.T, name string, files map[string]string) (dir string) {
	t.Helper()
	dir = filepath.Join(c.dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := configmap.Update(dir, files); err != nil {
		t.Fatal(err)
	}
	return dir
}

// configMap is that of kubeadm, with a mode.
func (c *cluster) configMap(t *testing.T, mode string) (dir string) {
	t.Helper()
	return c.volume(t, "config-"+mode, map[string]string{
		kubeadm.ConfigFile: kubeadm.Config(mode), kubeadm.KubeconfigFile: kubeadm.Kubeconfig(apiURL),
	})
}

// kubeadm is the container of kubeadm's DaemonSet.
func (c *cluster) kubeadm(t *testing.T, mode string) container.Container {
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
	return container.Container{
		Layers: c.layers, Privileged: true,
		Args: []string{"/usr/local/bin/kube-proxy", "--config=/var/lib/kube-proxy/config.conf", "--hostname-override=" + c.node.Name, "-v=2"},
		Mounts: []container.Mount{
			{From: c.configMap(t, mode), To: "/var/lib/kube-proxy", ReadOnly: true},
			{From: lock, To: "/run/xtables.lock"},
			{From: modules, To: "/lib/modules", ReadOnly: true},
			{From: account, To: container.ServiceAccount, ReadOnly: true},
		},
	}
}

func (c *cluster) command(t *testing.T, made container.Container) *lab.Watched {
	t.Helper()
	made.Dir = t.TempDir()
	p, err := made.Command(context.Background(), c.node)
	if err != nil {
		t.Fatal(err)
	}
	return lab.Watch(p)
}

func (c *cluster) start(t *testing.T, made container.Container) *lab.Watched {
	t.Helper()
	p := c.command(t, made)
	p.Begin(t)
	says(t, p, `"Synced"`)
	return p
}

// run runs another command in a container of the same kind.
func (c *cluster) run(t *testing.T, made container.Container, args ...string) string {
	t.Helper()
	made.Args = args
	p := c.command(t, made)
	if err := p.Run(); err != nil {
		t.Fatalf("%s: %v\n%s", args, err, p.Log)
	}
	return p.Log.String()
}

var patience = 30 * time.Second * lab.Slower()

// says waits until the log has a text.
func says(t *testing.T, p *lab.Watched, text string) {
	t.Helper()
	p.Await(t, patience, "the log", p.Says(text))
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
			lab.Await(t, patience, fmt.Sprintf("%s from %s to %s", network, w.from.Name, w.to), func() error {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				_, err := w.from.Ask(ctx, network, w.to)
				return err
			})
		}
	}
}

// runs checks what the process says it runs in.
func (c *cluster) runs(t *testing.T, mode string) {
	t.Helper()
	if got, err := c.node.Fetch(t.Context(), 10249, "/proxyMode"); err != nil || got != mode {
		t.Errorf("/proxyMode says %q, want %q; error %v", got, mode, err)
	}
}

// TestKubeadm: swapping the image in kubeadm's DaemonSet, and the mode in its ConfigMap or
// by a flag, is all it takes. The container that comes after one that was killed goes on
// with what that left, and rules take over from programs on the way back.
func TestKubeadm(t *testing.T) {
	c := newCluster(t)
	var made container.Container
	for i, mode := range []string{"iptables", "ebpf", "ebpf", "iptables"} {
		if made = c.kubeadm(t, mode); i == 2 {
			made = c.kubeadm(t, "iptables")
			made.Args = append(made.Args, "--proxy-mode=ebpf")
		}
		p := c.start(t, made)
		c.serves(t)
		c.runs(t, mode)
		if mode == "iptables" && i > 0 {
			says(t, p, `accept no new connections`)
		}
		_ = p.Close() // killed
		c.serves(t)
		p = c.start(t, made)
		if mode == "ebpf" {
			says(t, p, `adopted=true`)
			c.run(t, made, "/usr/local/bin/tandemctl", "status")
		}
		c.serves(t)
		_ = p.Close()
	}
	if out := c.run(t, made, "/usr/local/sbin/iptables-save"); !strings.Contains(out, "KUBE-SERVICES") {
		t.Errorf("the plain iptables-save of the image does not show the rules:\n%s", out)
	}
	c.cleanup(t)
	if out := c.run(t, made, "/usr/local/sbin/iptables-save"); strings.Contains(out, "KUBE-SERVICES") {
		t.Errorf("left by --cleanup:\n%s", out)
	}
	if len(c.refused) > 0 {
		t.Errorf("requests that kubeadm's RBAC does not allow: %q", c.refused)
	}
}
