// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package upstream runs Kubernetes' own kube-proxy on nodes of the lab, to compare
// with: how a Service behaves, and what it costs. It runs as in a cluster, with
// an API server, which is a fake one; hack/upstream.sh builds the binary. A binary
// that takes the same flags can be run the same way.
package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/lab"
)

// BinaryEnv names the binary.
const BinaryEnv = "UPSTREAM_KUBE_PROXY"

// Binary is the path of upstream's kube-proxy, or says what to do to have one.
func Binary() (string, error) {
	path := os.Getenv(BinaryEnv)
	if path == "" {
		return "", fmt.Errorf("%s is not set: it has to be the path of upstream's kube-proxy, which hack/upstream.sh builds and prints", BinaryEnv)
	}
	for _, tool := range []string{path, "iptables-restore", "ip6tables-restore", "nft"} {
		if _, err := exec.LookPath(tool); err != nil {
			return "", fmt.Errorf("run upstream's kube-proxy: %w", err)
		}
	}
	return path, nil
}

// BinaryT is Binary for a test or a benchmark, which ends without it.
func BinaryT(tb lab.TB) string {
	tb.Helper()
	path, err := Binary()
	if err != nil {
		lab.SkipUnnamed(tb, BinaryEnv, err)
	}
	return path
}

// Options say what to run.
type Options struct {
	// Binary to run.
	Binary string
	// Mode is iptables, nftables or ipvs, or another that the binary has.
	Mode string
	// ClusterCIDR holds the pods of the cluster; those of the lab if empty, and nobody
	// with NoPods.
	ClusterCIDR string
	// Objects of the cluster. The Node is made here.
	Objects []fakeapi.Object
	// Args are further flags, Env further variables.
	Args, Env []string
}

// NoPods has no ClusterCIDR be told.
const NoPods = "none"

// Proxy is a kube-proxy that runs on a node.
type Proxy struct {
	// API is what it watches; changes there reach it.
	API *fakeapi.API

	node   *lab.Node
	cmd    *lab.Cmd
	log    lab.Log
	ended  chan struct{} // closed when the process is gone
	server *http.Server
}

const (
	// patience is for contexts without a deadline, and enough for a large cluster.
	patience = 10 * time.Minute
	interval = 100 * time.Millisecond
)

// Start runs a kube-proxy and returns once it has programmed all Services. Without
// a deadline in ctx it gives up after ten minutes. The process ends with Close, with ctx
// or with the node; what it programmed stays until the node is closed.
func Start(ctx context.Context, node *lab.Node, opts Options) (_ *Proxy, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("start kube-proxy in mode %s on %s: %w", opts.Mode, node.Name, err)
		}
	}()
	if opts.ClusterCIDR == "" {
		opts.ClusterCIDR = "10.244.0.0/16,fd00:10:244::/48"
	}
	p := &Proxy{API: fakeapi.New(append([]fakeapi.Object{nodeObject(node)}, opts.Objects...)...), node: node, ended: make(chan struct{})}
	url, err := p.serve()
	if err != nil {
		return nil, err
	}
	args := []string{
		"--proxy-mode=" + opts.Mode, "--master=" + url, "--hostname-override=" + node.Name,
		// Nothing of this machine is to be changed.
		"--oom-score-adj=0",
	}
	if opts.ClusterCIDR != NoPods {
		args = append(args, "--cluster-cidr="+opts.ClusterCIDR)
	}
	p.cmd = node.Command(ctx, opts.Binary, append(args, opts.Args...)...)
	p.cmd.Env = append(os.Environ(), opts.Env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	if err := p.cmd.Start(); err != nil {
		return nil, errors.Join(err, p.server.Close())
	}
	go func() {
		_ = p.cmd.Wait() // the log says more
		close(p.ended)
	}()
	if err := p.await(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("%w; its log:\n%s", err, p.Log()), p.Close())
	}
	return p, nil
}

// Flags are what upstream's modes need in the lab. The limit of conntrack is the whole
// kernel's: no other network namespace than the first may change it, and failing
// to is fatal.
var Flags = []string{"--conntrack-max-per-core=0"}

// nodeObject tells a kube-proxy its node's addresses.
func nodeObject(n *lab.Node) *v1.Node {
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name},
		Spec:       v1.NodeSpec{PodCIDR: n.PodPrefix4.String(), PodCIDRs: []string{n.PodPrefix4.String(), n.PodPrefix6.String()}},
		Status: v1.NodeStatus{Addresses: []v1.NodeAddress{
			{Type: v1.NodeInternalIP, Address: n.Addr4.String()}, {Type: v1.NodeInternalIP, Address: n.Addr6.String()},
		}},
	}
}

// serve serves the API on the node's loopback device.
func (p *Proxy) serve() (url string, err error) {
	var l net.Listener
	err = p.node.Do(func() (err error) {
		l, err = net.Listen("tcp4", "127.0.0.1:0")
		return err
	})
	if err != nil {
		return "", fmt.Errorf("serve its API: %w", err)
	}
	p.server = &http.Server{Handler: p.API}
	go func() { _ = p.server.Serve(l) }() // ends with Close
	return "http://" + l.Addr().String(), nil
}

// await waits until everything is programmed, in both families.
func (p *Proxy) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	last := errors.New("not asked")
	err := wait.PollUntilContextCancel(ctx, interval, true, func(ctx context.Context) (bool, error) {
		select {
		case <-p.ended:
			return false, errors.New("it has ended")
		default:
		}
		last = p.programmed(ctx)
		return last == nil, nil
	})
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", err, last)
	}
	return err
}

// programmed returns nil when the first sync of each family has succeeded: it waits
// for all objects to be listed, so it has them all.
func (p *Proxy) programmed(ctx context.Context) error {
	metrics, err := p.get(ctx, netip.MustParseAddrPort("127.0.0.1:10249"), "/metrics")
	if err != nil {
		return err
	}
	for _, family := range []string{"IPv4", "IPv6"} {
		if !strings.Contains(metrics, `kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="`+family+`"}`) {
			return fmt.Errorf("%s is not programmed", family)
		}
	}
	return nil
}

func (p *Proxy) get(ctx context.Context, from netip.AddrPort, path string) (string, error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return p.node.Dial(ctx, "tcp", from)
		},
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+from.String()+path, nil)
	if err != nil {
		return "", err
	}
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answers %s", path, response.Status)
	}
	return string(text), err
}

// Log is what the process has said.
func (p *Proxy) Log() string { return p.log.String() }

// Close kills the process. What it programmed goes on working.
func (p *Proxy) Close() error {
	_ = p.cmd.Close()
	<-p.ended
	return p.server.Close()
}
