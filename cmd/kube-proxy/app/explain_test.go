// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/observe/status"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
)

// noTier accepts decisions and does nothing.
type noTier struct{}

func (noTier) Sync(context.Context, proxier.Update) error          { return nil }
func (noTier) Cleanup(context.Context) error                       { return nil }
func (noTier) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

func TestExplain(t *testing.T) {
	o, err := complete(t, "", "--proxy-mode=ebpf", "--hostname-override=node1")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{opts: o, mode: &ebpfMode{}, health: health.New(health.Options{})}
	p.explain.node, p.explain.tiers = "node1", p.explainTiers
	px, err := proxier.New(proxier.Options{
		NodeName: "node1", Tier: noTier{}, Observer: &p.explain, Runner: proxier.DefaultRunnerOptions(),
		Facts: proxier.Facts{LocalAddrs: []netip.Addr{netip.MustParseAddr("172.18.0.1")}},
	})
	if err != nil {
		t.Fatal(err)
	}
	p.explain.next = px.Table()
	mux := p.metricsMux()
	ask := func(method, peer, query string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(method, explain.Path+"?"+query, nil)
		r.RemoteAddr = peer
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		return w
	}
	const good = "src=172.18.0.1&dst=10.96.0.10:80"
	if w := ask("GET", "127.0.0.1:1", good); w.Code != http.StatusServiceUnavailable {
		t.Errorf("before the first sync: %d %s", w.Code, w.Body)
	}

	px.OnServiceAdd(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"}, Ports: []v1.ServicePort{{Port: 80}}},
	})
	px.OnServiceSynced()
	px.OnEndpointSlicesSynced()
	if err := px.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, peer := range []string{"127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "[::ffff:127.0.0.1]:1"} {
		w := ask("GET", peer, good)
		var e explain.Explanation
		if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil || w.Code != http.StatusOK || w.Header().Get("Content-Type") != "application/json" {
			t.Fatalf("from %s: %d %s, error %v", peer, w.Code, w.Body, err)
		}
		if e.Node != "node1" || e.Verdict != "reject" || e.Origin.Kind != "host" || e.Frontend == nil || e.Frontend.Name != "web" {
			t.Errorf("from %s: %+v", peer, e)
		}
	}
	for _, test := range []struct {
		method, peer, query string
		code                int
		says                string
	}{
		{"GET", "10.0.0.1:1", good, http.StatusForbidden, "on the node itself"},
		{"GET", "[fd00::1]:1", good, http.StatusForbidden, ""},
		{"GET", "", good, http.StatusForbidden, ""},
		{"POST", "127.0.0.1:1", good, http.StatusMethodNotAllowed, ""},
		{"GET", "127.0.0.1:1", "", http.StatusBadRequest, "source"},
		{"GET", "127.0.0.1:1", "src=172.18.0.1&dst=here", http.StatusBadRequest, "destination"},
		{"GET", "127.0.0.1:1", good + "&protocol=icmp", http.StatusBadRequest, "protocol"},
		{"GET", "127.0.0.1:1", good + "&x=" + strings.Repeat("x", maxQuery), http.StatusBadRequest, "bytes"},
	} {
		w := ask(test.method, test.peer, test.query)
		if w.Code != test.code || !strings.Contains(w.Body.String(), test.says) {
			t.Errorf("%+v: %d %s", test, w.Code, w.Body)
		}
	}
}

