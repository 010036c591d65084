// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/exposition"
	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// watched is what monitoring sees of a kube-proxy: responses by request.
type watched map[string]string

// request is an HTTP request from the node itself.
type request struct {
	method string
	to     netip.AddrPort
	path   string
	accept string
}

func (r request) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s %s%s %s", r.method, r.to, r.path, r.accept))
}

// ask sends a request and returns status, headers and body as text.
func (r request) ask(t *testing.T, n *lab.Node) string {
	t.Helper()
	asked, err := http.NewRequestWithContext(t.Context(), r.method, "http://"+r.to.String()+r.path, strings.NewReader("2"))
	if err != nil {
		t.Fatal(err)
	}
	asked.Header.Set("Accept", r.accept)
	response, err := n.HTTPClient(5 * time.Second).Do(asked)
	if err != nil {
		t.Fatalf("%s: %v", r, err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatalf("%s: %v", r, err)
	}
	text := response.Status + "\n"
	for _, name := range slices.Sorted(maps.Keys(response.Header)) {
		switch name {
		case "Date", "Content-Length", "Transfer-Encoding", "Process-Start-Time-Unix": // depend on the body or the clock
		default:
			text += name + ": " + strings.Join(response.Header[name], ", ") + "\n"
		}
	}
	return text + string(body)
}

// varying are parts of responses that differ between processes.
var varying = []struct{ text, name string }{
	{`(Started|Go version|Binary version)\W+[^\n]+`, "$1"},
	{`(Up|Emulation version|Paths)[:= ]+`, "$1: "},
	{`\d+ hr \d+ min \d+ sec`, "TIME"},
	{`"(startTime|goVersion|binaryVersion)":"[^"]*"`, `"$1":""`},
	{`"uptimeSeconds":\d+`, `"uptimeSeconds":0`},
	{`(?s)bind-address[:= ].*`, "FLAGS"},
	{`\n *"`, `"`}, {`": `, `":`}, {`\n}`, `}`}, // indented for some
	{`\n+$`, ""},
}

var timestamps = regexp.MustCompile(`"(lastUpdated|currentTime)":"([^"]*)"`)

// settled replaces timestamps by their relation to the current time: older than a second or not.
func settled(answer string) string {
	var now time.Time
	for _, m := range timestamps.FindAllStringSubmatch(answer, -1) {
		if at, err := time.Parse(time.RFC3339Nano, m[2]); err == nil && m[1] == "currentTime" {
			now = at
		}
	}
	answer = timestamps.ReplaceAllStringFunc(answer, func(field string) string {
		m := timestamps.FindStringSubmatch(field)
		at, err := time.Parse(time.RFC3339Nano, m[2])
		switch {
		case err != nil:
			return field
		case now.Sub(at).Abs() < time.Second:
			return m[1] + "=now"
		}
		return m[1] + "=before"
	})
	for _, v := range varying {
		answer = regexp.MustCompile(v.text).ReplaceAllString(answer, v.name)
	}
	return answer
}

// watch runs a kube-proxy on its own node and sends all requests.
func watch(t *testing.T, l *lab.Lab, name string, opts upstream.Options) watched {
	t.Helper()
	n := l.Node(name)
	web := serve(t, n.Pod("web-"+name))
	opts.Mode = "iptables"
	opts.Args = append(opts.Args, "--profiling")
	if opts.Env != nil { // ours
		opts.Args = append(opts.Args, "--ebpf-cgroup-root="+n.CgroupPath())
	} else {
		opts.Args = append(opts.Args, upstream.Flags...)
	}
	opts.Objects = []fakeapi.Object{
		&v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "uid"},
			Spec: v1.ServiceSpec{
				Type: v1.ServiceTypeLoadBalancer, ClusterIP: vip4.Addr().String(), ClusterIPs: []string{vip4.Addr().String(), vip6.Addr().String()},
				IPFamilies:            []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol},
				ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyLocal, HealthCheckNodePort: healthCheckNodePort,
				Ports: []v1.ServicePort{{Name: "p", Port: 80, Protocol: v1.ProtocolTCP, NodePort: 30080}},
			},
		},
	}
	p, err := upstream.Start(t.Context(), n, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port) }
	healthCheck := func(want string) {
		await(t, name+": health check", func() error {
			if got := (request{http.MethodGet, at(healthCheckNodePort), "/", ""}).ask(t, n); !strings.Contains(got, want) {
				return fmt.Errorf("it answers %s", got)
			}
			return nil
		})
	}
	healthCheck(`"localEndpoints": 0`)
	p.API.Put(&discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"},
			Annotations: map[string]string{v1.EndpointsLastChangeTriggerTime: time.Now().Format(time.RFC3339Nano)},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("p"), Port: ptr.To[int32](targetPort), Protocol: ptr.To(v1.ProtocolTCP)}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{web.Addr4.String()}, NodeName: &n.Name}},
	})
	healthCheck(`"localEndpoints": 1`)

	saw := watched{}
	ask := func(when string, r request) { saw[strings.TrimSpace(when+" "+r.String())] = settled(r.ask(t, n)) }
	metrics := request{http.MethodGet, at(10249), "/metrics", ""}
	await(t, name+": metrics", func() error {
		if !strings.Contains(metrics.ask(t, n), "kubeproxy_network_programming_duration_seconds_count") {
			return fmt.Errorf("the metrics count no trigger yet")
		}
		return nil
	})
	await(t, name+": a sync that was long ago", func() error {
		if got := settled((request{http.MethodGet, at(10256), "/livez", ""}).ask(t, n)); strings.Count(got, "before") != 2 {
			return fmt.Errorf("it answers %s", got)
		}
		return nil
	})
	ask("", request{http.MethodGet, at(healthCheckNodePort), "/any", ""})
	ask("", request{http.MethodGet, netip.AddrPortFrom(netip.IPv6Loopback(), healthCheckNodePort), "/", ""})
	for _, path := range []string{"/healthz", "/livez", "/"} {
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodHead} {
			ask("", request{method, at(10256), path, ""})
		}
	}
	for _, path := range []string{"/healthz", "/proxyMode", "/", "/debug/flags/v"} {
		ask("", request{http.MethodGet, at(10249), path, ""})
		ask("", request{http.MethodPost, at(10249), path, ""})
	}
	ask("", request{http.MethodPut, at(10249), "/debug/flags/v", ""})
	for _, path := range []string{"/statusz", "/flagz"} {
		for _, accept := range []string{
			"", "*/*", "text/plain", "text/plain;q=0.5", "text/html", "application/json", "application/json;v=v1;g=config.k8s.io;as=Statusz",
			"application/json;v=v1alpha1;g=config.k8s.io;as=Statusz", "application/json;v=v1beta1;g=config.k8s.io;as=Statusz, text/plain",
		} {
			ask("", request{http.MethodGet, at(10249), path, accept})
		}
	}
	for _, path := range []string{"/metrics", "/metrics/slis"} {
		for name, f := range exposition.Parse((request{http.MethodGet, at(10249), path, ""}).ask(t, n)) {
			saw[path+" "+name] = fmt.Sprint(f.Type, f.Labels, f.Buckets)
		}
	}

	node := upstream.NodeObject(n)
	node.Spec.Taints = []v1.Taint{{Key: "ToBeDeletedByClusterAutoscaler"}}
	p.API.Put(node)
	healthz := request{http.MethodGet, at(10256), "/healthz", ""}
	await(t, name+": a node that is about to go", func() error {
		if got := healthz.ask(t, n); !strings.Contains(got, `"nodeEligible":false`) {
			return fmt.Errorf("it answers %s", got)
		}
		return nil
	})
	ask("before the node goes,", healthz)
	ask("before the node goes,", request{http.MethodGet, at(10256), "/livez", ""})
	ask("before the node goes,", request{http.MethodGet, at(healthCheckNodePort), "/", ""})
	return saw
}

