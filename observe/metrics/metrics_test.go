// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	k8smetrics "k8s.io/component-base/metrics"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
	"github.com/tandem-proxy/tandem/test/golden"
)

var begin = time.Unix(1_767_323_045, 0)

// kubeRegistry is a registry of its own.
type kubeRegistry struct{ k8smetrics.KubeRegistry }

func newMetrics(t *testing.T, source TableSource, rules RuleSource) (*Metrics, k8smetrics.KubeRegistry) {
	t.Helper()
	m, r := New([]proxier.Family{proxier.IPv4, proxier.IPv6}), k8smetrics.NewKubeRegistry()
	if err := m.Register(kubeRegistry{r}, source, rules, func() map[string]time.Time {
		return map[string]time.Time{"services": begin, "endpointslices": begin.Add(1500 * time.Millisecond)}
	}); err != nil {
		t.Fatal(err)
	}
	return m, r
}

// text is what /metrics answers.
func text(t *testing.T, r k8smetrics.Gatherer) string {
	t.Helper()
	w := httptest.NewRecorder()
	k8smetrics.HandlerFor(r, k8smetrics.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("/metrics answers %d: %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// full is what /metrics answers when everything has happened once.
func full(t *testing.T) string {
	t.Helper()
	m, r := newMetrics(t, func() (Tables, bool) {
		return Tables{
			ByName:   map[string]Table{"frontends": {Used: 3, Size: 5, Max: 10}, "slots": {Used: 1, Size: 4, Max: 20}},
			MapBytes: 4096, MapGrowths: 2,
			Unplaced: 2, Direct: 5, DirectReady: 3, Accelerated: map[string]bool{"eth0": true, "eth1": false}, ClosedSockets: 7, LastYield: time.Unix(1772366400, 0),
			Packets: map[string]uint64{"forwarded_local": 5},
			Services: []Service{{Namespace: "shop", Name: "web", Port: "http", Protocol: "TCP", Node: proxier.Outcomes{Connections: 1, Rejected: 2, Dropped: 3}, Outside: proxier.Outcomes{Connections: 4, Rejected: 5, Dropped: 6}, Packets: 10, Bytes: 1000, Refused: 3, Unanswered: 1, Signals: &Signals{
				Established: 7, Refused: 2, Unanswered: 1, Sent: 700, Received: 7000,
				Connect: Histogram{SumMicroseconds: 3000, Bounds: []uint32{100, 1000}, Counts: []uint64{4, 2, 1}},
				RTT:     Histogram{SumMicroseconds: 500, Bounds: []uint32{100, 1000}, Counts: []uint64{5, 0, 0}},
			}}},
		}, true
	}, func() (RulePackets, bool) { return RulePackets{InvalidDropped: 3, LoopbackNodePorts: 4}, true })
	m.SetChanges(func() (int, uint64) { return 4, 9 })
	m.Start(begin)
	m.Queued(begin.Add(time.Second))
	m.Synced(proxier.SyncInfo{Start: begin.Add(time.Second), End: begin.Add(time.Second + 3*time.Millisecond), ServicePorts: 12, Full: true, Triggers: [proxier.Families][]time.Time{{begin}, {begin}}})
	m.Synced(proxier.SyncInfo{Start: begin.Add(2 * time.Second), End: begin.Add(3 * time.Second), ServicePorts: 12, Triggers: [proxier.Families][]time.Time{{begin}, {begin}}, Err: errors.New("failed")})
	m.Healthz(200)
	m.Livez(503)
	m.Readyz(503)
	m.Reconciled(staleudp.Result{Family: proxier.IPv6, Took: 3 * time.Millisecond, Deleted: 2})
	m.Rules(proxier.IPv4, "nat", 12, 345)
	m.RestoreFailed(proxier.IPv6, true)
	m.RestoreFailed(proxier.IPv6, false)
	m.Problem("Service", "Conflict")
	m.Capability("set_retval", "yes")
	m.Mode("ebpf", ModeRequested)
	m.OtherProxy(true)
	m.Checks(map[string]bool{"programmed": true, "ebpf-IPv4": false})
	m.Draining("programs of mode ebpf", time.Unix(1700000000, 0))
	m.Disrupted(0.02)
	m.BackendStates([]proxier.BackendOverride{{State: proxier.MaintenanceState}, {State: proxier.MaintenanceState}})
	m.Build("v1.2.3")
	m.ConfigFile("mode: ebpf")
	m.ConfigReloaded(ReloadFailed)
	h := m.Handler(nopHandler{})
	h.OnServiceAdd(nil)
	h.OnServiceUpdate(nil, nil)
	h.OnServiceDelete(nil)
	h.OnEndpointSliceAdd(nil)
	h.OnEndpointSliceUpdate(nil, nil)
	h.OnServiceSynced()

	return strings.ReplaceAll(text(t, r), runtime.Version(), "GO")
}

// TestGolden holds every name, label and bucket: dashboards depend on them.
func TestGolden(t *testing.T) { golden.Compare(t, "metrics.golden", full(t)) }

// Before there is a tier, and of what it does not tell, there are no series.
func TestNoTables(t *testing.T) {
	there := false
	_, r := newMetrics(t, func() (Tables, bool) { return Tables{Unplaced: -1, ClosedSockets: -1}, there },
		func() (RulePackets, bool) { return RulePackets{}, false })
	for range 2 {
		if got := text(t, r); regexp.MustCompile("tandem_(map|unplaced|closed)|kubeproxy_iptables").MatchString(got) {
			t.Errorf("got %s", got)
		}
		there = true
	}
}

func TestNoLocalEndpoints(t *testing.T) {
	m, r := newMetrics(t, nil, nil)
	next := &nopTier{}
	tier := m.Tier(next)
	checkPolicy := func(policy string, v4, v6 int) {
		t.Helper()
		for family, want := range map[string]int{"IPv4": v4, "IPv6": v6} {
			line := fmt.Sprintf("kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family=%q,traffic_policy=%q} %d\n", family, policy, want)
			if got := text(t, r); !strings.Contains(got, line) {
				t.Errorf("want %sgot %s", line, got)
			}
		}
	}
	check := func(v4, v6 int) {
		t.Helper()
		checkPolicy("internal", v4, v6)
	}
	check(0, 0)

	// The decisions come from a table, as they do in the proxy.
	tracker := proxier.NewChangeTracker("node1", begin, nil)
	table := proxier.NewTable(proxier.Facts{}, proxier.Policy{})
	local := v1.ServiceInternalTrafficPolicyLocal
	service := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a"},
		Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1", "fd00::1"}, InternalTrafficPolicy: &local, Ports: []v1.ServicePort{{Port: 80}}},
	}
	name, port, elsewhere := "", int32(80), "node2"
	slice := func(family discoveryv1.AddressType, addr, node string) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: "a-" + string(family), Labels: map[string]string{discoveryv1.LabelServiceName: "a"}},
			AddressType: family,
			Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port}},
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{addr}, NodeName: &node}},
		}
	}
	sync := func(full bool) {
		t.Helper()
		changes := table.Apply(tracker.Take())
		if full {
			changes = table.All()
		}
		if err := tier.Sync(context.Background(), proxier.Update{Full: full, Changes: changes}); err != nil {
			t.Fatal(err)
		}
	}
	tracker.UpdateService(service)
	tracker.UpdateEndpointSlice(slice(discoveryv1.AddressTypeIPv4, "10.244.2.1", elsewhere))
	sync(false)
	check(1, 0)
	tracker.UpdateEndpointSlice(slice(discoveryv1.AddressTypeIPv6, "fd00:2::1", elsewhere))
	sync(false)
	check(1, 1)
	sync(true)
	check(1, 1)
	tracker.UpdateEndpointSlice(slice(discoveryv1.AddressTypeIPv4, "10.244.1.1", "node1"))
	sync(false)
	check(0, 1)
	checkPolicy("external", 0, 0)
	outside := service.DeepCopy()
	outside.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	outside.Spec.Ports[0].NodePort = 30080
	tracker.UpdateService(outside)
	sync(false)
	check(0, 1)
	checkPolicy("external", 0, 1)
	tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "a"})
	sync(false)
	check(0, 0)
	checkPolicy("external", 0, 0)
	if next.syncs != 6 {
		t.Errorf("the tier saw %d syncs, want 6", next.syncs)
	}
}

