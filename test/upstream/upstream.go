// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package upstream runs Kubernetes' own kube-proxy on nodes of the lab, to compare the
// behaviour and the cost of Services. It runs as in a cluster, with a fake API server.
// hack/upstream.sh builds the binary. Other binaries with the same flags can be run too.
package upstream

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strconv"
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
	// Mode is iptables, nftables or ipvs, or another that the binary has; empty for what Args
	// say.
	Mode string
	// ClusterCIDR is the range of the cluster's pods: the lab's if empty, none with
	// NoPods.
	ClusterCIDR string
	// Objects of the cluster. The Node is made here.
	Objects []fakeapi.Object
	// Args are further flags, Env further variables.
	Args, Env []string
}

// NoPods omits the ClusterCIDR.
const NoPods = "none"

// Proxy is a kube-proxy that runs on a node.
type Proxy struct {
	// API is what it watches; changes there reach it.
	API *fakeapi.API
	// URL is where it is, for clients on the node.
	URL string
	// Started is when the process was, with all objects to be had.
	Started time.Time

	node    *lab.Node
	process *lab.Watched
	server  *http.Server
}

const (
	// patience is the timeout for contexts without a deadline, enough for a large cluster.
	patience = 10 * time.Minute
	interval = 100 * time.Millisecond
)

// loadConntrack loads the kernel's connection tracking, as on any node whose CNI has rules:
// upstream's kube-proxy ends if its sysctls do not exist.
func loadConntrack() error {
	const sysctl = "/proc/sys/net/netfilter/nf_conntrack_max"
	if _, err := os.Stat(sysctl); err == nil {
		return nil
	}
	if out, err := exec.Command("modprobe", "nf_conntrack").CombinedOutput(); err != nil {
		return fmt.Errorf("%s does not exist, and modprobe nf_conntrack fails: %w: %s", sysctl, err, out)
	}
	return nil
}

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
	if err := loadConntrack(); err != nil {
		return nil, err
	}
	p := &Proxy{API: fakeapi.New(append([]fakeapi.Object{NodeObject(node)}, opts.Objects...)...), node: node}
	url := ""
	if p.server, url, err = node.ServeHTTP(p.API); err != nil {
		return nil, fmt.Errorf("serve its API: %w", err)
	}
	p.URL = url
	args := []string{
		"--master=" + url, "--hostname-override=" + node.Name,
		// It must not change this machine.
		"--oom-score-adj=0",
	}
	if opts.Mode != "" {
		args = append(args, "--proxy-mode="+opts.Mode)
	}
	if opts.ClusterCIDR != NoPods {
		args = append(args, "--cluster-cidr="+opts.ClusterCIDR)
	}
	p.process = lab.Watch(node.Command(ctx, opts.Binary, append(args, opts.Args...)...))
	p.process.Env = append(os.Environ(), opts.Env...)
	p.Started = time.Now()
	if err := p.process.Start(); err != nil {
		return nil, errors.Join(err, p.server.Close())
	}
	if err := p.await(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("%w; its log:\n%s", err, p.Log()), p.Close())
	}
	return p, nil
}

// Flags are what upstream's modes need in the lab. The limit of conntrack is the whole
// kernel's: no other network namespace than the first may change it, and failing
// to is fatal.
var Flags = []string{"--conntrack-max-per-core=0"}

// NodeObject tells a kube-proxy its node's addresses.
func NodeObject(n *lab.Node) *v1.Node {
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name},
		Spec:       v1.NodeSpec{PodCIDR: n.PodPrefix4.String(), PodCIDRs: []string{n.PodPrefix4.String(), n.PodPrefix6.String()}},
		Status: v1.NodeStatus{Addresses: []v1.NodeAddress{
			{Type: v1.NodeInternalIP, Address: n.Addr4.String()}, {Type: v1.NodeInternalIP, Address: n.Addr6.String()},
		}},
	}
}

// await waits until everything is programmed, in both families.
func (p *Proxy) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	last := errors.New("no request was made")
	err := wait.PollUntilContextCancel(ctx, interval, true, func(ctx context.Context) (bool, error) {
		if p.process.Ended() {
			return false, errors.New("it has ended")
		}
		last = Programmed(ctx, p.node)
		return last == nil, nil
	})
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", err, last)
	}
	return err
}

// Programmed returns nil when a node's kube-proxy, ours or upstream's, has had its first
// successful sync of each family: that waits for all objects to be listed, so it has
// them all.
func Programmed(ctx context.Context, node *lab.Node) error {
	_, err := ProgrammedAt(ctx, node)
	return err
}

// ProgrammedAt is when the newest of those syncs ended.
func ProgrammedAt(ctx context.Context, node *lab.Node) (at time.Time, err error) {
	metrics, err := node.Fetch(ctx, 10249, "/metrics")
	if err != nil {
		return at, err
	}
	for _, family := range []string{"IPv4", "IPv6"} {
		_, rest, ok := strings.Cut(metrics, `kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="`+family+`"} `)
		if !ok {
			return at, fmt.Errorf("%s is not programmed", family)
		}
		text, _, _ := strings.Cut(rest, "\n")
		seconds, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return at, fmt.Errorf("%s was programmed at no time: %w", family, err)
		}
		if t := time.UnixMicro(int64(seconds * 1e6)); t.After(at) {
			at = t
		}
	}
	return at, nil
}

// Log returns the output of the process.
func (p *Proxy) Log() string { return p.process.Log.String() }

// Signal sends a signal to the process.
func (p *Proxy) Signal(s os.Signal) error { return p.process.Process.Signal(s) }

// Close kills the process. The kernel state stays.
func (p *Proxy) Close() error {
	_ = p.process.Close()
	return p.server.Close()
}
