// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

var (
	testStart = time.Date(2026, 7, 1, 12, 0, 0, 500_000_000, time.UTC)
	created   = metav1.NewTime(time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC))
	deleted   = metav1.NewTime(time.Date(2026, 6, 2, 0, 0, 0, 0, time.UTC))
)

// fullMeta has every field set.
func fullMeta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		//lint:ignore SA1019 old servers send it, and it has to go
		Name: name, GenerateName: "gen-", Namespace: "ns1", SelfLink: "/x", UID: "uid-" + "1", ResourceVersion: "42", Generation: 3,
		CreationTimestamp: created, DeletionTimestamp: &deleted, DeletionGracePeriodSeconds: ptr.To[int64](5),
		Labels:          map[string]string{"app": "web"},
		Annotations:     map[string]string{"kubectl.kubernetes.io/last-applied-configuration": "{}"},
		OwnerReferences: []metav1.OwnerReference{{Name: "owner"}},
		Finalizers:      []string{"f"},
		ManagedFields:   []metav1.ManagedFieldsEntry{{Manager: "m"}},
	}
}

func keptMeta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: name, Namespace: "ns1", UID: "uid-" + "1", ResourceVersion: "42", CreationTimestamp: created, DeletionTimestamp: &deleted,
	}
}

func with[T any](object T, change func(*T)) *T {
	change(&object)
	return &object
}

// fullService, fullSlice and fullNode have every field set that can be.
func fullService() v1.Service {
	return v1.Service{
		ObjectMeta: fullMeta("web"),
		Spec: v1.ServiceSpec{
			Ports: []v1.ServicePort{{
				Name: "http", Protocol: v1.ProtocolTCP, AppProtocol: ptr.To("h2c"), Port: 80, NodePort: 30080, TargetPort: intstr.FromString("http"),
			}},
			Selector:                      map[string]string{"app": "web"},
			ClusterIP:                     "10.96.0.10",
			ClusterIPs:                    []string{"10.96.0.10", "fd00::10"},
			Type:                          v1.ServiceTypeLoadBalancer,
			ExternalIPs:                   []string{"192.0.2.1"},
			SessionAffinity:               v1.ServiceAffinityClientIP,
			LoadBalancerIP:                "198.51.100.9",
			LoadBalancerSourceRanges:      []string{"203.0.113.0/24"},
			ExternalName:                  "example.com",
			ExternalTrafficPolicy:         v1.ServiceExternalTrafficPolicyLocal,
			HealthCheckNodePort:           31000,
			PublishNotReadyAddresses:      true,
			SessionAffinityConfig:         &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](600)}},
			IPFamilies:                    []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol},
			IPFamilyPolicy:                ptr.To(v1.IPFamilyPolicyRequireDualStack),
			AllocateLoadBalancerNodePorts: ptr.To(true),
			LoadBalancerClass:             ptr.To("example.com/lb"),
			InternalTrafficPolicy:         ptr.To(v1.ServiceInternalTrafficPolicyLocal),
			TrafficDistribution:           ptr.To("PreferSameZone"),
		},
		Status: v1.ServiceStatus{
			LoadBalancer: v1.LoadBalancerStatus{Ingress: []v1.LoadBalancerIngress{{
				IP: "198.51.100.1", Hostname: "lb.example.com", IPMode: ptr.To(v1.LoadBalancerIPModeVIP), Ports: []v1.PortStatus{{Port: 80}},
			}}},
			Conditions: []metav1.Condition{{Type: "x"}},
		},
	}
}

func fullSlice() discoveryv1.EndpointSlice {
	return discoveryv1.EndpointSlice{
		ObjectMeta:  fullMeta("web-1"),
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To[int32](8080), AppProtocol: ptr.To("h2c")}},
		Endpoints: []discoveryv1.Endpoint{
			{
				Addresses:          []string{"10.244.0.1", "10.244.0.2"},
				Conditions:         discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(false), Terminating: ptr.To(true)},
				Hostname:           ptr.To("h"),
				TargetRef:          &v1.ObjectReference{Name: "pod"},
				DeprecatedTopology: map[string]string{"a": "b"},
				NodeName:           ptr.To("node1"),
				Zone:               ptr.To("zone-a"),
				Hints:              &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "zone-a"}}, ForNodes: []discoveryv1.ForNode{{Name: "node1"}}},
			},
			{Addresses: []string{"10.244.0.3"}, Hints: &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "a"}, {Name: "b"}}}},
			{},
		},
	}
}

