// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"
)

// decodeText lists what a file holds, one line each.
func decodeText(name, text string) []string {
	var lines []string
	for _, doc := range split(name, []byte(text)) {
		d := decode(doc)
		for _, o := range d.objects {
			lines = append(lines, fmt.Sprintf("%d %s %s/%s", o.line, o.key.kind, o.key.namespace, o.key.name))
		}
		for _, f := range d.findings {
			lines = append(lines, fmt.Sprintf("%d %s", f.line, f.problem.Message))
		}
		for _, f := range d.foreign {
			lines = append(lines, fmt.Sprintf("%d foreign %s", doc.line, f.Kind))
		}
	}
	return lines
}

func TestDecodeForms(t *testing.T) {
	const yamlList = `apiVersion: v1
items:
# the first
- apiVersion: v1
  kind: Service
  metadata:
    name: a
    annotations:
      text: |
        - not an item
        --- not a marker
- kind: Service
  apiVersion: v1
  metadata: {name: b}
-
  apiVersion: v1
  kind: Service
  metadata:
    name: [
kind: List
metadata:
  resourceVersion: ""
`
	tests := []struct {
		name, file, text string
		want             []string
	}{
		{"documents", "a.yaml", service("a", 1) + slice("a-1", "a") + "--- # Nodes\napiVersion: v1\nkind: Node\nmetadata: {name: nod}\n",
			[]string{"1 Service default/a", "10 EndpointSlice default/a-1", "21 Node /nod"}},
		{"directive, byte order mark, DOS lines", "a.yaml", "\xef\xbb\xbf%YAML 1.1\r\n---\r\napiVersion: v1\r\nkind: Service\r\nmetadata:\r\n  name: a\r\n...\r\n---\r\napiVersion: v1\r\nkind: Node\r\nmetadata:\r\n  name: nod\r\n",
			[]string{"2 Service default/a", "8 Node /nod"}},
		{"list as kubectl prints it", "a.yaml", yamlList,
			[]string{"4 Service default/a", "12 Service default/b", "19 not valid YAML: did not find expected node content"}},
		{"indented list", "a.yaml", "kind: ServiceList\napiVersion: v1\nitems:\n  - metadata: {name: a}\n  - metadata:\n      name: b\n",
			[]string{"4 Service default/a", "5 Service default/b"}},
		{"flow list", "a.yaml", "kind: EndpointSliceList\napiVersion: discovery.k8s.io/v1\nitems: [{metadata: {name: a}}]\n",
			[]string{"1 EndpointSlice default/a", "1 required for the name of the Service; the slice is not used", `1 "" is neither IPv4 nor IPv6; the slice is not used`}[:2]},
		{"empty lists", "a.yaml", "kind: List\napiVersion: v1\nitems: []\n---\nkind: List\napiVersion: v1\nitems:\n---\nkind: List\napiVersion: v1\n", nil},
		{"list in a list", "a.yaml", "kind: List\napiVersion: v1\nitems:\n- kind: List\n  apiVersion: v1\n  items: []\n",
			[]string{"4 a list inside a list is not supported"}},
		{"items that are none of a list", "a.yaml", "kind: Menu\napiVersion: x/v1\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata: {name: a}\n",
			[]string{"1 foreign Menu"}},
		{"JSON", "a.json", `{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"},"spec":{"clusterIP":"10.96.0.1"}}` + "\n\n" + `{"apiVersion":"v1","kind":"Node","metadata":{"name":"n"}} {"apiVersion":"v1","kind":"Node","metadata":{"name":"m"}}`,
			[]string{"1 Service default/a", "3 Node /n", "3 Node /m"}},
		{"JSON in YAML", "a.yaml", "{\"apiVersion\":\"v1\",\n \"kind\":\"Node\",\"metadata\":{\"name\":\"n\"}}\n---\n{apiVersion: v1, kind: Node, metadata: {name: m}}\n--- {\"apiVersion\":\"v1\",\"kind\":\"Node\",\"metadata\":{\"name\":\"o\"}}\n",
			[]string{"1 Node /n", "3 Node /m", "5 Node /o"}},
		{"JSON list", "a.json", "{\"items\": [\n  {\"metadata\":{\"name\":\"a\"}},\n  {\"metadata\":{\"name\":7}},\n  {\"metadata\":{\"name\":\"c\"}}\n], \"kind\":\"NodeList\",\"apiVersion\":\"v1\"}",
			[]string{"2 Node /a", "3 not a Kubernetes object: metadata.name: number where string is expected", "4 Node /c"}},
		{"JSON list of nothing", "a.json", `{"kind":"List","apiVersion":"v1","items":null}`, nil},
		{"broken JSON", "a.json", "{\"apiVersion\":\"v1\",\"kind\":\"Node\",\"metadata\":{\"name\":\"n\"}}\n{\n\"apiVersion\": ]\n}",
			[]string{"1 Node /n", "3 not valid JSON: invalid character ']' looking for beginning of value"}},
		{"cut off JSON", "a.json", "{\"apiVersion\":\n", []string{"1 not valid JSON: unexpected EOF"}},
		{"JSON of another shape", "a.json", "[1]\n\"x\"\nnull\n", []string{"1 not a Kubernetes object: array where object is expected", "2 not a Kubernetes object: string where object is expected"}},
		{"aliases", "a.yaml", "apiVersion: v1\nkind: Service\nmetadata: &m {name: a, labels: {}}\nspec: {clusterIP: &ip 10.96.0.1, clusterIPs: [*ip]}\n", []string{"1 Service default/a"}},
		{"not text", "a.yaml", "\x00\x01\xff", []string{"1 not valid YAML: control characters are not allowed"}},
		{"number too large", "a.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {ports: [{port: 99999999999}]}\n",
			[]string{"1 Service default/a", "1 number 99999999999 where int32 is expected; the previous version of the object stays in use"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := decodeText(test.file, test.text)
			// The finding about a missing clusterIP is not tested here.
			var lines []string
			for _, line := range got {
				if !strings.Contains(line, "no API server to allocate one") {
					lines = append(lines, line)
				}
			}
			if diff := cmp.Diff(test.want, lines); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestDefaults(t *testing.T) {
	doc := split("a.yaml", []byte(`
apiVersion: v1
kind: Service
metadata: {name: a}
spec: {type: NodePort, clusterIPs: [10.96.0.1, "fd00::1", odd], sessionAffinity: ClientIP, ports: [{port: 80}]}
status: {loadBalancer: {ingress: [{ip: 192.0.2.1}]}}
`))
	got := decode(doc[0]).objects[0].service
	want := v1.ServiceSpec{
		Type: v1.ServiceTypeNodePort, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1", "fd00::1", "odd"},
		IPFamilies:      []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol},
		SessionAffinity: v1.ServiceAffinityClientIP, SessionAffinityConfig: &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](10800)}},
		InternalTrafficPolicy: ptr.To(v1.ServiceInternalTrafficPolicyCluster), ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyCluster,
		Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}},
	}
	if diff := cmp.Diff(want, got.Spec); diff != "" {
		t.Errorf("Service (-want +got):\n%s", diff)
	}
	if mode := got.Status.LoadBalancer.Ingress[0].IPMode; mode == nil || *mode != v1.LoadBalancerIPModeVIP {
		t.Errorf("IP mode %v", mode)
	}
	if !got.CreationTimestamp.IsZero() {
		t.Error("a creation time was made up")
	}

	doc = split("a.yaml", []byte(slice("a-1", "a", "10.244.0.1")))
	ports := decode(doc[0]).objects[0].slice.Ports
	wantPorts := []discoveryv1.EndpointPort{{Name: ptr.To(""), Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To[int32](8080)}}
	if diff := cmp.Diff(wantPorts, ports); diff != "" {
		t.Errorf("EndpointSlice (-want +got):\n%s", diff)
	}

	doc = split("a.yaml", []byte("apiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: other}\nspec: {clusterIP: 10.96.0.1}\n"))
	if s := decode(doc[0]).objects[0].service; s.Namespace != "other" || s.Spec.Type != v1.ServiceTypeClusterIP || s.Spec.ClusterIPs[0] != "10.96.0.1" || s.Spec.ExternalTrafficPolicy != "" {
		t.Errorf("Service %+v", s)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add("a.yaml", []byte(service("a", 1)+slice("a-1", "a", "10.244.0.1")))
	f.Add("a.yaml", []byte("apiVersion: v1\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata: {name: a}\n- \nkind: List\n"))
	f.Add("a.yaml", []byte("kind: ServiceList\napiVersion: v1\nitems:\n  - metadata: {name: a}\n"))
	f.Add("a.json", []byte(`{"apiVersion":"v1","kind":"List","items":[{"kind":"Node","apiVersion":"v1","metadata":{"name":"n"}}]}`))
	f.Add("a.yaml", []byte("{\"kind\": 1}\n---\n[*a, &a x]\n...\n%\n"))
	f.Add("a.yaml", []byte("apiVersion: v1\nkind: Node\nmetadata: {name: nod}\nstatus: {capacity: {cpu: 1x}}\n"))
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		lines := strings.Count(string(data), "\n") + 1
		last := 0
		for _, doc := range split(name, data) {
			if doc.line < last || doc.line > lines {
				t.Errorf("document in line %d after %d, of %d", doc.line, last, lines)
			}
			last = doc.line
			d := decode(doc)
			for _, o := range d.objects {
				if o.key.name == "" || (o.key.namespace == "") != (o.key.kind == kindNode) {
					t.Errorf("object named %+v", o.key)
				}
				if !o.valid() && len(d.findings) == 0 {
					t.Errorf("%+v is left out without a word", o.key)
				}
			}
		}
	})
}

