// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// makePod makes a running Pod of namespace shop with the ports, each [HOSTIP:]HOSTPORT=PORT[/PROTOCOL].
func makePod(name, addrs string, ports ...string) *v1.Pod {
	p := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(strings.ToUpper(name)), CreationTimestamp: metav1.NewTime(time.Unix(100, 0))},
		Status:     v1.PodStatus{Phase: v1.PodRunning},
	}
	for addr := range strings.FieldsSeq(addrs) {
		p.Status.PodIPs = append(p.Status.PodIPs, v1.PodIP{IP: addr})
	}
	var c v1.Container
	for _, text := range ports {
		var port v1.ContainerPort
		text, protocol, _ := strings.Cut(text, "/")
		port.Protocol = v1.Protocol(protocol)
		host, to, _ := strings.Cut(text, "=")
		if i := strings.LastIndexByte(host, ':'); i >= 0 {
			port.HostIP, host = strings.Trim(host[:i], "[]"), host[i+1:]
		}
		if _, err := fmt.Sscan(host, &port.HostPort); err != nil {
			panic(err)
		}
		if _, err := fmt.Sscan(to, &port.ContainerPort); err != nil {
			panic(err)
		}
		c.Ports = append(c.Ports, port)
	}
	p.Spec.Containers = []v1.Container{c}
	return p
}

func TestHostPorts(t *testing.T) {
	const routes = " pod=ipv4/cluster,any-source host=ipv4/cluster,masquerade outside=ipv4/local"
	const routes6 = " pod=ipv6/cluster,any-source host=ipv6/cluster,masquerade outside=ipv6/local"
	for _, test := range []struct {
		name     string
		pod      *v1.Pod
		want     []string // frontends and backends
		problems []string
	}{
		{
			name: "both families", pod: makePod("web", "10.244.0.5 fd00:10:244::5", "8080=80"),
			want: []string{
				"0.0.0.0:8080 HostPort" + routes, "[::]:8080 HostPort" + routes6,
				"10.244.0.5:80 cluster,local on-node", "[fd00:10:244::5]:80 cluster,local on-node",
			},
		},
		{
			name: "protocols", pod: makePod("web", "10.244.0.5", "53=53/UDP", "53=53/TCP"),
			want: []string{
				"0.0.0.0:53 HostPort" + routes, "10.244.0.5:53 cluster,local on-node",
				"0.0.0.0:53 HostPort" + routes, "10.244.0.5:53 cluster,local on-node",
			},
		},
		{
			name: "hostIPs", pod: makePod("web", "10.244.0.5", "192.0.2.1:8080=80", "127.0.0.1:8080=81", "0.0.0.0:8081=80", "[fd00::1]:8080=80", "[::]:8082=80"),
			want: []string{
				"192.0.2.1:8080 HostIP" + routes, "10.244.0.5:80 cluster,local on-node",
				"127.0.0.1:8080 HostIP" + routes, "10.244.0.5:81 cluster,local on-node",
				"0.0.0.0:8081 HostPort" + routes, "10.244.0.5:80 cluster,local on-node",
			},
		},
		{name: "no address yet", pod: makePod("web", "", "8080=80")},
		{name: "no hostPort", pod: makePod("web", "10.244.0.5", "0=80")},
		{name: "in the network of the node", pod: func() *v1.Pod {
			p := makePod("web", "10.244.0.5", "8080=80")
			p.Spec.HostNetwork = true
			return p
		}()},
		{name: "ended", pod: func() *v1.Pod {
			p := makePod("web", "10.244.0.5", "8080=80")
			p.Status.Phase = v1.PodFailed
			return p
		}()},
		{
			name: "terminating", pod: func() *v1.Pod {
				p := makePod("web", "10.244.0.5", "8080=80")
				p.DeletionTimestamp = new(metav1.Now())
				return p
			}(),
			want: []string{"0.0.0.0:8080 HostPort" + routes, "10.244.0.5:80 cluster,local on-node terminating"},
		},
		{
			name: "invalid ports", pod: makePod("web", "10.244.0.5", "70000=80", "8080=0", "8081=80/ICMP", "8083=80"),
			want:     []string{"0.0.0.0:8083 HostPort" + routes, "10.244.0.5:80 cluster,local on-node"},
			problems: []string{"spec.containers[0].ports[0].hostPort", "spec.containers[0].ports[1].containerPort", "spec.containers[0].ports[2].protocol"},
		},
		{
			name: "invalid addresses", pod: makePod("web", "10.244.0.5 10.244.0.6 x", "192.0.2.300:8082=80", "8083=80", "8083=81"),
			want:     []string{"0.0.0.0:8083 HostPort" + routes, "10.244.0.5:80 cluster,local on-node"},
			problems: []string{"spec.containers[0].ports[0].hostIP", "spec.containers[0].ports[2].hostPort", "status.podIPs[2].ip"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			var problems []string
			tracker := NewChangeTracker("node1", time.Time{}, ReporterFunc(func(p Problem) {
				if p.Kind != "Pod" || p.Object.String() != "shop/web" || p.UID != "WEB" || p.Message == "" {
					t.Errorf("reported %+v", p)
				}
				problems = append(problems, p.Field)
			}))
			table := NewTable(Facts{Pods: Detector{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}}}, Policy{})
			tracker.UpdatePod(test.pod)
			var got []string
			for _, c := range table.Apply(tracker.Take()) {
				for i := range c.New.Frontends {
					got = append(got, c.New.Frontends[i].String())
				}
				if c.New.Frontends == nil {
					continue
				}
				for i := range c.New.Backends {
					got = append(got, c.New.Backends[i].String())
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.problems, problems); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
			tracker.UpdatePod(test.pod)
			if changes := table.Apply(tracker.Take()); len(changes) != 0 {
				t.Errorf("the same Pod again changes %v", changes)
			}
			tracker.DeletePod(test.pod)
			table.Apply(tracker.Take())
			if table.Len() != 0 {
				t.Errorf("%d service ports stay after the Pod is gone", table.Len())
			}
		})
	}
}