func fullNode() v1.Node {
	return v1.Node{
		ObjectMeta: fullMeta("node1"),
		Spec: v1.NodeSpec{
			PodCIDR: "10.244.0.0/24", PodCIDRs: []string{"10.244.0.0/24", "fd01::/64"}, ProviderID: "p", Unschedulable: true,
			Taints: []v1.Taint{{Key: "ToBeDeletedByClusterAutoscaler", Effect: v1.TaintEffectNoSchedule}},
		},
		Status: v1.NodeStatus{
			Addresses:  []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.0.2.7"}},
			Conditions: []v1.NodeCondition{{Type: v1.NodeReady}},
			Images:     []v1.ContainerImage{{Names: []string{"x"}}},
			NodeInfo:   v1.NodeSystemInfo{KernelVersion: "6.18"},
		},
	}
}

// TestTransform has, for each kind, a full object and what must remain of it: all fields that
// the trackers read.
func TestTransform(t *testing.T) {
	fullService, fullSlice, fullNode := fullService(), fullSlice(), fullNode()
	trigger := func(at time.Time) func(*discoveryv1.EndpointSlice) {
		return func(s *discoveryv1.EndpointSlice) {
			s.ObjectMeta = metav1.ObjectMeta{Name: "x", Annotations: map[string]string{
				v1.EndpointsLastChangeTriggerTime: at.Format(time.RFC3339Nano), "other": "x",
			}}
		}
	}

	tests := []struct {
		name string
		in   any
		want any
	}{
		{
			name: "service",
			in:   fullService.DeepCopy(),
			want: with(*fullService.DeepCopy(), func(s *v1.Service) {
				s.ObjectMeta = keptMeta("web")
				s.Spec.Selector, s.Spec.LoadBalancerIP, s.Spec.ExternalName = nil, "", ""
				s.Spec.IPFamilyPolicy, s.Spec.AllocateLoadBalancerNodePorts = nil, nil
				s.Spec.Ports[0].AppProtocol, s.Spec.Ports[0].TargetPort = nil, intstr.IntOrString{}
				s.Status.Conditions, s.Status.LoadBalancer.Ingress[0].Ports = nil, nil
			}),
		},
		{
			name: "labels and annotations of a service",
			in: with(v1.Service{}, func(s *v1.Service) {
				s.Labels = map[string]string{LabelServiceProxyName: "other", v1.IsHeadlessService: "", "app": "web"}
				s.Annotations = map[string]string{"tandem/test": "on", "other": "x"}
			}),
			want: with(v1.Service{}, func(s *v1.Service) {
				s.Labels = map[string]string{LabelServiceProxyName: "other", v1.IsHeadlessService: ""}
				s.Annotations = map[string]string{"tandem/test": "on"}
			}),
		},
		{
			name: "slice",
			in:   fullSlice.DeepCopy(),
			want: with(*fullSlice.DeepCopy(), func(s *discoveryv1.EndpointSlice) {
				s.ObjectMeta = keptMeta("web-1")
				s.Ports[0].AppProtocol = nil
				e := &s.Endpoints[0]
				e.Hostname, e.TargetRef, e.DeprecatedTopology, e.Zone = nil, nil, nil, nil
			}),
		},
		{
			name: "labels of a slice",
			in: with(discoveryv1.EndpointSlice{}, func(s *discoveryv1.EndpointSlice) {
				s.Labels = map[string]string{discoveryv1.LabelServiceName: "web", v1.IsHeadlessService: "", discoveryv1.LabelManagedBy: "x"}
			}),
			want: with(discoveryv1.EndpointSlice{}, func(s *discoveryv1.EndpointSlice) {
				s.Labels = map[string]string{discoveryv1.LabelServiceName: "web", v1.IsHeadlessService: ""}
			}),
		},
		{
			name: "trigger time of this process",
			in:   with(discoveryv1.EndpointSlice{}, trigger(testStart.Add(time.Second))),
			want: with(discoveryv1.EndpointSlice{}, func(s *discoveryv1.EndpointSlice) {
				s.ObjectMeta = metav1.ObjectMeta{Name: "x", Annotations: map[string]string{
					v1.EndpointsLastChangeTriggerTime: testStart.Add(time.Second).Format(time.RFC3339Nano)}}
			}),
		},
		{
			name: "trigger time in whole seconds",
			in:   with(discoveryv1.EndpointSlice{}, trigger(testStart.Truncate(time.Second))),
			want: with(discoveryv1.EndpointSlice{}, func(s *discoveryv1.EndpointSlice) {
				s.ObjectMeta = metav1.ObjectMeta{Name: "x", Annotations: map[string]string{
					v1.EndpointsLastChangeTriggerTime: testStart.Truncate(time.Second).Format(time.RFC3339Nano)}}
			}),
		},
		{
			name: "trigger time from before this process",
			in:   with(discoveryv1.EndpointSlice{}, trigger(testStart.Add(-2*time.Second))),
			want: with(discoveryv1.EndpointSlice{}, func(s *discoveryv1.EndpointSlice) { s.Name = "x" }),
		},
		{
			name: "trigger time that is none",
			in: with(discoveryv1.EndpointSlice{}, func(s *discoveryv1.EndpointSlice) {
				s.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: "yesterday"}
			}),
			want: &discoveryv1.EndpointSlice{},
		},
		{
			name: "node",
			in: with(*fullNode.DeepCopy(), func(n *v1.Node) {
				n.Labels = map[string]string{v1.LabelTopologyZone: "zone-a", v1.LabelTopologyRegion: "r"}
			}),
			want: with(v1.Node{}, func(n *v1.Node) {
				n.ObjectMeta = keptMeta("node1")
				n.Labels = map[string]string{v1.LabelTopologyZone: "zone-a", v1.LabelTopologyRegion: "r"}
				n.Spec.PodCIDRs, n.Spec.Taints = fullNode.Spec.PodCIDRs, fullNode.Spec.Taints
				n.Status.Addresses = fullNode.Status.Addresses
			}),
		},
		{
			name: "pod",
			in: &v1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "1", Labels: map[string]string{"keep": "l"}, Annotations: map[string]string{"keep": "x", "other": "x"}},
				Spec:       v1.PodSpec{NodeName: "node1", HostNetwork: true, Containers: []v1.Container{{Name: "c"}}},
				Status:     v1.PodStatus{Phase: v1.PodRunning, PodIP: "10.244.0.1"},
			},
			want: &v1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "1", Annotations: map[string]string{"keep": "x"}},
				Spec:       v1.PodSpec{HostNetwork: true}, Status: v1.PodStatus{Phase: v1.PodRunning},
			},
		},
		{
			name: "namespace",
			in: &v1.Namespace{
				ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: map[string]string{"keep": "l", "other": "x"}, Annotations: map[string]string{"keep": "x"}},
				Spec:       v1.NamespaceSpec{Finalizers: []v1.FinalizerName{"kubernetes"}}, Status: v1.NamespaceStatus{Phase: v1.NamespaceActive},
			},
			want: &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: map[string]string{"keep": "l"}}},
		},
		{
			name: "empty service",
			in:   &v1.Service{},
			want: &v1.Service{},
		},
		{
			name: "empty config of affinity",
			in:   &v1.Service{Spec: v1.ServiceSpec{SessionAffinityConfig: &v1.SessionAffinityConfig{}}},
			want: &v1.Service{Spec: v1.ServiceSpec{SessionAffinityConfig: &v1.SessionAffinityConfig{}}},
		},
		{
			name: "tombstone",
			in:   cache.DeletedFinalStateUnknown{Key: "ns1/x", Obj: &v1.Service{Spec: v1.ServiceSpec{LoadBalancerIP: "192.0.2.1"}}},
			want: cache.DeletedFinalStateUnknown{Key: "ns1/x", Obj: &v1.Service{Spec: v1.ServiceSpec{LoadBalancerIP: "192.0.2.1"}}},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			trim := &trimmer{
				start: testStart, serviceAnnotations: []string{"tandem/test"}, podAnnotations: []string{"keep"}, namespaceLabels: []string{"keep"},
			}
			for _, pass := range []string{"first", "second"} {
				got, err := trim.transform(test.in)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("%s pass (-want +got):\n%s", pass, diff)
				}
			}
		})
	}
}

