// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/tandem-proxy/tandem/test/lab"
)

// apiPort is the port of kubeadm's API servers.
const apiPort = 6443

// controlPlane has the processes of a control plane, on a separate machine. Nodes reach the API
// server at the machine's address; all other servers listen only at loopback addresses.
type controlPlane struct {
	assets
	node   *lab.Node
	dir    string // for all files
	ca     *authority
	client kubernetes.Interface // with all permissions

	servers []*lab.Cmd // running processes
	logs    map[string]*lab.Log
}

// auditPolicy makes the API server log requests with user and response status. It omits reads by
// administrators and of leases, which would be most of the log.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  userGroups: ["system:masters"]
- level: Metadata
`

// startControlPlane returns when the API server is ready and controllers run.
func startControlPlane(ctx context.Context, a assets, node *lab.Node, dir string) (_ *controlPlane, err error) {
	p := &controlPlane{assets: a, node: node, dir: dir, logs: map[string]*lab.Log{}}
	defer func() {
		if err != nil {
			err = fmt.Errorf("start control plane: %w\n%s", err, p.tails())
		}
	}()
	if err := p.writeFiles(); err != nil {
		return nil, err
	}
	_, err = p.start("etcd", a.etcd,
		"--data-dir="+p.path("etcd"), "--log-level=warn",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380", "--initial-cluster=default=http://127.0.0.1:2380",
		// The test does not need its data after a power loss.
		"--unsafe-no-fsync")
	if err != nil {
		return nil, err
	}
	return p, p.startServers(ctx)
}

func (p *controlPlane) path(name string) string { return filepath.Join(p.dir, name) }

// writeFiles writes the files of the processes, and makes the client.
func (p *controlPlane) writeFiles() (err error) {
	if p.ca, err = newAuthority(); err != nil {
		return err
	}
	firstService := lab.ServicePrefix4.Addr().Next()
	serving, err := p.ca.server(p.node.Addr4.AsSlice(), p.node.Addr6.AsSlice(), firstService.AsSlice(), net.IPv4(127, 0, 0, 1))
	if err != nil {
		return err
	}
	if _, _, err := serving.write(p.dir, "apiserver"); err != nil {
		return err
	}
	// Only the API server verifies what this key signs.
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	accounts, err := privatePEM(key)
	if err != nil {
		return err
	}
	controllers, err := p.ca.client("system:kube-controller-manager", "")
	if err != nil {
		return err
	}
	conf, err := p.kubeconfig(fmt.Sprintf("https://127.0.0.1:%d", apiPort), controllers)
	if err != nil {
		return err
	}
	for name, text := range map[string][]byte{"ca.crt": p.ca.pem(), "accounts.key": accounts, "controllers.conf": conf, "audit.yaml": []byte(auditPolicy)} {
		if err := os.WriteFile(p.path(name), text, 0o600); err != nil {
			return err
		}
	}
	admin, err := p.ca.client("admin", "system:masters")
	if err != nil {
		return err
	}
	if conf, err = p.kubeconfig(p.url(), admin); err != nil {
		return err
	}
	if err := os.WriteFile(p.path(adminConf), conf, 0o600); err != nil {
		return err
	}
	p.client, err = kubernetes.NewForConfig(&rest.Config{
		Host:            p.url(),
		TLSClientConfig: rest.TLSClientConfig{CAData: p.ca.pem(), CertData: admin.certificate, KeyData: admin.key},
		QPS:             -1,
		Dial:            p.node.DialContext,
	})
	return err
}

// adminConf is a kubeconfig file with all permissions, for machines of the lab.
const adminConf = "admin.conf"

func (p *controlPlane) kubeconfig(url string, user pair) ([]byte, error) {
	config := clientcmdapi.NewConfig()
	config.Clusters["c"] = &clientcmdapi.Cluster{Server: url, CertificateAuthorityData: p.ca.pem()}
	config.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: user.certificate, ClientKeyData: user.key}
	config.Contexts["c"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	config.CurrentContext = "c"
	return clientcmd.Write(*config)
}

func (p *controlPlane) url() string {
	return "https://" + netip.AddrPortFrom(p.node.Addr4, apiPort).String()
}

// startServers starts the API server and, once that is ready, the controllers.
func (p *controlPlane) startServers(ctx context.Context) (err error) {
	p.servers = nil
	err = p.serve("kube-apiserver", p.apiServer,
		"--etcd-servers=http://127.0.0.1:2379",
		"--bind-address=0.0.0.0", fmt.Sprintf("--secure-port=%d", apiPort), "--advertise-address="+p.node.Addr4.String(),
		"--tls-cert-file="+p.path("apiserver.crt"), "--tls-private-key-file="+p.path("apiserver.key"),
		"--client-ca-file="+p.path("ca.crt"), "--cert-dir="+p.path("certs"),
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file="+p.path("accounts.key"), "--service-account-signing-key-file="+p.path("accounts.key"),
		fmt.Sprintf("--service-cluster-ip-range=%s,%s", lab.ServicePrefix4, lab.ServicePrefix6),
		"--authorization-mode=Node,RBAC", "--allow-privileged",
		"--audit-policy-file="+p.path("audit.yaml"), "--audit-log-path="+p.path("audit.log"))
	if err != nil {
		return err
	}
	if err := p.ready(ctx); err != nil {
		return err
	}
	return p.serve("kube-controller-manager", p.controllerManager,
		"--kubeconfig="+p.path("controllers.conf"), "--use-service-account-credentials", "--leader-elect=false",
		// Tests need EndpointSlices; Pods need the ServiceAccount of their namespace.
		"--controllers=endpointslice-controller,serviceaccount-controller",
		"--secure-port=0", "--cert-dir="+p.path("certs"), "--kube-api-qps=1000", "--kube-api-burst=1000")
}

func (p *controlPlane) serve(name, path string, args ...string) error {
	c, err := p.start(name, path, args...)
	if err == nil {
		p.servers = append(p.servers, c)
	}
	return err
}

// stopServers kills all processes, as if the machine died. Controllers must end as well: if they
// outlived the API server, they would not connect to the next one for up to a minute.
func (p *controlPlane) stopServers() {
	for _, c := range p.servers {
		_ = c.Close()
	}
}

// start starts a process on the machine, which ends with it.
func (p *controlPlane) start(name, path string, args ...string) (*lab.Cmd, error) {
	if p.logs[name] == nil {
		p.logs[name] = &lab.Log{}
	}
	c := p.node.Command(context.Background(), path, args...)
	c.Stdout, c.Stderr = p.logs[name], p.logs[name]
	return c, c.Start()
}

// readyLimit suffices for a busy machine: an API server needs ten seconds of CPU time.
const readyLimit = 3 * time.Minute

// ready waits until the API server is ready.
func (p *controlPlane) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyLimit)
	defer cancel()
	last := errors.New("no request was made")
	err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		var code int
		result := p.client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).StatusCode(&code)
		last = result.Error()
		return last == nil && code == http.StatusOK, nil
	})
	if err != nil {
		return fmt.Errorf("the API server is not ready: %w", last)
	}
	return nil
}

// tails returns the end of the log of each process.
func (p *controlPlane) tails() string {
	var b strings.Builder
	for name, log := range p.logs {
		text := log.String()
		fmt.Fprintf(&b, "log of %s:\n%s\n", name, text[max(0, len(text)-3000):])
	}
	return b.String()
}
