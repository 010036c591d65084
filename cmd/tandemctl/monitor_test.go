// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/monitor"
)

// fakeMonitor reports what it has, and then nothing.
type fakeMonitor struct {
	list     []monitor.Failure
	attached int
	closed   bool
}

func (f *fakeMonitor) Follow([]*ciliumebpf.Program) (int, error) { return f.attached, nil }
func (f *fakeMonitor) LeftOut() (uint64, error)                  { return 3, nil }
func (f *fakeMonitor) Close() error                              { f.closed = true; return nil }

func (f *fakeMonitor) Next(_ context.Context, deadline time.Time) (monitor.Failure, error) {
	if len(f.list) == 0 {
		time.Sleep(time.Until(deadline))
		return monitor.Failure{}, os.ErrDeadlineExceeded
	}
	first := f.list[0]
	f.list = f.list[1:]
	return first, nil
}

func TestMonitor(t *testing.T) {
	at := netip.MustParseAddrPort
	when := time.Date(2026, 3, 1, 12, 0, 0, 5e6, time.UTC)
	failures := []monitor.Failure{
		{Time: when, Protocol: proxier.TCP, Client: at("198.51.100.7:40000"), Frontend: at("203.0.113.4:80"), Reason: "dropped_source_range"},
		{Time: when, Protocol: proxier.UDP, Frontend: at("10.96.0.10:53"), Reason: monitor.RejectedNoBackend, Process: "dig", PID: 4711},
		{Time: when, Protocol: proxier.TCP, Client: at("198.51.100.8:40000"), Frontend: at("10.96.9.9:80"), Reason: monitor.RejectedNoBackend},
	}
	for command, want := range map[string]string{
		"monitor": `TIME          REASON                SERVICE          PORT  PROTO  CLIENT              FRONTEND
12:00:00.005  dropped_source_range  shop/kubernetes  http  TCP    198.51.100.7:40000  203.0.113.4:80
12:00:00.005  rejected_no_backend   kube-system/kube-dns  dns   UDP    dig[4711]           10.96.0.10:53
12:00:00.005  rejected_no_backend   -                     -     TCP    198.51.100.8:40000  10.96.9.9:80
`,
		"monitor --client 198.51.100.8 -o json": `{"apiVersion":"tandemctl.tandem-proxy.dev/v1alpha1","kind":"Failure","time":"2026-03-01T12:00:00.005Z","reason":"rejected_no_backend","namespace":"","name":"","port":"","protocol":"TCP","client":"198.51.100.8:40000","frontend":"10.96.9.9:80","process":"","pid":0}
`,
		"monitor -n kube-system -o json": `{"apiVersion":"tandemctl.tandem-proxy.dev/v1alpha1","kind":"Failure","time":"2026-03-01T12:00:00.005Z","reason":"rejected_no_backend","namespace":"kube-system","name":"kube-dns","port":"dns","protocol":"UDP","client":null,"frontend":"10.96.0.10:53","process":"dig","pid":4711}
`,
		"monitor --service kube-system/kube-dns:dns -o json": `{"apiVersion":"tandemctl.tandem-proxy.dev/v1alpha1","kind":"Failure","time":"2026-03-01T12:00:00.005Z","reason":"rejected_no_backend","namespace":"kube-system","name":"kube-dns","port":"dns","protocol":"UDP","client":null,"frontend":"10.96.0.10:53","process":"dig","pid":4711}
`,
	} {
		m := &fakeMonitor{list: append([]monitor.Failure{}, failures...), attached: 2}
		a, out, errs := newTestApp(sample())
		a.monitor = func(uint32) (failureMonitor, error) { return m, nil }
		clock := now
		a.now = func() time.Time { clock = clock.Add(time.Second); return clock }
		if code := a.run(strings.Fields(command + " --for 300ms")); code != exitOK || out.String() != want {
			t.Errorf("%s: exit code %d, %s\n%s\nwant\n%s", command, code, errs, out, want)
		}
		if !m.closed || !strings.Contains(errs.String(), "3 more failures, of all Services, were not reported") {
			t.Errorf("closed: %t, %s", m.closed, errs)
		}
	}
	a, _, errs := newTestApp(sample())
	a.monitor = func(uint32) (failureMonitor, error) { return &fakeMonitor{}, nil }
	if code := a.run([]string{"monitor"}); code != exitError || !strings.Contains(errs.String(), "cannot be monitored") {
		t.Errorf("programs without such functions: exit code %d, %s", code, errs)
	}
}
