// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/tandem-proxy/tandem/servicelb"
	"github.com/tandem-proxy/tandem/test/binary"
	"github.com/tandem-proxy/tandem/test/lab"
)

// serviceLBUser is the user name of the controller of ServiceLB.
const serviceLBUser = "servicelb"

// allowServiceLB gives the controller the rights that the chart gives it.
func (c *cluster) allowServiceLB() {
	c.tb.Helper()
	text, err := os.ReadFile("../../deploy/helm/tandem-kube-proxy/files/servicelb-rules.yaml")
	if err != nil {
		c.tb.Fatal(err)
	}
	var rules struct{ Cluster, Lease []rbacv1.PolicyRule }
	if err := yaml.UnmarshalStrict(text, &rules); err != nil {
		c.tb.Fatal(err)
	}
	ctx, rbac := c.tb.Context(), c.client.RbacV1()
	name := metav1.ObjectMeta{Name: serviceLBUser, Namespace: metav1.NamespaceSystem}
	everywhere := metav1.ObjectMeta{Name: serviceLBUser}
	who := []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: serviceLBUser}}
	_, err1 := rbac.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: everywhere, Rules: rules.Cluster}, metav1.CreateOptions{})
	_, err2 := rbac.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: everywhere, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: serviceLBUser}, Subjects: who}, metav1.CreateOptions{})
	_, err3 := rbac.Roles(name.Namespace).Create(ctx, &rbacv1.Role{ObjectMeta: name, Rules: rules.Lease}, metav1.CreateOptions{})
	_, err4 := rbac.RoleBindings(name.Namespace).Create(ctx, &rbacv1.RoleBinding{ObjectMeta: name, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: serviceLBUser}, Subjects: who}, metav1.CreateOptions{})
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		c.tb.Fatal(err)
	}
}

// startServiceLB runs the controller on the control plane's node.
func (c *cluster) startServiceLB(path string, flags ...string) *lab.Watched {
	c.tb.Helper()
	keys, err := c.plane.ca.client(serviceLBUser, "")
	if err != nil {
		c.tb.Fatal(err)
	}
	config := clientcmdapi.NewConfig()
	config.Clusters["c"] = &clientcmdapi.Cluster{Server: c.plane.url(), CertificateAuthorityData: c.plane.ca.pem()}
	config.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: keys.certificate, ClientKeyData: keys.key}
	config.Contexts["c"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	config.CurrentContext = "c"
	file := filepath.Join(c.tb.TempDir(), "servicelb.conf")
	if err := clientcmd.WriteToFile(*config, file); err != nil {
		c.tb.Fatal(err)
	}
	w := lab.Watch(c.plane.node.Command(context.Background(), path, append([]string{"--kubeconfig=" + file}, flags...)...))
	w.Begin(c.tb)
	return w
}

// advertised waits until the status of a Service has these addresses.
func (c *cluster) advertised(name string, want ...netip.Addr) {
	c.tb.Helper()
	var texts []string
	for _, a := range want {
		texts = append(texts, a.String())
	}
	c.await(fmt.Sprintf("%s to be advertised at %v", name, texts), func() error {
		s, err := c.client.CoreV1().Services(namespace).Get(c.tb.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var have []string
		for _, i := range s.Status.LoadBalancer.Ingress {
			have = append(have, i.IP)
		}
		if !slices.Equal(have, texts) {
			return fmt.Errorf("it has %v; conditions %+v", have, s.Status.Conditions)
		}
		return nil
	})
}

// TestServiceLB: Services get the addresses of nodes, and answer there; a node whose kube-proxy is gone, or that has no local endpoint, is
// withdrawn; of two Services with one port, the younger gets it once the other is gone, as where a process of the host listens.
func TestServiceLB(t *testing.T) {
	c := newCluster(t, 2, inMode("ebpf"))
	path, err := binary.Build(t.TempDir(), "servicelb")
	if err != nil {
		t.Fatal(err)
	}
	c.allowServiceLB()
	proxies := c.startAll()
	n1, n2 := c.nodes[0], c.nodes[1]
	a := c.run(n1, "web", "web-a")
	client := c.lab.Client("client")

	ours := func(s *v1.Service) {
		s.Spec.Type, s.Spec.LoadBalancerClass = v1.ServiceTypeLoadBalancer, new(servicelb.Class)
	}
	busy, err := n2.ServeTCP(8443)
	if err != nil {
		t.Fatal(err)
	}
	first := c.startServiceLB(path)
	second := c.startServiceLB(path) // waits
	c.expose("web", ours)
	c.advertised("web", n1.Addr4, n2.Addr4)
	for _, n := range c.nodes {
		c.answer("through "+n.Name, netip.AddrPortFrom(n.Addr4, 80), []*lab.Sandbox{client.Sandbox}, a)
	}

	// The port of another Service, and of a process of the host.
	b := c.run(n2, "late", "late-b")
	c.expose("late", ours)
	c.expose("tls", ours, func(s *v1.Service) {
		s.Spec.Selector = labels("late")
		s.Spec.Ports[0].Port, s.Spec.Ports[1].Port = 8443, 8443
	})
	c.advertised("tls", n1.Addr4)
	c.advertised("late")
	if err := busy.Close(); err != nil {
		t.Fatal(err)
	}
	c.advertised("tls", n1.Addr4, n2.Addr4)
	c.answer("instead of the process of the host", netip.AddrPortFrom(n2.Addr4, 8443), []*lab.Sandbox{client.Sandbox}, b)

	// Another process goes on. What the first one assigned stays.
	first.Terminate(t)
	c.edit("web", func(s *v1.Service) { s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal })
	c.advertised("web", n1.Addr4)
	if err := c.client.CoreV1().Services(namespace).Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.advertised("late", n1.Addr4, n2.Addr4)
	c.answer("in place of the other", netip.AddrPortFrom(n1.Addr4, 80), []*lab.Sandbox{client.Sandbox}, b)

	// A node without a kube-proxy.
	proxies[0].terminate()
	c.advertised("late", n2.Addr4)
	c.start(n1, ourBinary(t)).programmed()
	c.advertised("late", n1.Addr4, n2.Addr4)
	second.Terminate(t)

	r, err := requestsOf(c.plane.path("audit.log"), serviceLBUser)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Refused) > 0 {
		t.Errorf("refused: %v", r.Refused)
	}
}