// differences returns those that docs/metrics.md lists, as expressions for names.
func differences(t *testing.T) (list []string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "## Differences from upstream")
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_*]+)` \\| [^|]+ \\| [^|]+ \\|$").FindAllStringSubmatch(table, -1) {
		list = append(list, strings.ReplaceAll(m[1], "*", ".*"))
	}
	return list
}

// TestAsUpstream: monitoring sees the same as with upstream's kube-proxy, except for the metrics
// that docs/metrics.md lists. TestConfigz compares /configz.
func TestAsUpstream(t *testing.T) {
	binary := upstream.BinaryT(t)
	l := lab.NewT(t)
	theirs := watch(t, l, "theirs", upstream.Options{Binary: binary})
	ours := watch(t, l, "ours", upstream.Options{Binary: os.Args[0], Env: []string{asProxy + "=1"}})
	meant, used := differences(t), map[string]bool{}
	for _, what := range slices.Sorted(maps.Keys(union(theirs, ours))) {
		if theirs[what] == ours[what] {
			continue
		}
		name, isMetric := strings.CutPrefix(what, "/metrics ")
		i := slices.IndexFunc(meant, func(pattern string) bool { return regexp.MustCompile("^" + pattern + "$").MatchString(name) })
		if !isMetric || i < 0 {
			t.Errorf("%s (-theirs +ours):\n%s", what, cmp.Diff(theirs[what], ours[what]))
			continue
		}
		used[meant[i]] = true
	}
	for _, pattern := range meant {
		if !used[pattern] {
			t.Errorf("docs/metrics.md lists %s, but there is no such difference", pattern)
		}
	}
	if len(theirs) < 150 {
		t.Errorf("only %d things were compared", len(theirs))
	}
	t.Logf("compared %d things, of which %d are metrics", len(theirs), strings.Count(strings.Join(slices.Collect(maps.Keys(theirs)), "\n"), "/metrics "))
}

func union(a, b watched) watched {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}