// Requests from the node itself are answered at any of its addresses, and others are refused wherever the server listens.
func TestOnlyLocal(t *testing.T) {
	l := lab.NewT(t)
	node := l.Node("node1")
	pod, outside := node.Pod("pod"), l.Client("outside")
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isLocal(r) {
			http.Error(w, onlyLocal, http.StatusForbidden)
		}
	})}
	defer server.Close()
	for _, address := range []netip.Addr{node.Addr4, node.Addr6, netip.IPv6Unspecified()} {
		var listener net.Listener
		err := node.Do(func() (err error) {
			listener, err = net.Listen("tcp", netip.AddrPortFrom(address, 0).String())
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		go func() { _ = server.Serve(listener) }()
		port := netip.MustParseAddrPort(listener.Addr().String()).Port()
		for _, to := range []netip.Addr{node.Addr4, node.Addr6} {
			if address != to && !address.IsUnspecified() {
				continue
			}
			for from, code := range map[*lab.Sandbox]int{node.Sandbox: http.StatusOK, pod.Sandbox: http.StatusForbidden, outside.Sandbox: http.StatusForbidden} {
				response, err := from.HTTPClient(5 * time.Second).Get("http://" + netip.AddrPortFrom(to, port).String())
				if err != nil {
					t.Fatal(err)
				}
				response.Body.Close()
				if response.StatusCode != code {
					t.Errorf("from %s to %s, of a server at %s: %s, want %d", from.Name, to, address, response.Status, code)
				}
			}
		}
	}
}

// TestForwarded: what a proxy on the node forwards is refused, as the API server does for users of pods/proxy and nodes/proxy.
func TestForwarded(t *testing.T) {
	o, err := complete(t, "", "--proxy-mode=ebpf", "--hostname-override=node1")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{opts: o, mode: &ebpfMode{}, health: health.New(health.Options{}), ready: health.NewReadiness(health.ReadinessOptions{Healthy: func() bool { return true }})}
	server := httptest.NewServer(p.metricsMux())
	defer server.Close()
	target, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	// The API server's is one of these, too.
	forwarder := httptest.NewServer(httputil.NewSingleHostReverseProxy(target))
	defer forwarder.Close()
	ask := func(url, header string) int {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if header != "" {
			request.Header.Set(header, "10.0.0.1")
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		return response.StatusCode
	}
	for _, path := range []string{explain.Path, explain.PlacementsPath, explain.BackendsPath, status.Path} {
		for header, refused := range map[string]bool{
			"": false, "Accept-Language": false,
			"X-Forwarded-For": true, "x-forwarded-uri": true, "X-Forwarded-Host": true, "Via": true, "Forwarded": true,
		} {
			if code := ask(server.URL+path, header); (code == http.StatusForbidden) != refused {
				t.Errorf("%s with header %q: %d, want refused %v", path, header, code, refused)
			}
		}
		if code := ask(forwarder.URL+path, ""); code != http.StatusForbidden {
			t.Errorf("%s by a proxy: %d", path, code)
		}
	}
}

// steps records when Services and the Node are known.
type steps struct {
	proxier.Handler
	list []string
}

func (s *steps) OnServiceSynced() { s.list = append(s.list, "services") }
func (s *steps) OnNodeSynced()    { s.list = append(s.list, "node") }

func TestNodeBeforeServices(t *testing.T) {
	for _, test := range []struct {
		name, calls, want string
	}{
		{"node first", "node services", "node released services"},
		{"services first", "services node", "node released services"},
		{"no node", "services late", "released services"},
		{"the node is late", "services late node", "released services node"},
		{"a long time", "services node late", "node released services"},
		{"pods last", "await-pods services node pods", "node released services"},
		{"pods first", "await-pods pods node services", "node released services"},
		{"pods before the node", "await-pods services pods node", "node released services"},
		{"no pods", "await-pods node services late", "node released services"},
		{"neither", "await-pods services late pods node", "released services node"},
	} {
		t.Run(test.name, func(t *testing.T) {
			clock, to := clocktesting.NewFakeClock(time.Now()), &steps{}
			f := &nodeBeforeServices{Handler: to, clock: clock, released: func() { to.list = append(to.list, "released") }}
			for call := range strings.FieldsSeq(test.calls) {
				switch call {
				case "node":
					f.OnNodeSynced()
				case "services":
					f.OnServiceSynced()
				case "await-pods":
					f.awaitPods = true
				case "pods":
					f.podsKnown()
				case "late":
					clock.Step(nodeLimit)
				}
			}
			if d := cmp.Diff(test.want, strings.Join(to.list, " ")); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}