// TestHostPortConflicts: a NodePort comes first, then the older Pod. The Pod that has to wait is reported.
func TestHostPortConflicts(t *testing.T) {
	var problems []Problem
	tracker := NewChangeTracker("node1", time.Time{}, nil)
	p := &Proxier{reporter: ReporterFunc(func(p Problem) { problems = append(problems, p) })}
	table := NewTable(Facts{}, Policy{})
	old, young := makePod("old", "10.244.0.5", "30080=80"), makePod("young", "10.244.0.6", "30080=80")
	young.CreationTimestamp = metav1.NewTime(time.Unix(200, 0))
	service := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "pod", CreationTimestamp: metav1.NewTime(time.Unix(300, 0))},
		Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.10", Ports: []v1.ServicePort{{Port: 80, NodePort: 30080}}},
	}
	holder := func() string {
		p.reportProblems(table.Apply(tracker.Take()))
		for _, c := range table.All() {
			if i := c.New.find(netip.MustParseAddrPort("0.0.0.0:30080")); i >= 0 && c.New.Frontends[i].Conflict == nil {
				return c.New.Name.String()
			}
		}
		return ""
	}
	tracker.UpdatePod(young)
	tracker.UpdatePod(old)
	if got := holder(); got != "shop/pod:old:30080" {
		t.Errorf("%q has the port, want the older Pod", got)
	}
	if len(problems) != 1 || problems[0].Kind != "Pod" || problems[0].Object.Name != "young" || problems[0].UID != "YOUNG" || problems[0].Field != "spec.containers" {
		t.Errorf("reported %+v", problems)
	}
	tracker.UpdateService(service)
	if got := holder(); got != "shop/pod" {
		t.Errorf("%q has the port, want the Service with the NodePort", got)
	}
	tracker.DeleteService(types.NamespacedName{Namespace: "shop", Name: "pod"})
	tracker.DeletePod(old)
	if got := holder(); got != "shop/pod:young:30080" {
		t.Errorf("%q has the port, want the Pod that is left", got)
	}
}

