// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/retry"

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
	var rules struct{ Cluster, Klipper, Lease []rbacv1.PolicyRule }
	if err := yaml.UnmarshalStrict(text, &rules); err != nil {
		c.tb.Fatal(err)
	}
	ctx, rbac := c.tb.Context(), c.client.RbacV1()
	name := metav1.ObjectMeta{Name: serviceLBUser, Namespace: metav1.NamespaceSystem}
	everywhere := metav1.ObjectMeta{Name: serviceLBUser}
	who := []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: serviceLBUser}}
	_, err1 := rbac.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: everywhere, Rules: append(rules.Cluster, rules.Klipper...)}, metav1.CreateOptions{})
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
	c.advertisedWithin(patience, name, want...)
}

// advertisedWithin is advertised with a limit of its own.
func (c *cluster) advertisedWithin(limit time.Duration, name string, want ...netip.Addr) {
	c.tb.Helper()
	var texts []string
	for _, a := range want {
		texts = append(texts, a.String())
	}
	lab.Await(c.tb, limit, fmt.Sprintf("%s to be advertised at %v", name, texts), func() error {
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

// toldOf waits for an Event about a Service, and returns its message.
func (c *cluster) toldOf(service, reason string) (message string) {
	c.tb.Helper()
	c.await(fmt.Sprintf("an Event %s about %s", reason, service), func() error {
		list, err := c.client.CoreV1().Events(namespace).List(c.tb.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + service + ",reason=" + reason})
		if err == nil && len(list.Items) == 0 {
			err = errors.New("there is none")
		}
		if err == nil {
			message = list.Items[0].Message
		}
		return err
	})
	return message
}

// setReady sets the condition Ready of a Node.
func (c *cluster) setReady(n *lab.Node, is v1.ConditionStatus) {
	c.tb.Helper()
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		node, err := c.client.CoreV1().Nodes().Get(c.tb.Context(), n.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for i := range node.Status.Conditions {
			if node.Status.Conditions[i].Type == v1.NodeReady {
				node.Status.Conditions[i].Status = is
			}
		}
		_, err = c.client.CoreV1().Nodes().UpdateStatus(c.tb.Context(), node, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		c.tb.Fatal(err)
	}
}

// svclb makes the DaemonSet that K3s' controller makes for a Service.
func (c *cluster) svclb(service string) {
	c.tb.Helper()
	of := map[string]string{"app": "svclb-" + service, "svccontroller.k3s.cattle.io/svcname": service, "svccontroller.k3s.cattle.io/svcnamespace": namespace}
	d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "svclb-" + service, Labels: of}}
	d.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": of["app"]}}
	d.Spec.Template.Labels = of
	d.Spec.Template.Spec.Containers = []v1.Container{{Name: "lb-tcp-80", Image: "klipper-lb"}}
	if _, err := c.client.AppsV1().DaemonSets(metav1.NamespaceSystem).Create(c.tb.Context(), d, metav1.CreateOptions{}); err != nil {
		c.tb.Fatal(err)
	}
}

// lease is within what time a node is withdrawn whose kube-proxy does not answer any more.
const lease = 10 * time.Second

// TestServiceLB: Services get the addresses of nodes, and answer there at all addresses of the nodes; a node whose kube-proxy is gone, that is
// not Ready, or that has no local endpoint, is withdrawn; of two Services with one port, the younger gets it once the other is gone, as
// where a process of the host listens, by TCP or UDP. Connections stay while a Service of both families changes. A client that connects 500 times a second meanwhile has no failure.
func TestServiceLB(t *testing.T) {
	for _, mode := range []string{"ebpf", "iptables"} {
		t.Run(mode, func(t *testing.T) { testServiceLB(t, newCluster(t, 2, inMode(mode))) })
	}
}

func testServiceLB(t *testing.T, c *cluster) {
	path, err := binary.Build(t.TempDir(), "servicelb")
	if err != nil {
		t.Fatal(err)
	}
	c.allowServiceLB()
	proxies := c.startAll()
	n1, n2 := c.nodes[0], c.nodes[1]
	a := c.run(n1, "web", "web-a")
	client := c.lab.Client("client")
	ask := []*lab.Sandbox{client.Sandbox}

	ours := func(s *v1.Service) {
		s.Spec.Type, s.Spec.LoadBalancerClass = v1.ServiceTypeLoadBalancer, new(servicelb.Class)
	}
	busy, err := n2.ServeUDP(8443)
	if err != nil {
		t.Fatal(err)
	}
	c.svclb("web")
	c.svclb("foreign")
	first := c.startServiceLB(path, "--delete-klipper-lb")
	second := c.startServiceLB(path, "--delete-klipper-lb") // one of the two waits
	c.expose("web", ours)
	c.advertised("web", n1.Addr4, n2.Addr4)
	for _, n := range c.nodes {
		c.answer("through "+n.Name, netip.AddrPortFrom(n.Addr4, 80), ask, a)
	}
	c.await("the DaemonSet of klipper-lb to be deleted, and no other", func() error {
		list, err := c.client.AppsV1().DaemonSets(metav1.NamespaceSystem).List(t.Context(), metav1.ListOptions{LabelSelector: "svccontroller.k3s.cattle.io/svcname"})
		if err == nil && (len(list.Items) != 1 || list.Items[0].Name != "svclb-foreign") {
			err = fmt.Errorf("there are %d", len(list.Items))
		}
		return err
	})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	load := make(chan lab.Dials, 1)
	go func() { load <- client.DialOften(ctx, "tcp", netip.AddrPortFrom(n1.Addr4, 80), rate) }()

	// Another address of a node, which its Node object does not have.
	extra := netip.MustParsePrefix("192.0.2.77/32")
	if err := c.lab.Announce(extra, n1); err != nil {
		t.Fatal(err)
	}
	link, err := n1.Netlink().LinkByName(lab.Uplink)
	if err == nil {
		err = n1.Netlink().AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: extra.Addr().AsSlice(), Mask: net.CIDRMask(32, 32)}})
	}
	if err != nil {
		t.Fatal(err)
	}
	c.answer("at another address of the node", netip.AddrPortFrom(extra.Addr(), 80), ask, a)

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
	c.answer("instead of the process of the host", netip.AddrPortFrom(n2.Addr4, 8443), ask, b)

	// Both families. Connections stay while ports, ranges, annotations and the pool change.
	c.expose("dual", ours, func(s *v1.Service) {
		s.Spec.IPFamilyPolicy, s.Spec.Selector = new(v1.IPFamilyPolicyRequireDualStack), labels("late")
		s.Spec.Ports[0].Port, s.Spec.Ports[1].Port = 8082, 8082
	})
	c.advertised("dual", n1.Addr4, n2.Addr4, n1.Addr6, n2.Addr6)
	var long []net.Conn
	for _, a := range []netip.Addr{n1.Addr4, n1.Addr6} {
		c.answer("in both families", netip.AddrPortFrom(a, 8082), ask, b)
		conn, err := client.Dial(t.Context(), "tcp", netip.AddrPortFrom(a, 8082))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		long = append(long, conn)
	}
	stay := func(what string) {
		t.Helper()
		for _, conn := range long {
			if _, err := lab.AskConn(t.Context(), conn); err != nil {
				t.Errorf("%s: a connection to %s ends: %v", what, conn.RemoteAddr(), err)
			}
		}
	}
	stay("at first")
	c.edit("dual", func(s *v1.Service) {
		for _, p := range s.Spec.Ports {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: p.Name + "-too", Port: 8083, Protocol: p.Protocol, TargetPort: p.TargetPort})
		}
		s.Spec.LoadBalancerSourceRanges = []string{client.Addr4.String() + "/32", client.Addr6.String() + "/128"}
		s.Annotations = map[string]string{servicelb.AnnotationPriority: "1"}
	})
	c.answer("at another port", netip.AddrPortFrom(n1.Addr6, 8083), ask, b)
	stay("another port, ranges and an annotation")
	label := func(n *lab.Node, key string, value any) {
		t.Helper()
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{key: value}}})
		if err == nil {
			_, err = c.client.CoreV1().Nodes().Patch(t.Context(), n.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	label(n2, servicelb.LabelPool, "edge")
	c.edit("dual", func(s *v1.Service) { s.Labels = map[string]string{servicelb.LabelPool: "edge"} })
	c.advertised("dual", n2.Addr4, n2.Addr6)
	stay("a pool without the node")
	label(n1, servicelb.LabelPool, "edge")
	c.advertised("dual", n1.Addr4, n2.Addr4, n1.Addr6, n2.Addr6)
	stay("a pool with the node")

	// An interface by its name, whatever addresses it has.
	c.expose("device", ours, func(s *v1.Service) {
		s.Annotations = map[string]string{servicelb.AnnotationAddresses: lab.Uplink}
		s.Spec.Selector = labels("late")
		s.Spec.Ports[0].Port, s.Spec.Ports[1].Port = 8080, 8080
	})
	c.advertised("device", n1.Addr4, n2.Addr4, extra.Addr())
	c.answer("at an address of an interface", netip.AddrPortFrom(extra.Addr(), 8080), ask, b)
	c.edit("device", func(s *v1.Service) {
		s.Spec.Type, s.Spec.LoadBalancerClass = v1.ServiceTypeClusterIP, nil
		for i := range s.Spec.Ports {
			s.Spec.Ports[i].NodePort = 0
		}
	})
	c.silent("of no type LoadBalancer any more", netip.AddrPortFrom(extra.Addr(), 8080), ask...)

	// A pod with a hostPort.
	c.run(n1, "holder", "holder", func(p *v1.Pod) {
		p.Spec.Containers[0].Ports = append(p.Spec.Containers[0].Ports, v1.ContainerPort{ContainerPort: 9090, HostPort: 9090})
	})
	c.expose("pod-port", ours, func(s *v1.Service) { s.Spec.Ports[0].Port, s.Spec.Ports[1].Port = 9090, 9090 })
	c.advertised("pod-port", n2.Addr4)
	if text := c.toldOf("pod-port", "PortTaken"); !strings.Contains(text, "pod "+namespace+"/holder") {
		t.Errorf("Event %q", text)
	}

	// A process of the host begins to listen at a port that a Service has.
	intruder, err := n1.ServeTCP(80)
	if err != nil {
		t.Fatal(err)
	}
	if text := c.toldOf("web", "HostListens"); !strings.Contains(text, "80/TCP") {
		t.Errorf("Event %q", text)
	}
	c.answer("where a process of the host listens too", netip.AddrPortFrom(n1.Addr4, 80), ask, a)
	if err := intruder.Close(); err != nil {
		t.Fatal(err)
	}

	// Another controller.
	s, err := c.client.CoreV1().Services(namespace).Get(t.Context(), "tls", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c.balance(s, netip.MustParseAddr("203.0.113.7"))
	if text := c.toldOf("tls", "StatusOverwritten"); !strings.Contains(text, "203.0.113.7") {
		t.Errorf("Event %q", text)
	}
	c.advertised("tls", n1.Addr4, n2.Addr4)

	// Labels of nodes, and a node that is not Ready.
	label(n1, servicelb.LabelEnable, "true")
	c.advertised("tls", n1.Addr4)
	label(n1, servicelb.LabelEnable, nil)
	c.advertised("tls", n1.Addr4, n2.Addr4)
	c.setReady(n2, v1.ConditionUnknown)
	c.advertised("tls", n1.Addr4)
	c.setReady(n2, v1.ConditionTrue)
	c.advertised("tls", n1.Addr4, n2.Addr4)

	// A node without a kube-proxy, and one that cannot be reached.
	if err := proxies[1].Close(); err != nil { // SIGKILL
		t.Fatal(err)
	}
	c.advertisedWithin(lease, "tls", n1.Addr4)
	c.start(n2, ourBinary(t)).programmed()
	c.advertised("tls", n1.Addr4, n2.Addr4)
	up, err := n2.Down(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	c.advertisedWithin(lease, "tls", n1.Addr4)
	if err := up(); err != nil {
		t.Fatal(err)
	}
	c.advertised("tls", n1.Addr4, n2.Addr4)

	// Another process goes on. What the first one assigned stays.
	first.Terminate(t)
	c.edit("web", func(s *v1.Service) { s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal })
	c.advertised("web", n1.Addr4)
	stop()
	if d := <-load; d.Failed > 0 || d.All < rate {
		t.Errorf("%d of %d connections failed: %v", d.Failed, d.All, d.Err)
	} else {
		t.Logf("%d connections, the slowest took %v", d.All, d.Slowest)
	}
	if err := c.client.CoreV1().Services(namespace).Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.advertised("late", n1.Addr4, n2.Addr4)
	c.answer("in place of the other", netip.AddrPortFrom(n1.Addr4, 80), ask, b)
	second.Terminate(t)

	r, err := requestsOf(c.plane.path("audit.log"), serviceLBUser)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Refused) > 0 {
		t.Errorf("refused: %v", r.Refused)
	}
}
