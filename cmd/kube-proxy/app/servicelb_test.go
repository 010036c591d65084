// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// servingMode serves everything but what the kernel lacks.
type servingMode struct {
	activeMode
	missing netip.Addr
	down    string // an uplink
	bound   chan struct{}
}

func (servingMode) serves(*proxier.Decision, *proxier.Frontend, proxier.Origin) serving {
	return serving{by: capabilities.ModeEBPF}
}
func (servingMode) isUnplaced(*proxier.Decision) bool { return false }
func (servingMode) checks(*round) []health.Check      { return nil }
func (m servingMode) followBinds(ctx context.Context, fn func()) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.bound:
			fn()
		}
	}
}
func (m servingMode) lacks(_ *proxier.Decision, f *proxier.Frontend, uplinks []string) error {
	if m.down != "" && (len(uplinks) == 0 || slices.Contains(uplinks, m.down)) {
		return errors.New("an uplink is down")
	}
	if f.Addr.Addr() == m.missing {
		return errors.New("it is missing")
	}
	return nil
}

// TestServicesOf: a report has the ports of Services before they have an address, and says of each address of this node whether it is served,
// or why not.
func TestServicesOf(t *testing.T) {
	here, also, elsewhere := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("192.168.0.1"), netip.MustParseAddr("10.0.0.2")
	third := netip.MustParseAddr("172.16.0.1")
	facts := proxier.Facts{LocalAddrs: []netip.Addr{here, third, also}, UplinkAddrs: []proxier.DeviceAddr{{Addr: here, Device: "eth0"}, {Addr: third, Device: "eth1"}, {Addr: also, Device: "eth0"}}}
	for _, test := range []struct {
		name string
		edit func(*v1.Service)
		want string
	}{
		{"without an address", func(*v1.Service) {}, `[{"protocol":"TCP","port":80}]`},
		{"served", func(s *v1.Service) {
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: here.String()}, {IP: elsewhere.String()}}
		}, `[{"protocol":"TCP","port":80,"served":[{"address":"10.0.0.1"}]}]`},
		{"probed, and missing", func(s *v1.Service) {
			s.Status.Conditions = []metav1.Condition{{Type: nodereport.ConditionProbing, Status: metav1.ConditionTrue, Message: also.String()}}
		}, `[{"protocol":"TCP","port":80,"served":[{"address":"192.168.0.1","fault":"it is missing"}]}]`},
		{"without frontends for load balancers", func(s *v1.Service) {
			s.Annotations = map[string]string{proxier.AnnotationType: "ClusterIP"}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: here.String()}}
		}, `[{"protocol":"TCP","port":80,"served":[{"address":"10.0.0.1","fault":"the Service, or its annotations, leave this node or its load balancer addresses out","leftOut":true}]}]`},
		{"at an uplink that is down", func(s *v1.Service) {
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: here.String()}, {IP: third.String()}}
		}, `[{"protocol":"TCP","port":80,"served":[{"address":"10.0.0.1"},{"address":"172.16.0.1","fault":"an uplink is down"}]}]`},
		{"at its own NodePort", func(s *v1.Service) {
			s.Spec.Ports[0].Port, s.Spec.Ports[0].NodePort = 30080, 30080
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: here.String()}}
		}, `[{"protocol":"TCP","port":30080,"served":[{"address":"10.0.0.1"}]}]`},
		{"with no other frontends", func(s *v1.Service) {
			s.Annotations = map[string]string{proxier.AnnotationType: "LoadBalancer"}
		}, `[{"protocol":"TCP","port":80}]`},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web"}}
			s.Spec.Type, s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.LoadBalancerClass = v1.ServiceTypeLoadBalancer, "10.96.0.1", []string{"10.96.0.1"}, new(nodereport.Class)
			s.Spec.Ports = []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}
			test.edit(s)
			table, tracker := proxier.NewTable(facts, proxier.Policy{}), proxier.NewChangeTracker("node1", time.Time{}, nil)
			tracker.UpdateService(s)
			table.Apply(tracker.Take())
			services := servicesOf(table.AtNodes(), &facts, servingMode{missing: also, down: "eth1"})
			text, err := json.Marshal(services["ns/web"].Ports)
			if err != nil || string(text) != test.want {
				t.Errorf("got %s, %v; want %s", text, err, test.want)
			}
		})
	}
}

// TestReportOnBind: a process that binds the port of a Service and listens a moment later is in the report without waiting for an interval.
func TestReportOnBind(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{}); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	port := at.(*unix.SockaddrInet4).Port
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web"}}
	s.Spec.Type, s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.LoadBalancerClass = v1.ServiceTypeLoadBalancer, "10.96.0.1", []string{"10.96.0.1"}, new(nodereport.Class)
	s.Spec.Ports = []v1.ServicePort{{Port: int32(port), Protocol: v1.ProtocolTCP}}
	table, tracker := proxier.NewTable(proxier.Facts{}, proxier.Policy{}), proxier.NewChangeTracker("node1", time.Time{}, nil)
	tracker.UpdateService(s)
	table.Apply(tracker.Take())

	r, mux := newReports(), http.NewServeMux()
	r.interval = time.Hour
	r.server.Install(mux)
	mode := servingMode{bound: make(chan struct{})}
	go r.run(t.Context(), table, mode)
	listeners := func() string {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, nodereport.Path, nil))
		if w.Code != http.StatusOK {
			return "none"
		}
		var report nodereport.Report
		if err := json.Unmarshal(w.Body.Bytes(), &report); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(report.Listeners)
	}
	await := func(what, want string) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); listeners() != want; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: got %s, want %s", what, listeners(), want)
			}
		}
	}
	r.Synced(proxier.SyncInfo{})
	await("before it listens", "[]")
	mode.bound <- struct{}{}
	if err := unix.Listen(fd, 1); err != nil {
		t.Fatal(err)
	}
	await("once it listens", fmt.Sprint([]nodereport.Listener{{Protocol: "TCP", Address: netip.IPv4Unspecified(), Port: uint16(port)}}))
}

// TestReportBeforeSync: a process that has programmed nothing yet does not say that it serves nothing, which would have the node withdrawn.
func TestReportBeforeSync(t *testing.T) {
	r, mux := newReports(), http.NewServeMux()
	r.server.Install(mux)
	table := proxier.NewTable(proxier.Facts{}, proxier.Policy{})
	ctx := t.Context()
	go r.run(ctx, table, servingMode{})
	ask := func() int {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, nodereport.Path, nil))
		return w.Code
	}
	r.Synced(proxier.SyncInfo{Err: errors.New("failed")})
	if code := ask(); code != http.StatusServiceUnavailable {
		t.Errorf("code %d", code)
	}
	r.Synced(proxier.SyncInfo{})
	for deadline := time.Now().Add(10 * time.Second); ask() != http.StatusOK; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no report after a sync")
		}
	}
}