// A slice that would take gigabytes to parse is turned down unparsed.
func TestMillionEndpoints(t *testing.T) {
	var text strings.Builder
	text.WriteString(slice("huge", "a"))
	text.WriteString(strings.Repeat("- addresses: [10.244.0.1]\n", 1_000_000))
	text.WriteString(service("a", 1))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	got := decodeText("a.yaml", text.String())
	runtime.ReadMemStats(&after)
	if len(got) != 2 || !strings.Contains(got[0], "exceeds the limit") || !strings.Contains(got[1], "Service default/a") {
		t.Errorf("got %q", got)
	}
	if allocated := after.TotalAlloc - before.TotalAlloc; allocated > 256<<20 {
		t.Errorf("%d bytes allocated", allocated)
	}
}

// large is 10,000 Services and as many slices of ten endpoints.
func large(n int) (services, slices []string) {
	for i := range n {
		var s strings.Builder
		fmt.Fprintf(&s, "---\napiVersion: v1\nkind: Service\nmetadata:\n  name: service-%05d\n  namespace: ns-%d\nspec:\n  clusterIP: 10.%d.%d.%d\n  selector:\n    app: web\n"+
			"  ports:\n  - name: http\n    port: 80\n    protocol: TCP\n    targetPort: 8080\n  type: ClusterIP\n", i, i%50, 96+i>>16, i>>8&255, i&255)
		services = append(services, s.String())
		s.Reset()
		fmt.Fprintf(&s, "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: service-%05d-x\n  namespace: ns-%d\n  labels:\n    kubernetes.io/service-name: service-%05d\n"+
			"addressType: IPv4\nports:\n- name: http\n  port: 8080\n  protocol: TCP\nendpoints:\n", i, i%50, i)
		for e := range 10 {
			fmt.Fprintf(&s, "- addresses:\n  - 10.%d.%d.%d\n  conditions:\n    ready: true\n  nodeName: node-%d\n", 128+e, i>>8&255, i&255, e)
		}
		slices = append(slices, s.String())
	}
	return services, slices
}