func TestTransformShares(t *testing.T) {
	trim := &trimmer{}
	slice := func(name string) *discoveryv1.EndpointSlice {
		s := decodedSlice(t, 1)
		s.Name = name
		if _, err := trim.transform(s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	a, b := slice("a"), slice("b")
	if a.Endpoints[0].NodeName != b.Endpoints[0].NodeName || a.Endpoints[0].Hints != b.Endpoints[0].Hints ||
		a.Endpoints[0].Conditions.Ready != b.Endpoints[1].Conditions.Ready ||
		a.Ports[0].Name != b.Ports[0].Name || a.Ports[0].Port != b.Ports[0].Port || a.Ports[0].Protocol != b.Ports[0].Protocol {
		t.Error("equal values of two slices are not shared")
	}
	if cap(a.Endpoints) != len(a.Endpoints) || cap(a.Endpoints[0].Addresses) != 1 {
		t.Error("spare capacity is kept")
	}
}

func TestPoolForgets(t *testing.T) {
	var p pool[int32]
	first := p.ptr(0)
	for i := range int32(3 * poolLimit) {
		if got := p.ptr(i); *got != i {
			t.Fatalf("ptr(%d) is %d", i, *got)
		}
	}
	if len(p.values) > poolLimit {
		t.Errorf("the pool holds %d values, limit %d", len(p.values), poolLimit)
	}
	if *first != 0 {
		t.Error("a value that was handed out has changed")
	}
}

// decodedSlice is a slice as the controller writes it for ten pods, decoded
// from protobuf as the client does it.
func decodedSlice(t testing.TB, i int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("service-%05d-x7k2p", i), GenerateName: fmt.Sprintf("service-%05d-", i), Namespace: fmt.Sprintf("ns-%d", i%50),
			UID: "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0", ResourceVersion: "1234567", Generation: 12, CreationTimestamp: created,
			Labels: map[string]string{
				discoveryv1.LabelServiceName: fmt.Sprintf("service-%05d", i), discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io", "app": "web",
			},
			Annotations:     map[string]string{v1.EndpointsLastChangeTriggerTime: "2026-01-01T00:00:00Z"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: fmt.Sprintf("service-%05d", i), UID: "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f1"}},
			ManagedFields:   []metav1.ManagedFieldsEntry{{Manager: "kube-controller-manager", FieldsV1: metav1.NewFieldsV1(strings.Repeat("x", 800))}},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To[int32](8080)}},
	}
	for e := range 10 {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", 244+i/60000, i/250%250, e+1)},
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
			NodeName:   ptr.To(fmt.Sprintf("node-%04d", (i+e)%1000)),
			Zone:       ptr.To("zone-a"),
			TargetRef:  &v1.ObjectReference{Kind: "Pod", Namespace: "ns-1", Name: fmt.Sprintf("service-%05d-6b7f9-%d", i, e), UID: "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f2"},
			Hints:      &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "zone-a"}}},
		})
	}
	return decoded(t, s, &discoveryv1.EndpointSlice{})
}

