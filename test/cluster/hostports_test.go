// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/tandem-proxy/tandem/test/lab"
)

// allowPods lets kubeadm's kube-proxy read Pods.
func (c *cluster) allowPods() {
	c.tb.Helper()
	text, err := os.ReadFile("../../deploy/kubeadm/opt-outs.yaml")
	if err != nil {
		c.tb.Fatal(err)
	}
	first, second, _ := strings.Cut(string(text), "---\n")
	role, binding := &rbacv1.ClusterRole{}, &rbacv1.ClusterRoleBinding{}
	if err := errors.Join(yaml.UnmarshalStrict([]byte(first), role), yaml.UnmarshalStrict([]byte(second), binding)); err != nil {
		c.tb.Fatal(err)
	}
	rbac := c.client.RbacV1()
	_, err1 := rbac.ClusterRoles().Create(c.tb.Context(), role, metav1.CreateOptions{})
	_, err2 := rbac.ClusterRoleBindings().Create(c.tb.Context(), binding, metav1.CreateOptions{})
	if err := errors.Join(err1, err2); err != nil {
		c.tb.Fatal(err)
	}
}

// TestHostPorts: with --host-port, hostPorts of the Pods of a node are served if kube-proxy may read Pods. They are served from the
// first sync of a process on, so that a restart interrupts nothing.
func TestHostPorts(t *testing.T) {
	c := newCluster(t, 2, inMode("ebpf"))
	n1, n2 := c.nodes[0], c.nodes[1]
	const port = 9080
	hostPort := func(p *v1.Pod) {
		for i := range p.Spec.Containers[0].Ports {
			p.Spec.Containers[0].Ports[i].HostPort = port
		}
	}
	web := c.run(n1, "web", "web-a", hostPort)
	c.run(n2, "other", "other-b", hostPort) // of another node, which kube-proxy on node1 does not read
	client, shell := c.lab.Client("client").Sandbox, n1.Pod("shell").Sandbox
	all := []*lab.Sandbox{client, shell, n1.Sandbox, n2.Sandbox, web.Sandbox}
	at4, at6 := netip.AddrPortFrom(n1.Addr4, port), netip.AddrPortFrom(n1.Addr6, port)

	p := c.start(n1, ourBinary(t), "--host-port")
	p.programmed()
	p.await("why hostPorts are not served", p.Says("hostPorts are not served by this proxy"))
	c.silent("without permission", at4, all...)
	p.terminate()

	c.allowPods()
	p = c.start(n1, ourBinary(t), "--host-port")
	p.programmed()
	for _, to := range []netip.AddrPort{at4, at6} {
		c.answer("hostPort", to, all, web)
	}
	w := lab.NewLoad(t)
	w.Use(client, map[string]netip.AddrPort{"tcp4": at4, "tcp6": at6}, lab.Pace{})
	w.More(100)
	if err := p.Close(); err != nil { // SIGKILL
		t.Fatal(err)
	}
	p = c.start(n1, ourBinary(t), "--host-port")
	p.programmed()
	w.More(100)
	p.terminate()
	p = c.start(n1, ourBinary(t), "--host-port", "--proxy-mode=iptables")
	p.programmed()
	w.More(100)
	w.End()
	for _, to := range []netip.AddrPort{at4, at6} {
		c.answer("by rules", to, all, web)
	}
	c.silent("on a node without a proxy", netip.AddrPortFrom(n2.Addr4, port), client)

	if err := c.client.CoreV1().Pods(namespace).Delete(t.Context(), web.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}); err != nil {
		t.Fatal(err)
	}
	c.silent("after the Pod is gone", at4, all...)
	late := c.run(n1, "web", "web-late", hostPort)
	c.answer("a later Pod", at4, all[:4], late)
	p.terminate()
	p = c.start(n1, ourBinary(t))
	p.programmed()
	c.silent("without the option", at4, all[:4]...)
}
