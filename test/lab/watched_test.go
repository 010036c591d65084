// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// recorder is a TB that records failures.
type recorder struct {
	testing.TB
	said     []string
	failed   bool
	cleanups []func()
}

func (r *recorder) Logf(format string, args ...any) {
	r.said = append(r.said, fmt.Sprintf(format, args...))
}

func (r *recorder) Errorf(format string, args ...any) {
	r.failed = true
	r.Logf(format, args...)
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.failed = true
	r.Logf(format, args...)
	runtime.Goexit()
}

func (r *recorder) Failed() bool     { return r.failed }
func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }

// record runs a test to its end, and returns its messages.
func record(t *testing.T, test func(lab.TB)) string {
	r := &recorder{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		test(r)
	}()
	<-done
	for _, f := range slices.Backward(r.cleanups) {
		f()
	}
	return strings.Join(r.said, "\n")
}

func shell(n *lab.Node, script string) *lab.Watched {
	return lab.Watch(n.Command(bg, "sh", "-c", script))
}

// TestWatched checks that Await sees the output of a process, and that Terminate ends it.
func TestWatched(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	var p *lab.Watched
	if said := record(t, func(tb lab.TB) {
		p = shell(n, `trap 'kill $!; echo over; exit 0' TERM; sleep 1000 >/dev/null 2>&1 & echo ready; wait`)
		p.Begin(tb)
		p.Await(tb, time.Minute, "the word", p.Says("ready"))
		if p.Ended() {
			tb.Fatalf("it has ended")
		}
		p.Terminate(tb)
	}); said != "" {
		t.Error(said)
	}
	if got := p.Log.String(); got != "ready\nover\n" {
		t.Errorf("the log is %q", got)
	}
}

// TestWatchedFails checks that failures show the log, and that Await fails at once when the
// process has ended.
func TestWatchedFails(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	never := func() error { return errors.New("not yet") }
	for name, test := range map[string]struct {
		run  func(lab.TB)
		want string
	}{
		"ends at once": {func(tb lab.TB) {
			p := shell(n, "echo no luck; exit 3")
			p.Begin(tb)
			p.Await(tb, time.Hour, "luck", p.Says("good luck"))
		}, "luck: the log does not say \"good luck\": the process has ended\nlog of the process on node1:\nno luck\n"},
		"takes too long": {func(tb lab.TB) {
			p := shell(n, "exec sleep 1000")
			p.Begin(tb)
			p.Await(tb, 20*time.Millisecond, "luck", never)
		}, "luck: not yet\nlog of the process on node1:\n"},
		"ends out of order": {func(tb lab.TB) {
			p := shell(n, "echo ready; exec sleep 1000")
			p.Begin(tb)
			p.Await(tb, time.Minute, "the word", p.Says("ready"))
			p.Terminate(tb)
		}, "the process on node1 after SIGTERM: signal: terminated\nlog of the process on node1:\nready\n"},
		"cannot run": {func(tb lab.TB) {
			lab.Watch(n.Command(bg, "/nowhere")).Begin(tb)
		}, "start a process on node1: fork/exec /nowhere: no such file or directory"},
		"no process": {func(tb lab.TB) { lab.Await(tb, 20*time.Millisecond, "luck", never) }, "luck: not yet"},
	} {
		t.Run(name, func(t *testing.T) {
			if said := record(t, test.run); said != test.want {
				t.Errorf("it says\n%s\nwant\n%s", said, test.want)
			}
		})
	}
}

// TestGet sends requests to a server that listens only at the node's loopback address.
func TestGet(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	server, url, err := n.ServeHTTP(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/bad" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		fmt.Fprint(w, "this is ", r.URL)
	}))
	if err != nil {
		t.Fatal(err)
	}
	port := netip.MustParseAddrPort(strings.TrimPrefix(url, "http://")).Port()

	if body, err := n.Fetch(bg, port, "/good?a=b"); err != nil || body != "this is /good?a=b" {
		t.Errorf("it answers %q, error %v", body, err)
	}
	if code, body, err := n.Get(bg, port, "/bad"); err != nil || code != http.StatusServiceUnavailable || body != "this is /bad" {
		t.Errorf("it answers %d %q, error %v", code, body, err)
	}
	if _, err := n.Fetch(bg, port, "/bad"); err == nil || err.Error() != "/bad answers 503: this is /bad" {
		t.Errorf("a bad answer: %v", err)
	}
	server.Close()
	if _, err := n.Fetch(bg, port, "/"); err == nil {
		t.Error("no error although no server listens on this port")
	}
}

// TestHTTPClientGivesUp checks that a request without an answer ends at its timeout, and does
// not prevent the sandbox from being closed.
func TestHTTPClientGivesUp(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	p := n.Pod("p")
	defer lab.SetDialTimeout(time.Hour)()
	out, err := p.Command(bg, "ip", "neigh", "replace", "10.244.1.254", "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", lab.Uplink).CombinedOutput()
	if err != nil {
		t.Fatalf("ip neigh: %v: %s", err, out)
	}
	if response, err := p.HTTPClient(50 * time.Millisecond).Get("http://192.0.2.1"); err == nil {
		response.Body.Close()
		t.Error("got an answer, want a timeout")
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// TestLoad checks that clients continue while they are answered, repeat unanswered requests by UDP
// as often as allowed, and then report an error.
func TestLoad(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	web, client := n.Pod("web"), n.Pod("client")
	server, err := web.ServeTCP(80)
	if err != nil {
		t.Fatal(err)
	}
	var w *lab.Load
	said := record(t, func(tb lab.TB) {
		w = lab.NewLoad(tb)
		defer w.End()
		w.Use(client.Sandbox, map[string]netip.AddrPort{"tcp4": netip.AddrPortFrom(web.Addr4, 80), "tcp6": netip.AddrPortFrom(web.Addr6, 80)}, lab.Pace{})
		w.More(20)
	})
	if said != "" || w.Asked.Load() < 20 || w.Failed.Load() != 0 || w.Again.Load() != 0 {
		t.Errorf("of %d requests %d failed, %d were made again; it says %q", w.Asked.Load(), w.Failed.Load(), w.Again.Load(), said)
	}
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	for name, again := range map[string]int64{"tcp4": 0, "tcp4 again": 2, "udp4": 2} {
		network, _, reconnect := strings.Cut(name, " ")
		said = record(t, func(tb lab.TB) {
			w = lab.NewLoad(tb)
			defer w.End()
			w.Use(client.Sandbox, map[string]netip.AddrPort{network: netip.AddrPortFrom(web.Addr4, 80)}, lab.Pace{Every: time.Hour, Tries: 3, Reconnect: reconnect})
			w.More(1000)
		})
		if !strings.Contains(said, network+" from client: ") || w.Asked.Load() != 1 || w.Failed.Load() != 1 || w.Again.Load() != again {
			t.Errorf("of %d requests %d failed, %d were made again; it says %q", w.Asked.Load(), w.Failed.Load(), w.Again.Load(), said)
		}
	}
}