func decodedService(t testing.TB, i int) *v1.Service {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("service-%05d", i), Namespace: fmt.Sprintf("ns-%d", i%50),
			UID: "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0", ResourceVersion: "1234567", CreationTimestamp: created,
			Labels:        map[string]string{"app": "web"},
			Annotations:   map[string]string{"kubectl.kubernetes.io/last-applied-configuration": string(make([]byte, 500))},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl", FieldsV1: metav1.NewFieldsV1(strings.Repeat("x", 800))}},
		},
		Spec: v1.ServiceSpec{
			Ports:    []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, Port: 80, TargetPort: intstr.FromString("http")}},
			Selector: map[string]string{"app": "web"}, ClusterIP: fmt.Sprintf("10.96.%d.%d", i/250, i%250+1), ClusterIPs: []string{fmt.Sprintf("10.96.%d.%d", i/250, i%250+1)},
			Type: v1.ServiceTypeClusterIP, SessionAffinity: v1.ServiceAffinityNone, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			IPFamilyPolicy: ptr.To(v1.IPFamilyPolicySingleStack), InternalTrafficPolicy: ptr.To(v1.ServiceInternalTrafficPolicyCluster),
		},
	}
	return decoded(t, s, &v1.Service{})
}

func decoded[T interface {
	Marshal() ([]byte, error)
	Unmarshal([]byte) error
}](t testing.TB, from, to T) T {
	data, err := from.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if err := to.Unmarshal(data); err != nil {
		t.Fatal(err)
	}
	return to
}

// heapPerObject is what one of n objects that build makes keeps on the heap.
func heapPerObject(n int, build func(i int) any) float64 {
	objects := make([]any, n)
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for i := range objects {
		objects[i] = build(i)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(objects)
	return float64(int64(after.HeapAlloc)-int64(before.HeapAlloc)) / float64(n)
}

// With 10,000 Services of ten endpoints the cache must leave most of 100 MiB
// to the rest of the process.
func TestMemory(t *testing.T) {
	for _, test := range []struct {
		kind  string
		build func(testing.TB, int) any
		limit float64
	}{
		{"EndpointSlice", func(t testing.TB, i int) any { return decodedSlice(t, i) }, 2304},
		{"Service", func(t testing.TB, i int) any { return decodedService(t, i) }, 1280},
	} {
		trim := &trimmer{start: testStart}
		whole := heapPerObject(2000, func(i int) any { return test.build(t, i) })
		trimmed := heapPerObject(2000, func(i int) any {
			object, err := trim.transform(test.build(t, i))
			if err != nil {
				t.Fatal(err)
			}
			return object
		})
		t.Logf("%s: %.0f bytes whole, %.0f trimmed", test.kind, whole, trimmed)
		if trimmed > test.limit {
			t.Errorf("a trimmed %s keeps %.0f bytes, limit %.0f", test.kind, trimmed, test.limit)
		}
	}
}

func BenchmarkTransform(b *testing.B) {
	b.Run("slice", func(b *testing.B) {
		b.ReportAllocs()
		trim := &trimmer{start: testStart}
		for i := range b.N {
			b.StopTimer()
			slice := decodedSlice(b, i%10000)
			b.StartTimer()
			if _, err := trim.transform(slice); err != nil {
				b.Fatal(err)
			}
		}
	})
}
