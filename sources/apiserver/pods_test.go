// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

func makePod(name, annotation string) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns1", Name: name, UID: "1", Annotations: map[string]string{"keep": annotation, "other": "x"}},
		Spec:       v1.PodSpec{NodeName: "node1", HostNetwork: true, Containers: []v1.Container{{Name: "c"}}},
		Status:     v1.PodStatus{Phase: v1.PodRunning, PodIP: "10.244.0.1"},
	}
}

func makeNamespace(name, label string) *v1.Namespace {
	return &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"keep": label, "other": "x"}}}
}

func (r *recorder) OnPod(p *v1.Pod) {
	r.note("pod %s %s %v %v %s %d", p.Name, p.UID, p.Annotations, p.Spec.HostNetwork, p.Status.Phase, len(p.Spec.Containers))
}
func (r *recorder) OnPodDelete(p *v1.Pod)             { r.note("delete pod %s/%s", p.Namespace, p.Name) }
func (r *recorder) OnPodsSynced()                     { r.note("pods synced") }
func (r *recorder) OnNamespace(n *v1.Namespace)       { r.note("namespace %s %v", n.Name, n.Labels) }
func (r *recorder) OnNamespaceDelete(n *v1.Namespace) { r.note("delete namespace %s", n.Name) }
func (r *recorder) OnNamespacesSynced()               { r.note("namespaces synced") }

var podOptions = PodOptions{NodeName: "node1", Annotations: []string{"keep"}, Labels: []string{"keep"}, PodConsequence: "no pods", NamespaceConsequence: "no namespaces"}

// TestPods: the handler is told of changes of Pods and Namespaces, with the fields that count.
func TestPods(t *testing.T) {
	api := newFakeAPI(t)
	api.put(makePod("a", "1"))
	api.put(makeNamespace("ns1", "1"))
	rec := newRecorder()
	run(t, NewPods(api.client(), rec, podOptions))
	rec.waitFor(t, "pod a 1 map[keep:1] true Running 0")
	rec.waitFor(t, "pods synced")
	rec.waitFor(t, "namespace ns1 map[keep:1]")
	rec.waitFor(t, "namespaces synced")
	api.put(makePod("a", "2"))
	rec.waitFor(t, "pod a 1 map[keep:2] true Running 0")
	api.put(makeNamespace("ns1", "2"))
	rec.waitFor(t, "namespace ns1 map[keep:2]")
	api.remove(makePod("a", ""), false)
	rec.waitFor(t, "delete pod ns1/a")
	api.remove(makeNamespace("ns1", ""), false)
	rec.waitFor(t, "delete namespace ns1")
	for _, r := range api.seen(func(r request) bool { return r.resource == "pods" }) {
		if r.fields != "spec.nodeName=node1" {
			t.Errorf("%s of pods with the selector %q", r.verb, r.fields)
		}
	}
}

// hostPortRecorder records hostPorts.
type hostPortRecorder struct{ *recorder }

func (r hostPortRecorder) OnPod(p *v1.Pod) {
	r.note("pod %s %v %v", p.Name, p.Spec.Containers, p.Status.PodIPs)
}
func (r hostPortRecorder) OnPodsDenied(error) { r.note("denied") }

// TestHostPorts: the handler is told of hostPorts and addresses of Pods, and once that it may not read them. It is told of them as soon as it may.
func TestHostPorts(t *testing.T) {
	api := newFakeAPI(t)
	api.lacks["pods"] = http.StatusForbidden
	pod := makePod("a", "1")
	port := v1.ContainerPort{ContainerPort: 80, HostPort: 8080}
	pod.Spec.HostNetwork, pod.Status.PodIPs = false, []v1.PodIP{{IP: "10.244.0.1"}}
	pod.Spec.Containers = []v1.Container{{Name: "without"}, {Name: "with", Image: "image", Ports: []v1.ContainerPort{port}}}
	api.put(pod)
	api.put(makePod("host", "1"))
	rec := newRecorder()
	s := NewHostPorts(api.client(), hostPortRecorder{rec}, HostPortOptions{NodeName: "node1", Consequence: "no hostPorts"})
	s.absentInterval = time.Millisecond
	run(t, s)
	rec.waitFor(t, "denied")
	api.waitForRequests(3, func(r request) bool { return r.resource == "pods" && r.verb == "review" })
	api.update(func() { clear(api.lacks) })
	rec.waitFor(t, "pods synced")
	rec.waitFor(t, fmt.Sprintf("pod a %v %v", []v1.Container{{}, {Ports: []v1.ContainerPort{port}}}, pod.Status.PodIPs))
	rec.waitFor(t, "pod host [] []")
	if n := strings.Count(strings.Join(rec.all(), "\n"), "denied"); n != 1 {
		t.Errorf("told %d times that it is denied, want once", n)
	}
	if asked := api.seen(func(r request) bool { return r.resource == "namespaces" }); asked != nil {
		t.Errorf("asked for namespaces: %+v", asked)
	}
}

