// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/proxier"
)

// balancer asks a Services on loopback addresses, as load balancers do.
type balancer struct {
	*Services
	t       *testing.T
	clock   *clocktesting.FakeClock
	healthy bool
	rules   proxier.NodeRules

	mu       sync.Mutex
	problems []proxier.Problem
}

func newBalancer(t *testing.T) *balancer {
	b := &balancer{t: t, clock: clocktesting.NewFakeClock(begin), healthy: true}
	b.Services = NewServices(ServicesOptions{
		Clock: b.clock, Families: []proxier.Family{proxier.IPv4, proxier.IPv6}, Healthy: func() bool { return b.healthy },
		Reporter: proxier.ReporterFunc(func(p proxier.Problem) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.problems = append(b.problems, p)
		}),
	})
	b.rules.HealthCheckAddrs = [proxier.Families][]netip.Addr{{netip.MustParseAddr("127.0.0.1")}, {netip.MustParseAddr("::1")}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { b.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	b.synced()
	return b
}

func (b *balancer) synced(changes ...proxier.HealthCheckChange) {
	b.Synced(proxier.SyncInfo{HealthChecks: changes, NodeRules: &b.rules})
}

// freePort returns a port that is free at the moment.
func freePort(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port()
}

// ask is the answer as text, or the error.
func ask(host string, port uint16) string {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	response, err := client.Get(fmt.Sprintf("http://%s/any/path", net.JoinHostPort(host, fmt.Sprint(port))))
	if err != nil {
		return "error"
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return "error"
	}
	h := response.Header
	return fmt.Sprintf("%d weight=%s %s %s\n%s", response.StatusCode, h.Get("X-Load-Balancing-Endpoint-Weight"), h.Get("Content-Type"), h.Get("X-Content-Type-Options"), body)
}

// want waits for an answer that begins so.
func (b *balancer) want(host string, port uint16, answer string) {
	b.t.Helper()
	var got string
	for limit := time.Now().Add(10 * time.Second); time.Now().Before(limit); time.Sleep(time.Millisecond) {
		if got = ask(host, port); strings.HasPrefix(got, answer) {
			return
		}
	}
	b.t.Fatalf("%s port %d answers %q, want %q", host, port, got, answer)
}

func (b *balancer) reported() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.problems)
}

var (
	web  = types.NamespacedName{Namespace: "shop", Name: "web"}
	blog = types.NamespacedName{Namespace: "shop", Name: "blog"}
)

func check(name types.NamespacedName, port uint16, ready ...int) proxier.HealthCheckChange {
	return proxier.HealthCheckChange{Service: name, Check: &proxier.HealthCheck{
		UID: "uid", Port: port, Ready: [proxier.Families]int(append(ready, 0)[:2]),
	}}
}

func TestServiceAnswers(t *testing.T) {
	b := newBalancer(t)
	port := freePort(t)
	b.synced(check(web, port, 2, 0))
	b.want("127.0.0.1", port, "200 weight=2 application/json nosniff\n"+`{
	"service": {
		"namespace": "shop",
		"name": "web"
	},
	"localEndpoints": 2,
	"serviceProxyHealthy": true
}`)
	b.want("::1", port, "503 weight=0 ")
	b.synced(check(web, port, 0, 1))
	b.want("127.0.0.1", port, "503 weight=0 ")
	b.want("::1", port, "200 weight=1 ")
	b.synced(check(web, port, 3, 1))
	b.healthy = false
	b.want("127.0.0.1", port, "503 weight=3 application/json nosniff\n"+`{
	"service": {
		"namespace": "shop",
		"name": "web"
	},
	"localEndpoints": 3,
	"serviceProxyHealthy": false
}`)
}

// TestServicePorts: ports follow the Services, and one may be another's in the next moment.
func TestServicePorts(t *testing.T) {
	b := newBalancer(t)
	one, two := freePort(t), freePort(t)
	b.synced(check(web, one, 1))
	b.want("127.0.0.1", one, "200 weight=1 ")
	kept, err := net.Dial("tcp4", fmt.Sprintf("127.0.0.1:%d", one))
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	b.synced(check(web, two, 1), check(blog, one, 5))
	b.want("127.0.0.1", one, "200 weight=5 ")
	if err := kept.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	// Ended by the other side, or not accepted before it was: there is no answer.
	if _, err := fmt.Fprint(kept, "GET / HTTP/1.1\r\nHost: a\r\n\r\n"); err == nil {
		if n, err := kept.Read(make([]byte, 1)); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a connection to the former port is answered: %d bytes, %v", n, err)
		}
	}
	b.want("127.0.0.1", two, "200 weight=1 ")
	b.synced(proxier.HealthCheckChange{Service: web}, check(blog, two, 5))
	b.want("127.0.0.1", two, "200 weight=5 ")
	b.want("127.0.0.1", one, "error")
	b.rules.HealthCheckAddrs[proxier.IPv4] = nil
	b.synced()
	b.want("127.0.0.1", two, "error")
	b.rules.HealthCheckAddrs[proxier.IPv4] = []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	b.synced()
	b.want("127.0.0.1", two, "200 weight=5 ")
	if len(b.problems) > 0 {
		t.Errorf("problems %v", b.problems)
	}
}

// TestServicePortTaken: the other family is served meanwhile, and each sync tries again.
func TestServicePortTaken(t *testing.T) {
	b := newBalancer(t)
	held, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	port := held.Addr().(*net.TCPAddr).AddrPort().Port()
	b.synced(check(web, port, 1, 1))
	b.want("::1", port, "200 weight=1 ")
	tries := b.reported()
	for limit := time.Now().Add(10 * time.Second); b.reported() < tries+2; time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatal("it is not tried again")
		}
		b.Synced(proxier.SyncInfo{})
	}
	b.mu.Lock()
	want := proxier.Problem{
		Kind: "Service", Object: web, UID: "uid", Field: "spec.healthCheckNodePort", Reason: "FailedToStartServiceHealthcheck",
		Message: fmt.Sprintf("cannot listen on 127.0.0.1:%d for health checks of load balancers, retrying: listen tcp4 127.0.0.1:%[1]d: bind: address already in use", port),
	}
	if d := cmp.Diff(want, b.problems[0]); d != "" {
		t.Errorf("problem (-want +got):\n%s", d)
	}
	b.mu.Unlock()
	held.Close()
	for limit := time.Now().Add(10 * time.Second); !b.clock.HasWaiters(); time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatal("no retry is scheduled without a sync")
		}
	}
	b.clock.Step(retryInterval)
	b.want("127.0.0.1", port, "200 weight=1 ")
}
