// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	eventsv1 "k8s.io/api/events/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/observe/health"
)

// hold takes a port that then cannot be bound.
func hold(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func TestServerTriesAgain(t *testing.T) {
	held := hold(t)
	failures, fake := make(chan error, 1), clocktesting.NewFakeClock(time.Now())
	s := &server{
		name: "test", address: held.Addr().String(), clock: fake, failed: func(err error) { failures <- err },
		handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "here") }),
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.run(ctx) }()
	for range 2 {
		if err := <-failures; !strings.Contains(err.Error(), "address already in use") {
			t.Fatal(err)
		}
		step(t, fake)
	}
	<-failures
	held.Close()
	step(t, fake)

	// It listens at some moment now; a connection waits for that.
	var response *http.Response
	for range 1000 {
		var err error
		if response, err = http.Get("http://" + s.address); err == nil {
			break
		}
	}
	if response == nil {
		t.Fatal("it does not serve")
	}
	body, err := io.ReadAll(response.Body)
	response.Body.Close()
	if err != nil || string(body) != "here" {
		t.Errorf("answer %q, error %v", body, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("after the end: %v", err)
	}
}

// step lets the interval pass once something waits for it.
func step(t *testing.T, fake *clocktesting.FakeClock) {
	t.Helper()
	limit := time.After(10 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !fake.HasWaiters() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("nothing waits")
		}
	}
	fake.Step(listenInterval)
}

func TestHardFail(t *testing.T) {
	s := &server{name: "test", address: hold(t).Addr().String(), hardFail: true, clock: clocktesting.NewFakeClock(time.Now())}
	if err := s.run(context.Background()); err == nil || !strings.Contains(err.Error(), "test server on 127.0.0.1:") {
		t.Errorf("error %v", err)
	}
}

func TestMetricsServer(t *testing.T) {
	for _, profiling := range []bool{false, true} {
		o, err := complete(t, "", "--proxy-mode=ebpf", "--hostname-override=node1", fmt.Sprintf("--profiling=%v", profiling), "--feature-gates=ComponentFlagz=false")
		if err != nil {
			t.Fatal(err)
		}
		p := &proxy{opts: o, mode: &ebpfMode{}, health: health.New(health.Options{})}
		mux := p.metricsMux()
		want := map[string]string{
			"GET /healthz": "200 text/plain; charset=utf-8 ok", "GET /proxyMode": "200 text/plain; charset=utf-8 ebpf",
			"GET /debug/pprof/cmdline": "404", "GET /debug/flags/v": "404", "PUT /debug/flags/v": "404", "GET /warp": "404",
			"GET /flagz": "404",
		}
		if profiling {
			want["GET /debug/pprof/cmdline"] = "200"
			want["GET /debug/flags/v"] = "406"
			want["PUT /debug/flags/v"] = "200"
		}
		got := map[string]string{}
		for request := range want {
			method, path, _ := strings.Cut(request, " ")
			w := httptest.NewRecorder()
			mux.ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader("0")))
			got[request] = strconv.Itoa(w.Code)
			if method == http.MethodGet && w.Code == 200 && !strings.HasPrefix(path, "/debug") {
				got[request] += " " + w.Header().Get("Content-Type") + " " + w.Body.String()
			}
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("profiling %v (-want +got):\n%s", profiling, d)
		}
	}
}

// TestEvents sends Events to an API server that only takes Events.
func TestEvents(t *testing.T) {
	received := make(chan eventsv1.Event, 10)
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var event eventsv1.Event
		if err := json.NewDecoder(r.Body).Decode(&event); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		received <- event
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(event)
	}))
	defer api.Close()
	o := NewOptions()
	o.Master, o.nodeName = api.URL, "node1"
	o.Config = config.New()
	o.Config.KubeProxy.ClientConnection.ContentType = "application/json"
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	p := &proxy{opts: o, mode: &iptablesMode{}, decision: capabilities.Decision{Reasons: []capabilities.Reason{{Text: "no hooks"}, {Text: "no maps"}}}}
	if err := p.connect(); err != nil {
		t.Fatal(err)
	}
	go p.recorder.Run(ctx)

	p.bindFailed("FailedToStartMetricServer", "StartKubeProxy")(io.ErrUnexpectedEOF)
	if p.isFallback() {
		t.Error("the configured mode counts as a fallback")
	}
	o.Config.KubeProxy.Mode = "ebpf"
	p.recordStart()
	got := map[string]string{}
	for range 3 {
		select {
		case e := <-received:
			got[e.Reason] = strings.Join([]string{e.Type, e.Action, e.Regarding.Kind, e.Regarding.Name, string(e.Regarding.UID), e.ReportingController, e.Note}, " ")
		case <-time.After(10 * time.Second):
			t.Fatalf("events are missing; got %v", got)
		}
	}
	want := map[string]string{
		"Starting":                  "Normal StartKubeProxy Node node1 node1 kube-proxy ",
		"FailedToStartMetricServer": "Warning StartKubeProxy Node node1 node1 kube-proxy unexpected EOF",
		"ProxyModeFallback":         "Warning StartKubeProxy Node node1 node1 kube-proxy mode iptables runs instead of ebpf: no hooks; no maps",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
}
