// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// kubeProxy is that of a node whose address is a loopback one.
type kubeProxy struct {
	*nodereport.Server
	addr netip.Addr
}

// kubeProxies listen at the same port of several addresses.
func kubeProxies(t *testing.T, addrs ...string) (list []kubeProxy, port uint16) {
	t.Helper()
	for _, a := range addrs {
		l, err := net.Listen("tcp", netip.AddrPortFrom(netip.MustParseAddr(a), port).String())
		if err != nil {
			t.Fatal(err)
		}
		port = uint16(l.Addr().(*net.TCPAddr).Port)
		k, mux := kubeProxy{nodereport.NewServer(), netip.MustParseAddr(a)}, http.NewServeMux()
		mux.HandleFunc("/healthz", func(http.ResponseWriter, *http.Request) {})
		k.Install(mux)
		k.Set(nodereport.Report{})
		s := httptest.NewUnstartedServer(mux)
		s.Listener.Close()
		s.Listener = l
		s.Start()
		t.Cleanup(s.Close)
		list = append(list, k)
	}
	return list, port
}

// serves has a kube-proxy report that it serves a Service, or why not.
func (k kubeProxy) serves(service, fault string, listeners ...nodereport.Listener) {
	k.Set(nodereport.Report{Listeners: listeners, Services: map[string]*nodereport.Service{
		"ns/" + service: {Ports: []nodereport.Port{{Protocol: "TCP", Port: 80, Served: []nodereport.Served{{Address: k.addr, Fault: fault}}}}},
	}})
}

// probing waits until the nodes are told to serve addresses that the status does not have.
func (w *world) probing(name, want string) {
	w.t.Helper()
	await(w.t, name+" to be probed at "+want, func() error {
		s, err := w.client.CoreV1().Services("ns").Get(w.t.Context(), name, metav1.GetOptions{})
		if err == nil && probingOf(s) != want {
			err = fmt.Errorf("it is at %q, status %+v", probingOf(s), s.Status)
		}
		return err
	})
}

// TestProbing: an address is advertised once the node reports that it serves it, stays for a moment while it does not, and is withdrawn then.
func TestProbing(t *testing.T) {
	nodes, port := kubeProxies(t, "127.0.0.1", "127.0.0.2")
	w := start(t, Options{HealthPort: port}, newNode("n1", "127.0.0.1"), newNode("n2", "127.0.0.2"), newService("a", 80))
	w.run()
	w.has("a")
	for _, n := range nodes {
		n.Set(nodereport.Report{Services: map[string]*nodereport.Service{"ns/a": {Ports: []nodereport.Port{{Protocol: "TCP", Port: 80}}}}})
	}
	w.probing("a", "127.0.0.1, 127.0.0.2")
	w.has("a")
	nodes[0].serves("a", "")
	w.has("a", "127.0.0.1")
	w.probing("a", "127.0.0.2")
	nodes[1].serves("a", "")
	w.has("a", "127.0.0.1", "127.0.0.2")
	w.probing("a", "")

	began := time.Now()
	nodes[0].serves("a", "it is broken")
	w.has("a", "127.0.0.2")
	if took := time.Since(began); took < unservedFor {
		t.Errorf("withdrawn after %v", took)
	}
	w.says("Warning NotServed the kube-proxy of node n1 does not serve 127.0.0.1:80/TCP: it is broken")
	nodes[0].serves("a", "")
	w.has("a", "127.0.0.1", "127.0.0.2")
}

// TestReportedListener: a Service gets no port at which a process of a host listens, or listened a moment ago; a later one does not take it.
func TestReportedListener(t *testing.T) {
	nodes, port := kubeProxies(t, "127.0.0.1", "127.0.0.2")
	listener := nodereport.Listener{Protocol: "TCP", Address: netip.IPv4Unspecified(), Port: 80}
	nodes[0].serves("a", "", listener)
	nodes[1].serves("a", "")
	w := start(t, Options{HealthPort: port}, newNode("n1", "127.0.0.1"), newNode("n2", "127.0.0.2"), newService("a", 80))
	w.run()
	w.has("a", "127.0.0.2")
	ended := time.Now()
	nodes[0].serves("a", "")
	w.has("a", "127.0.0.1", "127.0.0.2")
	if took := time.Since(ended); took < listenerHold {
		t.Errorf("a Service got a port %v after a process of the host had it", took)
	}
	nodes[1].serves("a", "", listener)
	w.says("Warning HostListens a process of the host listens on 127.0.0.2:80/TCP, and gets no connections from outside there")
	w.has("a", "127.0.0.1", "127.0.0.2")
}

// TestNoWait: a kube-proxy that does not wait for a newer report is not asked without a pause.
func TestNoWait(t *testing.T) {
	var asked atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		_, _ = w.Write([]byte(`{"version":"1"}`))
	}))
	defer s.Close()
	at := netip.MustParseAddrPort(strings.TrimPrefix(s.URL, "http://"))
	ctx, cancel := context.WithCancel(t.Context())
	r := newReports(at.Port(), func() {})
	r.want(ctx, []*v1.Node{newNode("n1", at.Addr().String())})
	<-time.After(2 * retryReport) // as there is nothing to wait for
	cancel()
	r.wait()
	if n := asked.Load(); n < 2 || n > 5 {
		t.Errorf("asked %d times in %v", n, 2*retryReport)
	}
}

// TestGone: what a node said that was gone does not count when it is there again.
func TestGone(t *testing.T) {
	r := newReports(10256, func() {})
	f := &follower{held: map[nodereport.Listener]time.Time{}}
	r.nodes["n1"] = f
	r.note(f, &nodereport.Report{Version: "1"})
	if r.forget(func(string) bool { return false }); !r.known("n1") || r.of("n1") == nil {
		t.Fatal("the report of a node that is there is forgotten")
	}
	if r.forget(func(string) bool { return true }); r.known("n1") || r.of("n1") != nil {
		t.Error("the report of a node that is gone still counts")
	}
	if version := r.note(f, &nodereport.Report{Version: "2", After: "1"}); version != "" || r.known("n1") {
		t.Errorf("a change of a forgotten report counts, as %q", version)
	}
	if version := r.note(f, &nodereport.Report{Version: "2"}); version != "2" || !r.known("n1") {
		t.Errorf("a new report does not count, %q", version)
	}
}

// TestForgetAll: another controller that takes over finds no conditions, and the addresses still there.
func TestForgetAll(t *testing.T) {
	a, b := newService("a", 80), newService("b", 80)
	a.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "10.0.0.1"}}
	a.Status.Conditions = []metav1.Condition{{Type: nodereport.ConditionAdvertised}, {Type: "example.com/Other"}, {Type: nodereport.ConditionProbing}}
	w := start(t, Options{}, a, b)
	if n, err := ForgetAll(t.Context(), w.client); err != nil || n != 1 {
		t.Errorf("%d Services, %v", n, err)
	}
	s, err := w.client.CoreV1().Services("ns").Get(t.Context(), "a", metav1.GetOptions{})
	if err != nil || len(s.Status.Conditions) != 1 || len(s.Status.LoadBalancer.Ingress) != 1 {
		t.Errorf("%+v, %v", s, err)
	}
}
