// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"maps"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/sources/apiserver"
	"github.com/tandem-proxy/tandem/test/fakeapi"
)

// TestCandidates: the frontends that cost least are dialled, of those with an endpoint.
func TestCandidates(t *testing.T) {
	type options struct {
		protocol v1.Protocol
		sticky   bool
		empty    bool
	}
	for _, tt := range []struct {
		name     string
		services map[string]options // by namespace/name
		want     string
	}{
		{"nothing to dial", map[string]options{"shop/empty": {empty: true}, "shop/dns": {protocol: v1.ProtocolUDP}, "shop/sctp": {protocol: v1.ProtocolSCTP}}, ""},
		{"the only one", map[string]options{"default/kubernetes": {}}, "default/kubernetes:p"},
		{"not the API server", map[string]options{"default/kubernetes": {}, "shop/sticky": {sticky: true}}, "shop/sticky:p default/kubernetes:p"},
		{"without affinity", map[string]options{"default/kubernetes": {}, "shop/sticky": {sticky: true}, "shop/web": {}}, "shop/web:p shop/sticky:p default/kubernetes:p"},
		{"three are enough", map[string]options{"default/kubernetes": {}, "shop/sticky": {sticky: true}, "shop/web": {}, "a/b": {}}, "a/b:p shop/web:p shop/sticky:p"},
	} {
		tracker, table := proxier.NewChangeTracker("node1", time.Time{}, nil), proxier.NewTable(proxier.Facts{}, proxier.Policy{})
		for i, name := range slices.Sorted(maps.Keys(tt.services)) { // addresses count among equals
			is := tt.services[name]
			namespace, name, _ := strings.Cut(name, "/")
			if is.protocol == "" {
				is.protocol = v1.ProtocolTCP
			}
			service := &v1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
				Spec:       v1.ServiceSpec{ClusterIP: fmt.Sprintf("10.96.0.%d", i), Ports: []v1.ServicePort{{Name: "p", Port: 80, Protocol: is.protocol}}},
			}
			if is.sticky {
				service.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			}
			tracker.UpdateService(service)
			if is.empty {
				continue
			}
			tracker.UpdateEndpointSlice(&discoveryv1.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
				AddressType: discoveryv1.AddressTypeIPv4,
				Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("p"), Port: ptr.To[int32](8080), Protocol: &is.protocol}},
				Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{fmt.Sprintf("10.244.0.%d", i)}}},
			})
		}
		table.Apply(tracker.Take())
		var got []string
		for _, c := range candidates(&iptablesDatapath{rules: &iptables.Tier{}}, newRound(table, "node1", 0))[probed{"iptables", false, proxier.IPv4}] {
			got = append(got, c.decision.Name.String())
			if to := backendsOf(c.decision, c.frontend.Routes[proxier.FromHost].Set); len(to) != 1 {
				t.Errorf("%s: %v", c.decision, to)
			}
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("%s: %v, want %q", tt.name, got, tt.want)
		}
	}
}

// TestCandidatesChange: each round dials other Services.
func TestCandidatesChange(t *testing.T) {
	const services = 20
	table := probedServices(services)
	dialled := map[string]bool{}
	for number := range uint64(100) {
		dialled[candidates(&iptablesDatapath{rules: &iptables.Tier{}}, newRound(table, "node1", number))[probed{"iptables", false, proxier.IPv4}][0].decision.Name.String()] = true
	}
	if len(dialled) < services*3/4 {
		t.Errorf("100 rounds dial %d of %d Services", len(dialled), services)
	}
}

// socketMode translates sockets.
type socketMode struct{ servingMode }

func (socketMode) serves(*proxier.Decision, *proxier.Frontend, proxier.Origin) serving {
	return serving{by: capabilities.ModeEBPF, bySocket: true}
}

// TestCandidatesOfSockets: a single Service of UDP, which costs least, does not keep those of TCP from being dialled.
func TestCandidatesOfSockets(t *testing.T) {
	const services = 20
	table := probedServices(services, v1.ProtocolUDP)
	dialled := map[string]int{}
	for number := range uint64(200) {
		dialled[candidates(socketMode{}, newRound(table, "node1", number))[probed{capabilities.ModeEBPF, true, proxier.IPv4}][0].decision.Name.String()]++
	}
	if udp := dialled["shop/s0:p"]; udp < 100 || len(dialled) < services*3/4 {
		t.Errorf("200 rounds dial %d of %d Services, and %d times that of UDP", len(dialled), services, udp)
	}
}

// probedServices is a table of Services, of which the first ones have other protocols than TCP.
func probedServices(services int, protocols ...v1.Protocol) *proxier.Table {
	tracker, table := proxier.NewChangeTracker("node1", time.Time{}, nil), proxier.NewTable(proxier.Facts{}, proxier.Policy{})
	for i := range services {
		name, protocol := fmt.Sprintf("s%d", i), v1.ProtocolTCP
		if i < len(protocols) {
			protocol = protocols[i]
		}
		tracker.UpdateService(&v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
			Spec:       v1.ServiceSpec{ClusterIP: fmt.Sprintf("10.96.1.%d", i), Ports: []v1.ServicePort{{Name: "p", Port: 80, Protocol: protocol}}},
		})
		tracker.UpdateEndpointSlice(&discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("p"), Port: ptr.To[int32](8080), Protocol: &protocol}},
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{fmt.Sprintf("10.244.1.%d", i)}}},
		})
	}
	table.Apply(tracker.Take())
	return table
}

func TestCheckAPI(t *testing.T) {
	now := time.Now()
	for name, test := range map[string]struct {
		ages map[string]time.Duration
		want string // of the detail, if it fails
	}{
		"nothing yet": {nil, ""},
		"young":       {map[string]time.Duration{"services": 2 * time.Minute, "nodes": 0}, ""},
		"old":         {map[string]time.Duration{"services": time.Second, "endpointslices": 4 * time.Minute}, "no event or bookmark for endpointslices in the last 4m0s"},
	} {
		last := map[string]time.Time{}
		for resource, age := range test.ages {
			last[resource] = now.Add(-age)
		}
		if c := checkAPI(last, 3*time.Minute, now); c.Name != "api" || c.OK != (test.want == "") || !strings.Contains(c.Detail, test.want) {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// TestProbeAPI: the API server is a condition of readiness with --ready-max-api-age alone, and never with manifests.
func TestProbeAPI(t *testing.T) {
	server := httptest.NewServer(fakeapi.New())
	defer server.Close()
	client, err := apiserver.NewClient(apiserver.ClientConfig{Master: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	events, err := client.Services().Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	events.Stop()
	for _, test := range []struct {
		limit  time.Duration
		client *apiserver.Client
		want   string
	}{
		{0, client, ""},
		{time.Hour, nil, ""},
		{time.Hour, client, "api true"},
		{time.Nanosecond, client, "api false"},
	} {
		o := NewOptions()
		o.Config.Tandem.ReadyMaxAPIAge.Duration = test.limit
		p := &proxy{opts: o, client: test.client}
		p.explain.table.Store(proxier.NewTable(proxier.Facts{}, proxier.Policy{}))
		var got []string
		for _, c := range p.probe(t.Context()) {
			got = append(got, fmt.Sprint(c.Name, " ", c.OK))
		}
		if strings.Join(got, ", ") != test.want {
			t.Errorf("limit %v, with an API server: %v: %q, want %q", test.limit, test.client != nil, got, test.want)
		}
	}
}
