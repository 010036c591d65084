// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/sources/backendstates"
)

// looks ends the watch when it has seen all of them.
type looks struct {
	*fakeInspector
	list [][]inspect.FlowView
}

var errNoMore = errors.New("no more looks")

func (l *looks) open(string) (inspector, error) {
	if len(l.list) == 0 {
		return nil, errNoMore
	}
	l.flows, l.list = l.list[0], l.list[1:]
	return l, nil
}

func TestWatchFlows(t *testing.T) {
	all := sample().flows
	closing, moved := all[0], all[2]
	closing.State = "closing"
	moved.Backend = all[0].Backend
	watch := func(format string) string {
		a, out, errs := newTestApp(sample())
		l := &looks{sample(), [][]inspect.FlowView{all[:1], all[:3], {closing, all[1], moved}, all[1:2]}}
		a.inspect = l.open
		if code := a.run([]string{"flows", "-w", "--interval", "1ms", "-o", format}); code != exitError || !strings.Contains(errs.String(), errNoMore.Error()) {
			t.Errorf("exit code %d: %s", code, errs)
		}
		return out.String()
	}
	want := []string{
		"present 198.51.100.7:40000 established", "new [fd00:10:244:1::5]:39158 established", "new 10.244.1.5:53001 connected",
		"changed 10.244.1.5:53001 connected", "changed 198.51.100.7:40000 closing", "ended 10.244.1.5:53001 connected", "ended 198.51.100.7:40000 closing",
	}
	var got []string
	for line := range strings.Lines(watch("json")) {
		var e struct {
			APIVersion, Kind, Event string
			Object                  inspect.FlowView
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil || e.APIVersion != apiVersion || e.Kind != "WatchEvent" {
			t.Fatal(err, line)
		}
		got = append(got, fmt.Sprintf("%s %s %s", e.Event, e.Object.Client, e.Object.State))
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}

	lines := strings.Split(strings.TrimSuffix(watch("table"), "\n"), "\n")
	if len(lines) != 1+len(want) || !strings.HasPrefix(lines[0], "TIME      EVENT    SERVICE") || !strings.HasPrefix(lines[1], "12:02:03  present  shop/kubernetes") {
		t.Fatalf("got\n%s", strings.Join(lines, "\n"))
	}
	// Columns stay where the widest row so far had them.
	if at := strings.Index(lines[2], "fd00:10:244:1::5"); at != strings.Index(lines[len(lines)-1], "198.51.100.7")+1 {
		t.Errorf("columns do not align:\n%s", strings.Join(lines, "\n"))
	}
}

func TestTop(t *testing.T) {
	i := sample()
	a, out, errs := newTestApp(i)
	at, opened := now, 0
	a.now = func() time.Time { at = at.Add(2 * time.Second); return at }
	a.inspect = func(string) (inspector, error) {
		if opened++; opened > 1 {
			i.services[0].Counters.Connections += 10
			i.services[0].Counters.Bytes += 4096
			i.services[1].Counters.Connections += 400
			i.services[1].Counters.Rejected++
			// Failures of clients outside and of sockets add up.
			i.services[3].Counters.Refused += 6
			i.services[3].Counters.Unanswered += 40
			n := uint64(opened)
			i.services[3].Signals = &inspect.SignalsView{Refused: 2 * n, Unanswered: n, SentBytes: 1024 * n, ReceivedBytes: 7168 * n}
		}
		return i, nil
	}
	if code := a.run([]string{"top", "--times", "1", "--interval", "1ms"}); code != exitOK {
		t.Fatalf("exit code %d: %s", code, errs)
	}
	want := `12:02:07, every 1ms, 3 service ports with traffic, by connections
SERVICE               PORT   PROTO  CONN/S  REJECTED/S  DROPPED/S  REFUSED/S  UNANSWERED/S  PACKETS/S  BYTES/S  SOCKET BYTES/S
kube-system/kube-dns  dns    UDP    200     0.5         0          0          0             0          0B       -
default/kubernetes    https  TCP    5.0     0           0          0          0             0          2.0KiB   0B
shop/kubernetes       http   TCP    0       0           0          5.0        21            0          0B       8.0KiB
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
	for _, order := range []struct{ by, first string }{
		{"failures", "shop/kubernetes"}, {"unanswered", "shop/kubernetes"}, {"rejected", "kube-system/kube-dns"}, {"bytes", "shop/kubernetes"},
	} {
		out.Reset()
		if code := a.run([]string{"top", "--times", "1", "--interval", "1ms", "--sort", order.by}); code != exitOK {
			t.Fatalf("exit code %d: %s", code, errs)
		}
		if lines := strings.Split(out.String(), "\n"); !strings.HasPrefix(lines[2], order.first) {
			t.Errorf("by %s, %q is first, want %s", order.by, lines[2], order.first)
		}
	}
	out.Reset()
	if code := a.run([]string{"top", "default/kubernetes", "--times", "2", "--interval", "1ms", "-o", "json"}); code != exitOK {
		t.Fatalf("exit code %d: %s", code, errs)
	}
	if n := bytes.Count(out.Bytes(), []byte(`"connections":5,"rejected":0,"dropped":0,"refused":0,"unanswered":0,"packets":0,"bytes":2048,"socketBytes":0}`)); n != 2 || strings.Contains(out.String(), "kube-dns") {
		t.Errorf("got %s", out)
	}
}

// Counters that go back, as those of a Service that was deleted and created, are no rate.
func TestRatesOfOthers(t *testing.T) {
	before, after := sample().services, sample().services
	after[0].Counters.Connections = 3
	after[1].ID++
	got := ratesOf(before, after, time.Second, "connections")
	if len(got) != 1 || got[0].Name != "kube-dns" || got[0].Connections != 4000 {
		t.Errorf("got %+v", got)
	}
}

// TestWatchServices: counters are no change.
func TestWatchServices(t *testing.T) {
	a, out, errs := newTestApp(sample())
	a.servers = []string{servePlacements(t)}
	n := 0
	a.inspect = func(string) (inspector, error) {
		i := sample()
		switch n++; n {
		case 2:
			i.services[0].Counters.Connections++
		case 3:
			i.services[1].Backends = i.services[1].Backends[1:]
		case 4:
			return nil, errNoMore
		}
		i.services = i.services[:2]
		return i, nil
	}
	if code := a.run([]string{"services", "-w", "--interval", "1ms"}); code != exitError || !strings.Contains(errs.String(), errNoMore.Error()) {
		t.Errorf("exit code %d: %s", code, errs)
	}
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	if len(lines) != 5 || !strings.Contains(lines[4], "changed  kube-system/kube-dns") || !strings.HasSuffix(lines[4], "programmed  1           -") {
		t.Errorf("got\n%s", out)
	}
}

// watchedLines are what a command that watches says until it fails, in the first columns.
func watchedLines(t *testing.T, a *app, out *bytes.Buffer, command string) (list []string) {
	t.Helper()
	if code := a.run(append(strings.Fields(command), "--watch", "--interval", "1ms")); code != exitError {
		t.Errorf("%s: exit code %d", command, code)
	}
	for line := range strings.Lines(out.String()) {
		list = append(list, strings.Join(strings.Fields(line)[1:5], " "))
	}
	return list
}

// TestWatchOptOuts: processes are no change.
func TestWatchOptOuts(t *testing.T) {
	a, out, _ := newTestApp(nil)
	states := []map[uint64]lbmap.OptOutBy{
		{1: lbmap.OptOutByPod}, {1: lbmap.OptOutByPod, 2: lbmap.OptOutByCommand}, {1: lbmap.OptOutByCommand, 2: lbmap.OptOutByCommand}, {1: lbmap.OptOutByCommand},
	}
	a.inspect = func(string) (inspector, error) {
		if len(states) == 0 {
			return nil, errNoMore
		}
		i := &fakeInspector{optOuts: states[0]}
		states = states[1:]
		return i, nil
	}
	pid := 0
	a.owners = func() map[uint64][]int { pid++; return map[uint64][]int{1: {pid}} }
	want := []string{"EVENT COOKIE BY PROCESSES", "present 1 pod 1", "new 2 command none", "changed 1 command 3", "ended 2 command none"}
	if got := watchedLines(t, a, out, "optout list"); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// TestWatchBackends: what is not known is said once.
func TestWatchBackends(t *testing.T) {
	a, out, errs := newTestApp(nil)
	dir := t.TempDir()
	states := []string{
		`{"address": "10.244.1.1", "state": "maintenance"}`,
		`{"address": "10.244.1.1", "state": "quarantined"}, {"address": "10.244.1.2", "port": 80, "service": "shop/web", "state": "maintenance"}`,
		`{"address": "10.244.1.2", "port": 80, "service": "shop/web", "state": "maintenance"}`,
		`no more looks`,
	}
	// Each look asks this server before it reads the file.
	another := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if err := os.WriteFile(filepath.Join(dir, backendstates.FileName), []byte(`{"backends": [`+states[0]+`]}`), 0o600); err != nil {
			t.Error(err)
		}
		if len(states) > 1 {
			states = states[1:]
		}
		w.WriteHeader(http.StatusNotFound)
	}))
	defer another.Close()
	a.servers = []string{another.Listener.Addr().String()}
	want := []string{
		"EVENT BACKEND SERVICE STATE", "present 10.244.1.1 all maintenance", "changed 10.244.1.1 all quarantined",
		"new 10.244.1.2:80 shop/web maintenance", "ended 10.244.1.1 all quarantined",
	}
	if got := watchedLines(t, a, out, "backend list --state-dir "+dir); !slices.Equal(got, want) || strings.Count(errs.String(), "is not known") != 1 {
		t.Errorf("got  %q\nwant %q\n%s", got, want, errs)
	}
}