type nopTier struct {
	proxier.Tier
	syncs int
}

func (n *nopTier) Sync(context.Context, proxier.Update) error { n.syncs++; return nil }

type nopHandler struct{ proxier.Handler }

func (nopHandler) OnServiceAdd(*v1.Service)                              {}
func (nopHandler) OnServiceUpdate(_, _ *v1.Service)                      {}
func (nopHandler) OnServiceDelete(*v1.Service)                           {}
func (nopHandler) OnServiceSynced()                                      {}
func (nopHandler) OnEndpointSliceAdd(*discoveryv1.EndpointSlice)         {}
func (nopHandler) OnEndpointSliceUpdate(_, _ *discoveryv1.EndpointSlice) {}

// TestServicesAreBounded: some have series of their own and keep them while they are there;
// nothing is lost of the others.
func TestServicesAreBounded(t *testing.T) {
	var now Tables
	_, r := newMetrics(t, func() (Tables, bool) { return now, true }, nil)
	service := func(i int) Service {
		return Service{Namespace: "shop", Name: fmt.Sprintf("s%03d", i), Port: "http", Protocol: "TCP", Node: proxier.Outcomes{Connections: 1}, Outside: proxier.Outcomes{Connections: 1, Dropped: 2}, Packets: 10, Bytes: 1000}
	}
	series := func(named, others int) {
		t.Helper()
		got := text(t, r)
		if n := strings.Count(got, `tandem_service_connections_total{client="node",namespace="shop"`); n != named {
			t.Errorf("%d service ports have series, want %d", n, named)
		}
		line := fmt.Sprintf("tandem_service_refusals_total{client=\"outside\",namespace=\"\",port=\"\",protocol=\"\",result=\"dropped\",service=\"\"} %d\n", 2*others)
		if others > 0 != strings.Contains(got, line) || others == 0 && strings.Contains(got, `namespace=""`) {
			t.Errorf("want %sgot %s", line, got)
		}
	}
	for i := range maxServices {
		now.Services = append(now.Services, service(i))
	}
	series(maxServices, 0)
	for i := range 3 {
		now.Services = append([]Service{service(900 + i)}, now.Services...)
	}
	series(maxServices, 3)
	if got := text(t, r); strings.Contains(got, `service="s900"`) || !strings.Contains(got, `service="s255"`) {
		t.Error("those that were seen first have lost their series")
	}
	now.Services = now.Services[:maxServices] // those that go make room
	series(maxServices, 0)
}
