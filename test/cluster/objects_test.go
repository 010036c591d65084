// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/lab"
)

// targetPort is the port of the servers in Pods.
const targetPort = 8080

// labels select the Pods of an application.
func labels(app string) map[string]string { return map[string]string{"app": app} }

// run starts a Pod of an application on a node: an object in the API, and a pod of the lab with
// the same name.
func (c *cluster) run(n *lab.Node, app, name string, edits ...func(*v1.Pod)) *lab.Pod {
	c.tb.Helper()
	p := n.Pod(name)
	for _, serve := range []func(uint16) (*lab.Server, error){p.ServeTCP, p.ServeUDP} {
		if _, err := serve(targetPort); err != nil {
			c.tb.Fatal(err)
		}
	}
	pods := c.client.CoreV1().Pods(namespace)
	object := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels(app)},
		Spec: v1.PodSpec{NodeName: n.Name, Containers: []v1.Container{{Name: "server", Image: "none",
			Ports: []v1.ContainerPort{{Name: "tcp", ContainerPort: targetPort}, {Name: "udp", ContainerPort: targetPort, Protocol: v1.ProtocolUDP}}}}},
	}
	for _, edit := range edits {
		edit(object)
	}
	object, err := pods.Create(c.tb.Context(), object, metav1.CreateOptions{})
	if err != nil {
		c.tb.Fatal(err)
	}
	object.Status.Phase, object.Status.HostIP, object.Status.PodIP = v1.PodRunning, n.Addr4.String(), p.Addr4.String()
	object.Status.HostIPs = []v1.HostIP{{IP: n.Addr4.String()}, {IP: n.Addr6.String()}}
	object.Status.PodIPs = []v1.PodIP{{IP: p.Addr4.String()}, {IP: p.Addr6.String()}}
	object.Status.Conditions = []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue}}
	if _, err := pods.UpdateStatus(c.tb.Context(), object, metav1.UpdateOptions{}); err != nil {
		c.tb.Fatal(err)
	}
	return p
}

// ready sets the readiness of a Pod.
func (c *cluster) ready(p *lab.Pod, is bool) {
	c.tb.Helper()
	status := v1.ConditionFalse
	if is {
		status = v1.ConditionTrue
	}
	pods := c.client.CoreV1().Pods(namespace)
	object, err := pods.Get(c.tb.Context(), p.Name, metav1.GetOptions{})
	if err == nil {
		object.Status.Conditions = []v1.PodCondition{{Type: v1.PodReady, Status: status}}
		_, err = pods.UpdateStatus(c.tb.Context(), object, metav1.UpdateOptions{})
	}
	if err != nil {
		c.tb.Fatal(err)
	}
}

// terminate deletes a Pod gracefully: it terminates until remove.
func (c *cluster) terminate(p *lab.Pod) { c.tb.Helper(); c.deletePod(p, 600) }

// remove completes the deletion of a Pod, as kubelet does after its end.
func (c *cluster) remove(p *lab.Pod) { c.tb.Helper(); c.deletePod(p, 0) }

func (c *cluster) deletePod(p *lab.Pod, grace int64) {
	c.tb.Helper()
	if err := c.client.CoreV1().Pods(namespace).Delete(c.tb.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: &grace}); err != nil {
		c.tb.Fatal(err)
	}
}

// expose makes a Service of an application with the same name.
func (c *cluster) expose(app string, edits ...func(*v1.Service)) *v1.Service {
	c.tb.Helper()
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: app},
		Spec: v1.ServiceSpec{Selector: labels(app), Ports: []v1.ServicePort{
			{Name: "tcp", Port: 80, Protocol: v1.ProtocolTCP, TargetPort: intstr.FromString("tcp")},
			{Name: "udp", Port: 80, Protocol: v1.ProtocolUDP, TargetPort: intstr.FromString("udp")},
		}},
	}
	for _, edit := range edits {
		edit(s)
	}
	s, err := c.client.CoreV1().Services(namespace).Create(c.tb.Context(), s, metav1.CreateOptions{})
	if err != nil {
		c.tb.Fatal(err)
	}
	return s
}

