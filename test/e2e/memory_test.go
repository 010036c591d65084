// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/binary"
	"github.com/tandem-proxy/tandem/test/lab"
)

// BenchmarkMemory starts the process with 10,000 Services of 10 endpoints and
// reports its resident memory once it has programmed them: from manifests, and
// from an API server (which uses JSON here, so that decoding costs more than
// with protobuf).
func BenchmarkMemory(b *testing.B) {
	const services, endpoints = 10000, 10
	// The released binary: the test program is larger.
	shipped, err := binary.KubeProxy(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	for _, source := range []string{"manifests", "api"} {
		b.Run(source, func(b *testing.B) {
			var rss, peak, anon, seconds float64
			for range b.N {
				l := lab.NewT(b)
				node := l.Node("node1")
				began := time.Now()
				var p *process
				if source == "manifests" {
					dir := b.TempDir()
					writeCluster(b, dir, services, endpoints)
					began = time.Now()
					p = run(b, node, shipped, "--manifests="+dir)
				} else {
					p = run(b, node, shipped, "--master="+serveAPI(b, node, services, endpoints))
				}
				p.Await(b, 2*time.Minute, "all Services", p.Says(fmt.Sprintf(`servicePorts=%d`, services)))
				seconds += time.Since(began).Seconds()
				// The Go runtime returns unused memory in the background.
				p.Await(b, 2*time.Minute, "the memory to settle", func() error {
					before := p.Memory(b, "VmRSS")
					<-time.After(5 * time.Second)
					if now := p.Memory(b, "VmRSS"); now < before*0.995 {
						return fmt.Errorf("%.1f MiB, before %.1f", now, before)
					}
					return nil
				})
				rss += p.Memory(b, "VmRSS")
				peak += p.Memory(b, "VmHWM")
				anon += p.Memory(b, "RssAnon")
				_ = p.Close()
				cleanup(b, node)
			}
			b.ReportMetric(rss/float64(b.N), "RSS-MiB")
			b.ReportMetric(anon/float64(b.N), "anon-MiB")
			b.ReportMetric(peak/float64(b.N), "peak-MiB")
			b.ReportMetric(seconds/float64(b.N), "seconds-to-programmed")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// clusterObjects are Services and slices with all fields that an API server sends.
func clusterObjects(services, endpoints int) (ss []v1.Service, es []discoveryv1.EndpointSlice) {
	managed := []metav1.ManagedFieldsEntry{{Manager: "kubectl", Operation: "Apply", FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"f:ports":{}}}`)}}
	for i := range services {
		name, ip := fmt.Sprintf("service-%d", i), fmt.Sprintf("10.100.%d.%d", i>>8, i&255)
		ss = append(ss, v1.Service{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: name, UID: "6f2d4f3c-8a51-4c36-9f5e-1c0e5d1f8a11", ResourceVersion: "1", ManagedFields: managed},
			Spec: v1.ServiceSpec{Type: v1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, Selector: map[string]string{"app": name},
				Ports: []v1.ServicePort{{Name: "http", Port: 80, Protocol: v1.ProtocolTCP}}},
		})
		slice := discoveryv1.EndpointSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: name + "-abcde", UID: "6f2d4f3c-8a51-4c36-9f5e-1c0e5d1f8a12", ResourceVersion: "1",
				Labels: map[string]string{discoveryv1.LabelServiceName: name, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"}, ManagedFields: managed},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080), Protocol: ptr.To(v1.ProtocolTCP)}},
		}
		for j := range endpoints {
			n := i*endpoints + j
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
				Addresses:  []string{fmt.Sprintf("172.%d.%d.%d", 16+n>>16, n>>8&255, n&255)},
				Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
				NodeName:   ptr.To(fmt.Sprintf("node%d", n%50)), Zone: ptr.To("zone-a"),
				TargetRef: &v1.ObjectReference{Kind: "Pod", Namespace: "bench", Name: fmt.Sprintf("%s-%d", name, j), UID: "6f2d4f3c-8a51-4c36-9f5e-1c0e5d1f8a13"},
			})
		}
		es = append(es, slice)
	}
	return ss, es
}

func writeCluster(b *testing.B, dir string, services, endpoints int) {
	b.Helper()
	ss, es := clusterObjects(services, endpoints)
	list := metav1.List{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "List"}}
	for i := range ss {
		list.Items = append(list.Items, runtime.RawExtension{Object: &ss[i]}, runtime.RawExtension{Object: &es[i]})
	}
	text, err := json.Marshal(&list)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "cluster.json"), text, 0o644)
	}
	if err != nil {
		b.Fatal(err)
	}
}

// run starts a binary on the node.
func run(b *testing.B, node *lab.Node, binary, source string, more ...string) *process {
	b.Helper()
	return begin(b, &process{lab.Watch(node.Command(b.Context(), binary, append(more, "--proxy-mode=ebpf", source, "--hostname-override="+node.Name,
		"--ebpf-cgroup-root="+node.CgroupPath(), "-v=2")...))})
}

// serveAPI runs an API server with the cluster's objects, without any changes, in this
// process. It returns its URL in the node's namespace.
func serveAPI(b *testing.B, node *lab.Node, services, endpoints int) string {
	b.Helper()
	ss, es := clusterObjects(services, endpoints)
	answers := map[string]any{
		"/api/v1/services": &v1.ServiceList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ServiceList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"}, Items: ss},
		"/apis/discovery.k8s.io/v1/endpointslices": &discoveryv1.EndpointSliceList{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSliceList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"}, Items: es},
		"/apis/networking.k8s.io/v1/servicecidrs": &networkingv1.ServiceCIDRList{
			TypeMeta: metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDRList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"},
			Items: []networkingv1.ServiceCIDR{{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.100.0.0/16"}}}}},
		"/api/v1/nodes": &v1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"}},
	}
	texts := map[string][]byte{}
	for path, answer := range answers {
		text, err := json.Marshal(answer)
		if err != nil {
			b.Fatal(err)
		}
		texts[path] = text
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, ok := texts[r.URL.Path]
		w.Header().Set("Content-Type", "application/json")
		switch {
		case !ok:
			w.WriteHeader(http.StatusCreated) // an Event
			fmt.Fprint(w, `{"apiVersion":"events.k8s.io/v1","kind":"Event"}`)
		case r.URL.Query().Get("sendInitialEvents") != "":
			w.WriteHeader(http.StatusUnprocessableEntity) // as a server without WatchList
			fmt.Fprint(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"Invalid","code":422}`)
		case r.URL.Query().Get("watch") != "":
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			_, _ = w.Write(text)
		}
	})
	_, url, err := node.ServeHTTP(handler)
	if err != nil {
		b.Fatal(err)
	}
	return url
}