// nothing is a handler that keeps nothing.
type nothing struct{ recorder }

func (*nothing) OnServiceAdd(*v1.Service)                              {}
func (*nothing) OnServiceUpdate(_, _ *v1.Service)                      {}
func (*nothing) OnEndpointSliceAdd(*discoveryv1.EndpointSlice)         {}
func (*nothing) OnEndpointSliceUpdate(_, _ *discoveryv1.EndpointSlice) {}

func BenchmarkLoad(b *testing.B) {
	n := 10000
	if testing.Short() {
		n = 1000
	}
	services, slices := large(n)
	all := strings.Join(services, "") + strings.Join(slices, "")
	yamlList := "apiVersion: v1\nkind: List\nitems:\n" + strings.ReplaceAll("\n"+all, "\n", "\n  ")
	yamlList = strings.ReplaceAll(yamlList, "\n  ---\n  apiVersion", "\n- apiVersion")
	jsonList := func() string {
		var items []json.RawMessage
		for _, doc := range split("a.yaml", []byte(all)) {
			d := decode(doc)
			o := d.objects[0]
			var data []byte
			if o.service != nil {
				o.service.APIVersion, o.service.Kind = "v1", "Service"
				data, _ = json.Marshal(o.service)
			} else {
				o.slice.APIVersion, o.slice.Kind = "discovery.k8s.io/v1", "EndpointSlice"
				data, _ = json.Marshal(o.slice)
			}
			items = append(items, data)
		}
		data, _ := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
		return string(data)
	}
	for _, form := range []struct {
		name  string
		files func() map[string]string
	}{
		{"one YAML", func() map[string]string { return map[string]string{"a.yaml": all} }},
		{"YAML list", func() map[string]string { return map[string]string{"a.yaml": yamlList} }},
		{"JSON list", func() map[string]string { return map[string]string{"a.json": jsonList()} }},
		{"files", func() map[string]string {
			files := map[string]string{}
			for i := range n {
				files[fmt.Sprintf("%05d.yaml", i)] = services[i] + slices[i]
			}
			return files
		}},
	} {
		b.Run(form.name, func(b *testing.B) {
			dir := b.TempDir()
			for name, text := range form.files() {
				write(b, filepath.Join(dir, name), text)
			}
			for b.Loop() {
				s := New(dir, &nothing{*newRecorder()}, nil, Options{})
				var before, after runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				start := time.Now()
				if err := s.pass(b.Context()); err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms/load")
				runtime.GC()
				runtime.ReadMemStats(&after)
				if len(s.entries) != 2*n {
					b.Fatalf("%d objects, want %d", len(s.entries), 2*n)
				}
				b.ReportMetric(float64(int64(after.HeapAlloc)-int64(before.HeapAlloc))/float64(2*n), "B/object")
				s.synced = true

				// One object changes.
				for name := range s.files {
					path := filepath.Join(dir, name)
					data, err := os.ReadFile(path)
					if err != nil {
						b.Fatal(err)
					}
					write(b, path, strings.Replace(string(data), "service-00000", "service-xxxxx", 1))
					s.files[name].dirty = true
					start = time.Now()
					if err := s.pass(b.Context()); err != nil {
						b.Fatal(err)
					}
					b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms/change")
					write(b, path, string(data))
					break
				}
			}
		})
	}
}