// TestUnservedHostPorts: a hostPort that cannot be served is reported once.
func TestUnservedHostPorts(t *testing.T) {
	var problems []string
	tracker := NewChangeTracker("node1", time.Time{}, nil)
	p := &Proxier{reporter: ReporterFunc(func(p Problem) { problems = append(problems, p.Object.String()+" "+p.Reason+" "+p.Message) })}
	table := NewTable(Facts{}, Policy{NoLoopbackHostIPs: true})
	pod := makePod("web", "10.244.0.5", "127.0.0.1:8080=80", "[fd00::1]:8081=80", "8082=80")
	tracker.UpdatePod(pod)
	p.reportProblems(table.Apply(tracker.Take()))
	tracker.UpdatePod(makePod("web", "10.244.0.6", "127.0.0.1:8080=80", "[fd00::1]:8081=80", "8082=80"))
	p.reportProblems(table.Apply(tracker.Take()))
	if len(problems) != 2 || !strings.Contains(problems[0]+problems[1], "127.0.0.1:8080/TCP") || !strings.Contains(problems[0]+problems[1], "[fd00::1]:8081/TCP") || !strings.HasPrefix(problems[0], "shop/web Unsupported ") {
		t.Errorf("reported %q", problems)
	}
}

// TestPodsBesideSyncs: Pods change while a table applies what was taken, which the race detector watches.
func TestPodsBesideSyncs(t *testing.T) {
	tracker, table := NewChangeTracker("node1", time.Time{}, nil), NewTable(Facts{}, Policy{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range 20000 {
			tracker.UpdatePod(makePod("web", fmt.Sprintf("10.244.0.%d", 1+i%2), "8080=80"))
		}
	})
	for range 20000 {
		table.Apply(tracker.Take())
	}
	wg.Wait()
	table.Apply(tracker.Take())
	if table.Len() != 1 {
		t.Errorf("%d service ports, want 1", table.Len())
	}
}

// TestManyHostPorts: a Pod does not take the place of all Services.
func TestManyHostPorts(t *testing.T) {
	problems := 0
	tracker := NewChangeTracker("node1", time.Time{}, ReporterFunc(func(Problem) { problems++ }))
	pod := makePod("web", "10.244.0.5")
	for i := range int32(5000) {
		pod.Spec.Containers[0].Ports = append(pod.Spec.Containers[0].Ports, v1.ContainerPort{HostPort: 1 + i, ContainerPort: 80})
	}
	tracker.UpdatePod(pod)
	if n := len(NewTable(Facts{}, Policy{}).Apply(tracker.Take())); n != maxHostPorts || problems != maxReported {
		t.Errorf("%d hostPorts are served, want %d; %d problems, want %d", n, maxHostPorts, problems, maxReported)
	}
}

// TestHostPortAtLoopback: pods and clients outside have loopback addresses of their own.
func TestHostPortAtLoopback(t *testing.T) {
	tracker, table := NewChangeTracker("node1", time.Time{}, nil), NewTable(Facts{}, Policy{})
	tracker.UpdatePod(makePod("web", "10.244.0.5", "127.0.0.1:8080=80"))
	table.Apply(tracker.Take())
	for from, want := range map[string]Outcome{"127.0.0.1": Forward, "10.244.0.9": Pass} {
		flow := Flow{Source: netip.AddrPortFrom(netip.MustParseAddr(from), 4000), Destination: netip.MustParseAddrPort("127.0.0.1:8080"), Protocol: TCP}
		if from == "10.244.0.9" {
			flow.Device = "eth0"
		}
		if got := table.Explain(flow).Outcome; got != want {
			t.Errorf("from %s: %v, want %v", from, got, want)
		}
	}
}