// nodesRecorder records Nodes.
type nodesRecorder struct{ *recorder }

func (r nodesRecorder) OnNode(n *v1.Node) {
	r.note("node %s %v %v", n.Name, n.Status.Addresses, n.Labels)
}
func (r nodesRecorder) OnNodesSynced() { r.note("nodes synced") }

// TestNodes: the handler is told of the addresses of all Nodes.
func TestNodes(t *testing.T) {
	api := newFakeAPI(t)
	makeNode := func(name, addr string) *v1.Node {
		return &v1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"zone": "a"}},
			Status:     v1.NodeStatus{Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: addr}}, Images: []v1.ContainerImage{{}}},
		}
	}
	api.put(makeNode("node1", "192.0.2.1"))
	api.put(makeNode("node2", "192.0.2.2"))
	rec := nodesRecorder{newRecorder()}
	run(t, NewNodes(api.client(), rec, NodesOptions{Consequence: "any sender"}))
	rec.waitFor(t, "node node1 [{InternalIP 192.0.2.1}] map[]")
	rec.waitFor(t, "node node2 [{InternalIP 192.0.2.2}] map[]")
	rec.waitFor(t, "nodes synced")
	api.put(makeNode("node2", "192.0.2.3"))
	rec.waitFor(t, "node node2 [{InternalIP 192.0.2.3}] map[]")
	api.remove(makeNode("node1", ""), false)
	rec.waitFor(t, "delete node node1")
}

// TestPodsForbidden: a role without Pods is logged once, and Namespaces are not asked for. So is one without
// Namespaces. No request is refused. They count once they are allowed.
func TestPodsForbidden(t *testing.T) {
	for resource, consequence := range map[string]string{"pods": "no pods", "namespaces": "no namespaces"} {
		for _, streamLists := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s streamLists=%t", resource, streamLists), func(t *testing.T) {
				logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
				api := newFakeAPI(t)
				api.lacks[resource], api.lacks["namespaces"], api.streamLists = http.StatusForbidden, http.StatusForbidden, streamLists
				api.put(makePod("a", "1"))
				api.put(makeNamespace("ns1", "1"))
				rec := newRecorder()
				s := NewPods(api.client(), rec, podOptions)
				s.absentInterval = time.Millisecond
				runIn(t, klog.NewContext(t.Context(), logger), s)
				if resource == "namespaces" {
					rec.waitFor(t, "pods synced")
				}
				api.waitForRequests(2, func(r request) bool { return r.resource == resource && r.verb == "review" })
				if asked := api.seen(func(r request) bool { return r.resource == resource && r.verb != "review" }); asked != nil {
					t.Errorf("requests that are refused: %+v", asked)
				}
				if asked := api.seen(func(r request) bool { return r.resource == "namespaces" }); resource == "pods" && asked != nil {
					t.Errorf("asked for namespaces without pods: %+v", asked)
				}
				text := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
				if n := strings.Count(text, "continuing without it"); n != 1 || !strings.Contains(text, consequence) || strings.Contains(text, "Cannot list") {
					t.Errorf("logged %d times, want once:\n%s", n, text)
				}
				api.update(func() { clear(api.lacks) })
				rec.waitFor(t, "pods synced")
				rec.waitFor(t, "namespace ns1 map[keep:1]")
			})
		}
	}
}