// edit changes a Service as kubectl edit does.
func (c *cluster) edit(name string, edit func(*v1.Service)) (s *v1.Service) {
	c.tb.Helper()
	services := c.client.CoreV1().Services(namespace)
	err := retry.RetryOnConflict(retry.DefaultRetry, func() (err error) {
		if s, err = services.Get(c.tb.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		edit(s)
		s, err = services.Update(c.tb.Context(), s, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		c.tb.Fatal(err)
	}
	return s
}

// balance sets the load balancer's addresses in the status of a Service.
func (c *cluster) balance(s *v1.Service, addresses ...netip.Addr) {
	c.tb.Helper()
	s.Status.LoadBalancer.Ingress = nil
	for _, a := range addresses {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: a.String(), IPMode: ptr.To(v1.LoadBalancerIPModeVIP)})
	}
	if _, err := c.client.CoreV1().Services(namespace).UpdateStatus(c.tb.Context(), s, metav1.UpdateOptions{}); err != nil {
		c.tb.Fatal(err)
	}
}

// vip returns a Service's ClusterIP with that index, and its first port.
func vip(s *v1.Service, i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(s.Spec.ClusterIPs[i]), uint16(s.Spec.Ports[0].Port))
}

// askLimit is long enough for an answer, and short enough if none is expected.
const askLimit = 300 * time.Millisecond

// answers sends several requests over TCP and UDP, and returns who answered, and the errors.
func answers(from *lab.Sandbox, to netip.AddrPort) (servers, errs []string) {
	const times = 8
	who, what := map[string]bool{}, map[string]bool{}
	for range times {
		for _, network := range []string{"tcp", "udp"} {
			ctx, cancel := context.WithTimeout(context.Background(), askLimit)
			reply, err := from.Ask(ctx, network, to)
			cancel()
			if err != nil {
				what[network+": "+err.Error()] = true
			} else {
				who[reply.Server] = true
			}
			if err != nil && ctx.Err() != nil {
				return slices.Sorted(maps.Keys(who)), slices.Sorted(maps.Keys(what)) // the others would time out as well
			}
		}
	}
	return slices.Sorted(maps.Keys(who)), slices.Sorted(maps.Keys(what))
}

// answer waits until each of the clients gets answers to all requests, from exactly those Pods.
func (c *cluster) answer(what string, to netip.AddrPort, from []*lab.Sandbox, want ...*lab.Pod) {
	c.tb.Helper()
	var names []string
	for _, p := range want {
		names = append(names, p.Name)
	}
	slices.Sort(names)
	for _, client := range from {
		seen := map[string]bool{} // in rounds without errors
		c.await(fmt.Sprintf("%s: %s from %s", what, to, client.Name), func() error {
			who, errs := answers(client, to)
			stranger := slices.ContainsFunc(who, func(name string) bool { return !slices.Contains(names, name) })
			if len(errs) > 0 || stranger {
				clear(seen)
				return fmt.Errorf("%v answer, want %v; errors: %s", who, names, strings.Join(errs, "; "))
			}
			for _, name := range who {
				seen[name] = true
			}
			if len(seen) < len(names) {
				return fmt.Errorf("%v answer, want %v", slices.Sorted(maps.Keys(seen)), names)
			}
			return nil
		})
	}
}

// silent waits until none of the requests is answered.
func (c *cluster) silent(what string, to netip.AddrPort, from ...*lab.Sandbox) {
	c.tb.Helper()
	for _, client := range from {
		c.await(fmt.Sprintf("%s: %s from %s", what, to, client.Name), func() error {
			if who, _ := answers(client, to); len(who) > 0 {
				return fmt.Errorf("%v answer", who)
			}
			return nil
		})
	}
}
