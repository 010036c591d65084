// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-proxy/tandem/test/binary"
	"github.com/tandem-proxy/tandem/test/container"
	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	container.Main()
	lab.Main()
	code := m.Run()
	if built.dir != "" {
		_ = os.RemoveAll(built.dir)
	}
	os.Exit(code)
}

// built is the kube-proxy of this repository, built from its own module.
var built struct {
	once      sync.Once
	dir, path string
	err       error
}

func ourBinary(tb testing.TB) string {
	tb.Helper()
	built.once.Do(func() {
		if built.dir, built.err = os.MkdirTemp("", "tandem-cluster-"); built.err != nil {
			return
		}
		built.path, built.err = binary.KubeProxy(built.dir)
	})
	if built.err != nil {
		tb.Fatal(built.err)
	}
	return built.path
}

// cluster is a control plane, and nodes without running processes.
type cluster struct {
	tb     testing.TB
	lab    *lab.Lab
	plane  *controlPlane
	client kubernetes.Interface
	nodes  []*lab.Node
	hosts  map[string]*host
}

// namespace is the namespace of all objects that tests create.
const namespace = "shop"

// inMode edits the mode in kubeadm's configuration.
func inMode(mode string) map[string]string { return map[string]string{`mode: ""`: "mode: " + mode} }

// newCluster makes a cluster with nodes node1, node2 and so on, alternating between zones a and
// b, and with kube-proxy's objects, after edits of its configuration.
func newCluster(tb testing.TB, nodes int, edits map[string]string) *cluster {
	tb.Helper()
	a := assetsT(tb)
	ourBinary(tb) // before anything waits for it
	ctx := tb.Context()
	c := &cluster{tb: tb, lab: lab.NewT(tb), hosts: map[string]*host{}}
	for i := range nodes {
		c.nodes = append(c.nodes, c.lab.Node(fmt.Sprintf("node%d", i+1)))
	}
	began := time.Now()
	var err error
	if c.plane, err = startControlPlane(ctx, a, c.lab.Node("control-plane"), tb.TempDir()); err != nil {
		tb.Fatal(err)
	}
	c.client = c.plane.client
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Log(c.plane.tails())
		}
	})
	if err := addProxy(ctx, c.plane); err != nil {
		tb.Fatal(err)
	}
	// The limit of conntrack is global: only the initial network namespace may change it, and
	// upstream's kube-proxy exits if it cannot.
	if err := editConfig(ctx, c.client, map[string]string{"  maxPerCore: null": "  maxPerCore: 0"}); err != nil {
		tb.Fatal(err)
	}
	if err := editConfig(ctx, c.client, edits); err != nil {
		tb.Fatal(err)
	}
	for i, n := range c.nodes {
		if c.hosts[n.Name], err = newHost(n, tb.TempDir()); err != nil {
			tb.Fatal(err)
		}
		c.addNode(n, string("ab"[i%2]))
	}
	if _, err := c.client.CoreV1().Namespaces().Create(ctx, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
		tb.Fatal(err)
	}
	c.await("the namespace's ServiceAccount", func() error {
		_, err := c.client.CoreV1().ServiceAccounts(namespace).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	c.await("what kube-proxy may do", func() error {
		review, err := c.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: ProxyUser, ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "watch", Resource: "services"},
		}}, metav1.CreateOptions{})
		if err == nil && !review.Status.Allowed {
			err = errors.New("the API server does not know it yet")
		}
		return err
	})
	tb.Logf("the control plane was ready after %v", time.Since(began).Round(time.Millisecond))
	return c
}

// addNode registers a node as its kubelet does.
func (c *cluster) addNode(n *lab.Node, zone string) {
	c.tb.Helper()
	if err := addNode(c.tb.Context(), c.client, n, zone); err != nil {
		c.tb.Fatal(err)
	}
}

func addNode(ctx context.Context, client kubernetes.Interface, n *lab.Node, zone string) error {
	nodes := client.CoreV1().Nodes()
	node, err := nodes.Create(ctx, &v1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: n.Name, Labels: map[string]string{v1.LabelHostname: n.Name, v1.LabelOSStable: "linux", v1.LabelTopologyZone: zone},
			Annotations: map[string]string{"volumes.kubernetes.io/controller-managed-attach-detach": "true"}, // flannel needs some
		},
		Spec: v1.NodeSpec{PodCIDR: n.PodPrefix4.String(), PodCIDRs: []string{n.PodPrefix4.String(), n.PodPrefix6.String()}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	node.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: n.Addr4.String()}, {Type: v1.NodeInternalIP, Address: n.Addr6.String()}, {Type: v1.NodeHostName, Address: n.Name}}
	node.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}}
	_, err = nodes.UpdateStatus(ctx, node, metav1.UpdateOptions{})
	return err
}

// patience includes the time until watches resume after an outage: client-go waits up to a
// minute.
const patience = 2 * time.Minute

func (c *cluster) await(what string, condition func() error) {
	c.tb.Helper()
	lab.Await(c.tb, patience, what, condition)
}
