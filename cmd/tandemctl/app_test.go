// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/observe/status"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/proxier/ebpf/successor"
	"github.com/tandem-proxy/tandem/test/golden"
	"github.com/tandem-proxy/tandem/test/lab"
)

func ptr[T any](v T) *T { return &v }

// fakeInspector has fixed answers.
type fakeInspector struct {
	status   inspect.Status
	services []inspect.ServiceView
	flows    []inspect.FlowView
	optOuts  map[uint64]lbmap.OptOutBy
	err      error
	closed   bool
}

func (f *fakeInspector) WithPrograms(fn func([]*ciliumebpf.Program) error) error { return fn(nil) }

func (f *fakeInspector) Flows(_ context.Context, _, _ string, fn func(inspect.FlowView)) error {
	for _, v := range f.flows {
		fn(v)
	}
	return f.err
}

func (f *fakeInspector) Status() (inspect.Status, error)             { return f.status, f.err }
func (f *fakeInspector) Services() ([]inspect.ServiceView, error)    { return f.services, f.err }
func (f *fakeInspector) OptOuts() (map[uint64]lbmap.OptOutBy, error) { return f.optOuts, f.err }
func (f *fakeInspector) Unplaced() int                               { return f.status.Unplaced }
func (f *fakeInspector) Close() error                                { f.closed = true; return nil }

func (f *fakeInspector) AddOptOut(cookie uint64) error {
	if f.optOuts == nil {
		f.optOuts = map[uint64]lbmap.OptOutBy{}
	}
	f.optOuts[cookie] = lbmap.OptOutByCommand
	return f.err
}

func (f *fakeInspector) RemoveOptOut(cookie uint64) (bool, error) {
	_, existed := f.optOuts[cookie]
	delete(f.optOuts, cookie)
	return existed, f.err
}

// now is two minutes and three seconds after the last change.
var now = time.Date(2026, 3, 1, 12, 2, 3, 0, time.UTC)

func sample() *fakeInspector {
	at := func(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }
	loaded := time.Date(2026, 2, 28, 8, 0, 0, 0, time.UTC)
	return &fakeInspector{
		status: inspect.Status{
			Cgroup: "/sys/fs/cgroup", Layout: 1, Running: true, LastChange: ptr(now.Add(-123 * time.Second)), Unplaced: 3,
			Programs: []inspect.ProgramStatus{
				{Hook: "connect4", Name: "tdm_connect4", ID: 41, Tag: "0011223344556677", LoadedAt: loaded},
				{Hook: "sendmsg4", Name: "tdm_sendmsg4", ID: 43, Tag: "8899aabbccddeeff", LoadedAt: loaded},
			},
			MissingHooks: []string{"getpeer4", "getpeer6"},
			Devices: []inspect.DeviceStatus{
				{Device: "eth0", Index: 2, Direction: "ingress", Method: "tcx", Program: "tdm_in", ID: 51},
				{Device: "eth0", Index: 2, Direction: "egress", Method: "tcx", Program: "tdm_out", ID: 52},
			},
			Packets: []lbmap.PacketCount{{Result: "forwarded_local", Count: 4711}, {Result: "forwarded_reply", Count: 4710}, {Result: "rejected_no_backend", Count: 1}, {Result: "dropped_policy"}},
			Maps: []inspect.MapStatus{
				{Name: "tdm_frontend", ID: 7, Type: "Hash", Used: ptr(4096), Max: 8192, Limit: 131072, MemoryBytes: ptr(uint64(12 << 20))},
				{Name: "tdm_meta", ID: 6, Type: "Array", Used: ptr(1), Max: 1, Limit: 1, MemoryBytes: ptr(uint64(4096))},
				{Name: "tdm_optout", ID: 9, Type: "Hash", Used: ptr(0), Max: 4096, Limit: 4096, MemoryBytes: ptr(uint64(512))},
				{Name: "tdm_sock", ID: 8, Type: "SkStorage"},
			},
			MapBytesLimit: 1 << 30,
		},
		services: []inspect.ServiceView{
			{
				Namespace: "default", Name: "kubernetes", Port: "https", Protocol: "TCP", ID: 1, State: inspect.Programmed,
				AffinitySeconds: 10800, Counters: inspect.CountersView{Connections: 17, Traffic: flowtable.Traffic{Packets: 120, Bytes: 34567}},
				Frontends: []inspect.FrontendView{
					{Address: at("10.96.0.1:443"), Kind: "ClusterIP", Clients: "all", Set: "ipv4/cluster"},
					{Address: at("[fd00:10:96::1]:443"), Kind: "ClusterIP", Clients: "all", Set: "ipv6/cluster"},
				},
				Sets: []inspect.SetView{{Name: "ipv4/cluster", Size: 1}, {Name: "ipv6/cluster", Verdict: "reject"}},
				Backends: []inspect.BackendView{
					{Address: at("172.18.0.2:6443"), ID: 1, Generation: 5, Sets: []string{"ipv4/cluster"}, Connections: 17},
				},
				Signals: &inspect.SignalsView{
					Established: 15, Refused: 1, Unanswered: 1, SentBytes: 4096, ReceivedBytes: 123456,
					Connect: inspect.TimesView{Count: 15, SumSeconds: 0.03, MedianSeconds: ptr(0.00025)},
					RTT:     inspect.TimesView{Count: 12, SumSeconds: 0.002, MedianSeconds: ptr(0.0001), P99Seconds: ptr(0.001)},
				},
			},
			{
				Namespace: "kube-system", Name: "kube-dns", Port: "dns", Protocol: "UDP", ID: 2, State: inspect.Programmed,
				Counters:  inspect.CountersView{Connections: 4000, Rejected: 2, Raced: 1},
				Frontends: []inspect.FrontendView{{Address: at("10.96.0.10:53"), Kind: "ClusterIP", Clients: "all", Set: "ipv4/cluster"}},
				Sets:      []inspect.SetView{{Name: "ipv4/cluster", Size: 2}},
				Backends: []inspect.BackendView{
					{Address: at("10.244.0.2:53"), ID: 2, Generation: 5, Sets: []string{"ipv4/cluster"}, Local: true, Connections: 2100},
					{Address: at("10.244.1.2:53"), ID: 3, Generation: 6, Sets: []string{"ipv4/cluster"}, Connections: 1890},
					{Address: at("10.244.2.2:53"), ID: 4, Generation: 5, Sets: []string{}, Terminating: true, Connections: 10},
				},
			},
			{
				Namespace: "shop", Name: "cart", Protocol: "TCP", ID: 3, State: inspect.NotProgrammed, Reason: "backends full",
				Frontends: []inspect.FrontendView{}, Sets: []inspect.SetView{}, Backends: []inspect.BackendView{},
			},
			{
				Namespace: "shop", Name: "kubernetes", Port: "http", Protocol: "TCP", ID: 4, State: inspect.Programmed, Changing: true,
				Counters: inspect.CountersView{Dropped: 9},
				Frontends: []inspect.FrontendView{
					{Address: at("10.96.3.4:80"), Kind: "ClusterIP", Clients: "all", Set: "ipv4/local"},
					{Address: at("203.0.113.4:80"), Kind: "LoadBalancer", Clients: "pod,host", Set: "ipv4/cluster", Filtered: true},
					{Address: at("203.0.113.4:80"), Kind: "LoadBalancer", Clients: "outside", Set: "ipv4/local", Filtered: true},
				},
				Sets: []inspect.SetView{{Name: "ipv4/local", Verdict: "drop"}}, Backends: []inspect.BackendView{},
			},
		},
		flows: []inspect.FlowView{
			{
				Namespace: "shop", Name: "kubernetes", Port: "http", Protocol: "TCP", At: inspect.AtPackets,
				Client: at("198.51.100.7:40000"), Frontend: at("203.0.113.4:80"), Source: ptr(at("172.18.0.1:2048")), Backend: at("10.244.2.7:8080"),
				State: "established", Action: "forward", Device: "eth0", AgeSeconds: ptr(int64(93784)), IdleSeconds: ptr(int64(75)),
				Requests: &flowtable.Traffic{Packets: 12, Bytes: 900}, Replies: &flowtable.Traffic{Packets: 11, Bytes: 1 << 20},
			},
			{
				Namespace: "default", Name: "kubernetes", Port: "https", Protocol: "TCP", At: inspect.AtSocket,
				Client: at("[fd00:10:244:1::5]:39158"), Frontend: at("[fd00:10:96::1]:443"), Backend: at("[fd00:18::2]:6443"),
				State: "established", AgeSeconds: ptr(int64(3)), IdleSeconds: ptr(int64(0)), RTTMicroseconds: ptr(uint32(1234)),
				Requests: &flowtable.Traffic{Packets: 3, Bytes: 2048}, Replies: &flowtable.Traffic{Packets: 4, Bytes: 10},
			},
			{
				Namespace: "kube-system", Name: "kube-dns", Port: "dns", Protocol: "UDP", At: inspect.AtSocket,
				Client: at("10.244.1.5:53001"), Frontend: at("10.96.0.10:53"), Backend: at("10.244.0.2:53"), State: "connected",
			},
			{
				Protocol: "UDP", At: inspect.AtPackets, Client: at("10.244.1.5:2048"), Frontend: at("10.244.2.7:8080"), Source: ptr(at("10.244.1.5:2049")),
				Backend: at("10.244.2.7:8080"), State: "unanswered", Action: "remap port", Device: "eth0", IdleSeconds: ptr(int64(1)),
				Requests: &flowtable.Traffic{Packets: 1, Bytes: 60}, Replies: &flowtable.Traffic{},
			},
		},
		optOuts: map[uint64]lbmap.OptOutBy{4097: lbmap.OptOutByCommand, 8193: lbmap.OptOutByPod},
	}
}

// sampleCarried are frontends that the maps do not have, or not for everybody.
func sampleCarried() []explain.Placement {
	at := netip.MustParseAddrPort
	return []explain.Placement{
		{
			Namespace: "shop", Name: "kubernetes", Port: "http", Protocol: "TCP", Kind: "NodePort", Address: at("0.0.0.0:30080"), Clients: "outside",
			Carrier: "iptables", Reason: "the kernel lacks features that eBPF programs need to translate packets", Set: "ipv4/local", Verdict: "drop",
		},
		{
			Namespace: "shop", Name: "calls", Port: "sip", Protocol: "SCTP", Kind: "ClusterIP", Address: at("10.96.5.1:5060"), Clients: "all",
			Reason: "eBPF does not support SCTP", Set: "ipv4/cluster", Backends: 2, AffinitySeconds: 60,
		},
		{
			Namespace: "z", Name: "last", Protocol: "TCP", Kind: "ClusterIP", Address: at("10.96.5.2:80"), Clients: "all",
			Carrier: "iptables", Reason: "backends full", Set: "ipv4/cluster", Backends: 1000,
		},
	}
}

// servePlacements is a kube-proxy that answers which datapath serves what is not in the maps.
// sampleProcess is a process that runs well.
func sampleProcess() *status.Status {
	at := now.Add(-2 * time.Second)
	return &status.Status{
		Node: "node1", Version: "v0.1.0", Mode: "ebpf", Configured: "ebpf", ConfiguredBy: "/etc/kube-proxy.yaml:3", Reasons: []string{"no maps", "no hooks"}, Degraded: []string{"SCTP is left to rules"}, Direct: &status.Direct{Dispatch: "geneve", Endpoints: 3, Ready: 2}, Started: now.Add(-time.Hour), Source: "https://10.0.0.1:6443",
		LastEvents: map[string]time.Time{"services": at, "endpointslices": at.Add(-time.Minute)},
		Ready:      true, Checks: []health.Check{{Name: "programmed", OK: true}}, LastSync: &status.Sync{End: at, Duration: 0.0121}, LastSuccess: &at,
		ServicePorts: []status.Share{{Datapaths: []string{"ebpf"}, Count: 102}, {Datapaths: []string{"ebpf", "iptables"}, Count: 3}, {Datapaths: []string{}, Count: 1}},
		Problems:     []status.Problem{{Kind: "Service", Reason: "AddressConflict", Count: 2}},
	}
}

func servePlacements(t *testing.T, list ...explain.Placement) (address string) {
	t.Helper()
	return serveMode(t, "ebpf", list...)
}

func serveMode(t *testing.T, mode string, list ...explain.Placement) (address string) {
	t.Helper()
	process := sampleProcess()
	process.Mode = mode
	slices.SortFunc(list, func(a, b explain.Placement) int { return a.CompareService(b.Namespace, b.Name, b.Port, b.Protocol) })
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case status.Path:
			_ = json.NewEncoder(w).Encode(process)
			return
		case explain.PlacementsPath:
		default:
			http.NotFound(w, r)
			return
		}
		_ = json.NewEncoder(w).Encode(explain.Placements{Node: "node1", Mode: mode, Frontends: append([]explain.Placement{}, list...)})
	}))
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

// Either of the maps and kube-proxy may be there without the other.
func TestServicesOfOne(t *testing.T) {
	a, out, errs := newTestApp(sample())
	if code := a.run([]string{"services"}); code != exitOK || !strings.Contains(out.String(), "kube-dns") || !strings.Contains(errs.String(), "cannot connect to kube-proxy") {
		t.Errorf("no server: exit code %d\n%s%s", code, out, errs)
	}
	out.Reset()
	if code := a.run([]string{"services", "-o", "json"}); code != exitOK || !strings.Contains(out.String(), `"elsewhere": [],
  "elsewhereError": "cannot connect to kube-proxy (`) {
		t.Errorf("no server: exit code %d\n%s", code, out)
	}
	a, out, errs = newTestApp(nil)
	a.inspect = func(string) (inspector, error) { return nil, inspect.ErrNotRunning }
	a.servers = []string{servePlacements(t, sampleCarried()...)}
	if code := a.run([]string{"services"}); code != exitOK || !strings.Contains(out.String(), "z/last") || errs.Len() > 0 {
		t.Errorf("no programs: exit code %d\n%s%s", code, out, errs)
	}
	if code := a.run([]string{"services", "z/none"}); code != exitError || !strings.Contains(errs.String(), "does not exist or is headless") || strings.Contains(errs.String(), "another tier") {
		t.Errorf("no such Service: exit code %d %s", code, errs)
	}
	a.servers = nil
	if code := a.run([]string{"services"}); code != exitError || !strings.Contains(errs.String(), "Start kube-proxy") {
		t.Errorf("neither: exit code %d %s", code, errs)
	}
}

// newTestApp has nothing of this machine in it.
func newTestApp(i *fakeInspector) (a *app, out, errs *bytes.Buffer) {
	out, errs = &bytes.Buffer{}, &bytes.Buffer{}
	return &app{
		out: out, err: errs,
		now:      func() time.Time { return now },
		findRoot: func() (string, error) { return "/sys/fs/cgroup", nil },
		inspect: func(string) (inspector, error) {
			return i, nil
		},
		probe: func(context.Context, string, []string) capabilities.Report {
			return capabilities.Report{Kernel: "6.1.0", Results: []capabilities.Result{
				{Feature: capabilities.Connect4, State: capabilities.Yes},
				{Feature: capabilities.SetRetval, State: capabilities.No, Err: errors.New("invalid argument")},
			}}
		},
		filters: func(context.Context) []string {
			return []string{"before DNAT: rule 3 of chain early in table inet guard of nf_tables (TCP ports 30080)", "forwards only translated connections: chain FORWARD in table ip filter of nf_tables"}
		},
		cookie: func(path string) (uint64, error) {
			if path != "/proc/4711/ns/net" {
				return 0, fmt.Errorf("open network namespace: %w", &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist})
			}
			return 12289, nil
		},
		findServers: func(context.Context) []string { return nil },

		owners:  func() map[uint64][]int { return map[uint64][]int{4097: {100, 101, 102, 103, 104, 105, 106}} },
		version: func() versionInfo { return versionInfo{Version: "v0.1.0", Revision: "0123456", GoVersion: "go1.26"} },
	}, out, errs
}

func TestOutput(t *testing.T) {
	for name, command := range map[string]string{
		"status":             "status",
		"services":           "services",
		"services-wide":      "services",
		"services-namespace": "svc -n kube-system",
		"services-one":       "services default/kubernetes",
		"capabilities":       "capabilities",
		"flows":              "flows",
		"flows-wide":         "flows",
		"flows-client":       "flows -n shop --client 198.51.100.0/24",
		"flows-service":      "flows --service kube-system/kube-dns:dns",
		"flows-backend":      "flows kube-system/kube-dns:dns --backend 10.244.0.2 --at socket",
		"optout-list":        "optout list",
		"optout-add":         "optout add --pid 4711",
		"optout-add-again":   "optout add --cookie 4097",
		"optout-add-pod":     "optout add --cookie 8193",
		"optout-remove":      "optout remove --cookie 4097",
		"optout-remove-pod":  "optout remove --cookie 8193",
		"optout-remove-none": "optout remove --netns /proc/4711/ns/net",
		"version":            "version",
	} {
		formats := []string{"table", "json"}
		if strings.HasSuffix(name, "-wide") {
			formats = []string{"wide"}
		}
		for _, format := range formats {
			t.Run(name+"-"+format, func(t *testing.T) {
				i := sample()
				a, out, errs := newTestApp(i)
				a.servers = []string{servePlacements(t, sampleCarried()...)}
				if code := a.run(append(strings.Fields(command), "-o", format)); code != exitOK || errs.Len() > 0 {
					t.Fatalf("exit code %d, %s", code, errs)
				}
				golden.Compare(t, strings.TrimSuffix(name, "-wide")+"-"+format+".golden", out.String())
				if format == "json" {
					checkJSON(t, out.Bytes())
				}
				if strings.HasPrefix(name, "s") && !i.closed {
					t.Error("the maps were left open")
				}
			})
		}
	}
}

// checkJSON finds keys that are not lower-camel.
func checkJSON(t *testing.T, text []byte) {
	t.Helper()
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		t.Fatal(err)
	}
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for key, value := range v {
				if key == "" || strings.ToLower(key[:1]) != key[:1] || strings.ContainsAny(key, "_- ") {
					t.Errorf("key %q", key)
				}
				walk(value)
			}
		case []any:
			for _, value := range v {
				walk(value)
			}
		}
	}
	walk(v)
}

func TestCompletion(t *testing.T) {
	a, out, errs := newTestApp(sample())
	a.servers = []string{servePlacements(t, sampleCarried()...)}
	for _, begun := range []string{"flows sh", "flows --service sh", "top --service sh", "monitor --service=sh", "backend drain 10.244.1.7 --service sh", "backend restore --service sh"} {
		out.Reset()
		if code := a.run(append([]string{"__complete"}, strings.Fields(begun)...)); code != exitOK || !strings.HasPrefix(out.String(), "shop/calls\nshop/cart\nshop/kubernetes\n") || strings.Contains(out.String(), "default") {
			t.Errorf("%s: exit code %d, %s%s", begun, code, out, errs)
		}
	}
}

// TestYAML: YAML has what JSON has.
func TestYAML(t *testing.T) {
	var versions [2]any
	for n, format := range []string{"json", "yaml"} {
		a, out, errs := newTestApp(sample())
		a.servers = []string{servePlacements(t, sampleCarried()...)}
		if code := a.run([]string{"services", "-o", format}); code != exitOK {
			t.Fatalf("exit code %d, %s", code, errs)
		}
		if err := yaml.Unmarshal(out.Bytes(), &versions[n]); err != nil {
			t.Fatal(err)
		}
	}
	if object, ok := versions[0].(map[string]any); !ok || object["kind"] != "ServiceList" || object["apiVersion"] != apiVersion || !reflect.DeepEqual(versions[0], versions[1]) {
		t.Errorf("JSON has\n%v\nYAML has\n%v", versions[0], versions[1])
	}
}

func TestCutter(t *testing.T) {
	var out bytes.Buffer
	c := &cutter{w: &out, width: 5}
	for _, part := range []string{"abc", "de\nabcdef\n", "ä", "öüßabc\n", "\n", "abcd\n"} {
		if n, err := c.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatal(n, err)
		}
	}
	if want := "abcde\nabcd…\näöüß…\n\nabcd\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

// Empty results are empty lists, and tables with only a head.
func TestOutputOfNothing(t *testing.T) {
	for _, command := range []string{"status", "services", "flows", "optout list"} {
		for _, format := range []string{"table", "json"} {
			i := &fakeInspector{status: inspect.Status{Programs: []inspect.ProgramStatus{}, MissingHooks: []string{}, Devices: []inspect.DeviceStatus{}, Packets: []lbmap.PacketCount{}, Maps: []inspect.MapStatus{}}}
			a, out, errs := newTestApp(i)
			a.servers = []string{servePlacements(t)}
			if code := a.run(append(strings.Fields(command), "-o", format)); code != exitOK {
				t.Errorf("%s: exit code %d, %s", command, code, errs)
			}
			text := strings.NewReplacer(`"lastChange": null`, "", `"yieldedTo": null`, "").Replace(out.String())
			if out.Len() == 0 || strings.Contains(text, "null") {
				t.Errorf("%s -o %s: %s", command, format, out)
			}
		}
	}
}

// TestBackendWithoutProxy: lists are there without a kube-proxy, too.
func TestBackendWithoutProxy(t *testing.T) {
	a, out, errs := newTestApp(nil)
	for command, want := range map[string]string{"drain 10.244.1.7": `"servicePorts": []`, "list": `"backends": [`} {
		out.Reset()
		if code := a.run(append(strings.Fields("backend "+command), "-o", "json", "--state-dir", t.TempDir())); code != exitOK || !strings.Contains(out.String(), want) {
			t.Errorf("%s: exit code %d, %s%s", command, code, out, errs)
		}
	}
}

// TestStatusYielded: another kube-proxy that took over is in the status.
func TestStatusYielded(t *testing.T) {
	i := sample()
	i.status.Running, i.status.YieldedTo = false, &successor.Yield{Since: now.Add(-time.Minute), Process: "k3s-server", PID: 4711}
	for format, want := range map[string]string{
		"table": "Connections:    new ones go to another kube-proxy (process k3s-server, PID 4711) since 2026-03-01T12:01:03Z (1m0s ago)\n",
		"json": `"yieldedTo": {
    "since": "2026-03-01T12:01:03Z",
    "process": "k3s-server",
    "pid": 4711
  },`,
	} {
		a, out, errs := newTestApp(i)
		if code := a.run([]string{"status", "-o", format}); code != exitOK || !strings.Contains(out.String(), want) {
			t.Errorf("%s: exit code %d, %s, %s", format, code, errs, out)
		}
	}
}

func TestDetach(t *testing.T) {
	for _, test := range []struct {
		removed []string
		err     error
		format  string
		code    int
		want    string
	}{
		{removed: []string{"tdm_in", "tdm_connect4"}, format: "table", want: "Detached 2 programs: tdm_in, tdm_connect4\n"},
		{removed: []string{"tdm_in"}, format: "json", want: ",\n  \"programs\": [\n    \"tdm_in\"\n  ]\n}\n"},
		{format: "table", want: "No program of Tandem is attached.\n"},
		{format: "json", want: ",\n  \"programs\": []\n}\n"},
		{err: fmt.Errorf("tdm_in: %w", removal.ErrServing), format: "table", code: exitError, want: "Stop kube-proxy on this node first"},
	} {
		a, out, errs := newTestApp(sample())
		a.detach = func(context.Context, string) ([]string, error) { return test.removed, test.err }
		if code := a.run([]string{"detach", "-o", test.format}); code != test.code || !strings.Contains(out.String()+errs.String(), test.want) {
			t.Errorf("%+v: exit code %d, %s, %s", test, code, out, errs)
		}
	}
}

func TestErrors(t *testing.T) {
	for _, test := range []struct {
		command string
		err     error // of opening the maps
		code    int
		want    []string
	}{
		{command: "status", err: fmt.Errorf("%w: /x", inspect.ErrNotRunning), code: exitError, want: []string{"/x", "Start kube-proxy", "--cgroup-root", "--server"}},
		{command: "status", err: fmt.Errorf("%w: 2", lbmap.ErrLayout), code: exitError, want: []string{"the tandemctl of the same release"}},
		{command: "services", err: fmt.Errorf("open: %w", fs.ErrPermission), code: exitError, want: []string{"CAP_SYS_ADMIN", "root"}},
		{command: "services -n kube-system", err: errors.New("broken"), code: exitError, want: []string{"tandemctl: broken"}},
		{command: "services default/nothing", code: exitError, want: []string{"no Service default/nothing", "3 service ports"}},
		{command: "services default/kubernetes:http", code: exitError, want: []string{"no Service default/kubernetes:http"}},
		{command: "services kubernetes", code: exitUsage, want: []string{"NAMESPACE/NAME", "services --help"}},
		{command: "services a/b/c", code: exitUsage},
		{command: "services a/ ", code: exitUsage},
		{command: "services a/b -n c", code: exitUsage, want: []string{"not in namespace c"}},
		{command: "services a/b c/d", code: exitUsage},
		{command: "flows web", code: exitUsage, want: []string{"NAMESPACE/NAME"}},
		{command: "flows --service web", code: exitUsage, want: []string{`"web" is not NAMESPACE/NAME`}},
		{command: "flows shop/web --service shop/cart", code: exitUsage, want: []string{"--service shop/cart is not shop/web"}},
		{command: "top shop/web --service shop/web:http --times 1", code: exitUsage, want: []string{"--service shop/web:http is not shop/web"}},
		{command: "monitor --service shop/web -n default", code: exitUsage, want: []string{"not in namespace default"}},
		{command: "flows --client web", code: exitUsage, want: []string{`--client "web"`}},
		{command: "flows --backend 10.0.0.1/33", code: exitUsage, want: []string{`--backend "10.0.0.1/33"`}},
		{command: "flows --at device", code: exitUsage, want: []string{`--at is socket or packets, not "device"`}},
		{command: "flows -w --interval 0s", code: exitUsage, want: []string{"above 0"}},
		{command: "flows", err: fmt.Errorf("%w: /x", inspect.ErrNotRunning), code: exitError, want: []string{"Start kube-proxy", "as --cgroup-root.\n"}},
		{command: "monitor --rate 0", code: exitUsage, want: []string{"--rate has to be above 0"}},
		{command: "monitor shop", code: exitUsage, want: []string{"NAMESPACE/NAME"}},
		{command: "top --sort speed", code: exitUsage, want: []string{"--sort is one of connections, failures, rejected, dropped, refused, unanswered, packets, bytes"}},
		{command: "top --interval -1s", code: exitUsage, want: []string{"above 0"}},
		{command: "status now", code: exitUsage, want: []string{"unknown command \"now\""}},
		{command: "status -o xml", code: exitUsage, want: []string{`"xml": want table, wide, json, yaml`}},
		{command: "status --nonsense", code: exitUsage, want: []string{"--nonsense", "tandemctl status --help"}},
		{command: "statsu", code: exitUsage, want: []string{"unknown command", "did you mean status?"}},
		{command: "explain 10.0.0.1", code: exitUsage, want: []string{"accepts 2 arg(s)", "explain --help"}},
		{command: "explain 10.0.0.1 10.96.0.1", code: exitUsage, want: []string{"want a port too, as in 10.96.0.10:80"}},
		{command: "explain web 10.96.0.1:80", code: exitUsage, want: []string{`source "web": want an IP address`}},
		{command: "explain fd00::1 10.96.0.1:80", code: exitUsage, want: []string{"different address families"}},
		{command: "explain 10.0.0.1 10.96.0.1:80/http", code: exitUsage, want: []string{"want tcp, udp or sctp"}},
		{command: "explain 10.0.0.1 10.96.0.1:80/", code: exitUsage, want: []string{"after the slash"}},
		{command: "explain 10.0.0.1 10.96.0.1:80 -o text", code: exitUsage, want: []string{"want table, wide, json, yaml"}},
		{command: "explain 10.0.0.1 10.96.0.1:80 --in-interface a/b", code: exitUsage, want: []string{"network device"}},
		{command: "explain 10.0.0.1 10.96.0.1:80 --server https://x:1", code: exitUsage, want: []string{"want an address and port"}},
		{command: "explain 10.0.0.1 10.96.0.1:80 --server x:1/y", code: exitUsage},
		{command: "explain 10.0.0.1 10.96.0.1:80 --node a", code: exitUsage, want: []string{"--node needs --manifests"}},
		{command: "explain 10.0.0.1 10.96.0.1:80 --manifests .", code: exitUsage, want: []string{"--manifests needs --node"}},
		{command: "explain 10.0.0.1 10.96.0.1:80 --manifests . --node a --server b:1", code: exitUsage, want: []string{"--server has no effect"}},
		{command: "explain 10.0.0.1 10.96.0.1:80 --manifests . --node a --local-address b", code: exitUsage, want: []string{"want an IP address"}},
		{command: "explain 10.0.0.1 10.96.0.1:80 --manifests . --node a --cluster-cidr b", code: exitUsage, want: []string{`"b" is not a CIDR`}},
		{command: "explain 10.0.0.1 10.96.0.1:80 --manifests /nowhere --node a", code: exitError, want: []string{"/nowhere does not exist"}},
		{command: "explain 10.0.0.1 10.96.0.1:80 --manifests . --node a --config /nowhere", code: exitError, want: []string{"/nowhere"}},
		{command: "optout ad", code: exitUsage, want: []string{"unknown command"}},
		{command: "optout add", code: exitUsage, want: []string{"--netns, --pid or --cookie"}},
		{command: "optout add --pid 4711 --cookie 3", code: exitUsage},
		{command: "optout add --pid 0", code: exitUsage, want: []string{"process id"}},
		{command: "optout remove --cookie 0", code: exitUsage},
		{command: "optout add --netns", code: exitUsage},
		{command: "optout add --pid 1", code: exitError, want: []string{"/proc/1/ns/net"}},
	} {
		t.Run(test.command, func(t *testing.T) {
			a, out, errs := newTestApp(sample())
			if test.err != nil {
				a.inspect = func(string) (inspector, error) { return nil, test.err }
			}
			if code := a.run(strings.Fields(test.command)); code != test.code {
				t.Errorf("exit code %d, want %d", code, test.code)
			}
			for _, want := range test.want {
				if !strings.Contains(errs.String(), want) {
					t.Errorf("%q is missing in:\n%s", want, errs)
				}
			}
			if out.Len() > 0 {
				t.Errorf("output:\n%s", out)
			}
		})
	}
}

// In another mode there are no programs, and nothing has to be started.
func TestStatusInAnotherMode(t *testing.T) {
	a, out, errs := newTestApp(nil)
	a.inspect = func(string) (inspector, error) { return nil, inspect.ErrNotRunning }
	a.servers = []string{serveMode(t, "iptables")}
	if code := a.run([]string{"status"}); code != exitOK || errs.Len() > 0 {
		t.Errorf("exit code %d: %s", code, errs)
	}
	for _, want := range []string{"Mode:           iptables instead of ebpf (/etc/kube-proxy.yaml:3): no maps; no hooks\n", "\n\nPrograms: " + inspect.ErrNotRunning.Error() + "\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	a.inspect = func(string) (inspector, error) { return nil, fmt.Errorf("open: %w", fs.ErrPermission) }
	for command, want := range map[string]string{"status": "Programs: open: permission denied", "services": "SERVICE"} { // pods of the chart have no SYS_ADMIN
		if code := a.run([]string{command}); code != exitOK || !strings.Contains(out.String(), want) {
			t.Errorf("%s: exit code %d: %s, %s", command, code, out, errs)
		}
	}
	out.Reset()
	if code := a.run([]string{"status", "-o", "json"}); code != exitOK || !strings.Contains(out.String(), `"process": {`) || strings.Contains(out.String(), `"programs"`) {
		t.Errorf("exit code %d: %s", code, out)
	}
}

// TestAdviceInAnotherMode: a command about what only mode ebpf has says so, and what the running mode has instead.
func TestAdviceInAnotherMode(t *testing.T) {
	notRunning := fmt.Errorf("%w: /x", inspect.ErrNotRunning)
	for _, test := range []struct {
		command, mode string
		err           error // of opening the maps
		want          string
	}{
		{"flows", "iptables", notRunning, "runs in mode iptables, which has no eBPF flows; 'conntrack -L' lists"},
		{"flows", "iptables", capabilities.ErrNoCgroup2, "'conntrack -L' lists"},
		{"connections -w", "ipvs", notRunning, "runs in mode ipvs, which has no eBPF flows; 'ipvsadm -Lnc' lists"},
		{"top", "iptables", notRunning, "'iptables-save -c -t nat'"},
		{"top", "ipvs", fmt.Errorf("open: %w", fs.ErrPermission), "'ipvsadm -Ln --rate'"},
		{"monitor", "iptables", notRunning, "runs in mode iptables, which does not report failures; 'tandemctl explain' says"},
		{"optout list", "ipvs", notRunning, "there is nothing to opt out of.\n"},
		{"optout add --pid 4711", "iptables", notRunning, "nothing to opt out of"},
		{"flows", "ebpf", notRunning, "Start kube-proxy in mode ebpf on this node. If it runs with --ebpf-cgroup-root, pass the same directory as --cgroup-root.\n"},
	} {
		a, out, errs := newTestApp(nil)
		a.inspect = func(string) (inspector, error) { return nil, test.err }
		a.monitor = func(uint32) (failureMonitor, error) { return &fakeMonitor{}, nil }
		a.servers = []string{serveMode(t, test.mode)}
		if code := a.run(strings.Fields(test.command)); code != exitError || !strings.Contains(errs.String(), test.want) || strings.Contains(errs.String(), "--server") || out.Len() > 0 {
			t.Errorf("%s in mode %s: exit code %d, %s\nwant %q", test.command, test.mode, code, errs, test.want)
		}
	}
}

// What an operator has to know when something is wrong.
func TestStatusOfTrouble(t *testing.T) {
	p := sampleProcess()
	p.Ready, p.Checks[0] = false, health.Check{Name: "programmed"}
	p.Checks = append(p.Checks, health.Check{Name: "uplink-eth0", Detail: "no program"})
	p.LastSync.Error, p.ServicePorts, p.Problems = "no space", nil, nil
	for name, test := range map[string]struct {
		last *time.Time
		want string
	}{
		"once it succeeded": {p.LastSuccess, "Last sync:      2026-03-01T12:02:01Z (2s ago) failed: no space; the last that succeeded: 2026-03-01T12:02:01Z (2s ago)\n"},
		"never":             {nil, "Last sync:      2026-03-01T12:02:01Z (2s ago) failed, as all before: no space\n"},
	} {
		p.LastSuccess = test.last
		var out bytes.Buffer
		if err := writeProcess(&out, p, now); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"Ready:          no: programmed; uplink-eth0: no program\n", "Service ports:  none\n", "Problems:       none since the start\n", test.want} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s: %q is not in\n%s", name, want, &out)
			}
		}
	}
}

func TestNoCgroup2(t *testing.T) {
	a, _, errs := newTestApp(sample())
	a.findRoot = func() (string, error) {
		return "", fmt.Errorf("%w: pass --ebpf-cgroup-root", capabilities.ErrNoCgroup2)
	}
	if code := a.run([]string{"status"}); code != exitError || strings.Contains(errs.String(), "--ebpf") || !strings.Contains(errs.String(), "--cgroup-root") {
		t.Errorf("exit code %d: %s", code, errs)
	}
}

// --cgroup-root says where to look, and is passed on as it is.
func TestCgroupRoot(t *testing.T) {
	a, _, _ := newTestApp(nil)
	var asked []string
	a.inspect = func(root string) (inspector, error) { asked = append(asked, root); return sample(), nil }
	a.probe = func(_ context.Context, root string, devices []string) capabilities.Report {
		asked = append(asked, root+strings.Join(devices, "+"))
		return capabilities.Report{}
	}
	a.run([]string{"status"})
	a.run([]string{"--cgroup-root", "/a", "status"})
	a.run([]string{"capabilities", "--cgroup-root=/b", "--device", "eth0,eth1"})
	if want := []string{"/sys/fs/cgroup", "/a", "/beth0+eth1"}; !slices.Equal(asked, want) {
		t.Errorf("asked %q, want %q", asked, want)
	}
}

// Every command explains itself, with an example where it has arguments.
func TestHelp(t *testing.T) {
	for _, command := range []string{"", "status", "services", "explain", "capabilities", "optout", "optout list", "optout add", "optout remove"} {
		a, out, _ := newTestApp(sample())
		if code := a.run(append(strings.Fields(command), "--help")); code != exitOK || !strings.Contains(out.String(), "Examples:\n  tandemctl ") {
			t.Errorf("%q: exit code %d\n%s", command, code, out)
		}
	}
}

// TestHelpJQ: the filters that the help has for jq work on what there is: with everything, without a kube-proxy, and in a mode
// without programs.
func TestHelpJQ(t *testing.T) {
	jq, err := exec.LookPath("jq")
	if err != nil {
		lab.SkipOrFailProgram(t, err)
	}
	none, _, _ := newTestApp(sample())
	rules, _, _ := newTestApp(nil)
	rules.inspect = func(string) (inspector, error) { return nil, inspect.ErrNotRunning }
	rules.servers = []string{serveMode(t, "iptables", sampleCarried()...)}
	said := func(a *app, command string) []byte {
		var out bytes.Buffer
		a.out = &out
		if code := a.run(strings.Fields(command)); code != exitOK {
			t.Errorf("%s: exit code %d", command, code)
		}
		return out.Bytes()
	}
	example := regexp.MustCompile(`(?m)^  tandemctl (.*) \| jq '(.*)'$`)
	seen := 0
	for _, c := range none.rootCommand().Commands() {
		for _, m := range example.FindAllStringSubmatch(c.Example, -1) {
			seen++
			everything, err := os.ReadFile(filepath.Join("testdata", c.Name()+"-json.golden"))
			if err != nil {
				t.Fatal(err)
			}
			inputs := map[string][]byte{"everything": everything}
			if c.Name() != "preflight" { // it asks no kube-proxy
				inputs["no kube-proxy"], inputs["mode iptables"] = said(none, m[1]), said(rules, m[1])
			}
			for name, input := range inputs {
				filter := exec.Command(jq, m[2])
				filter.Stdin = bytes.NewReader(input)
				out, err := filter.CombinedOutput()
				if err != nil || name == "everything" && len(out) == 0 {
					t.Errorf("%s: jq '%s': %v\n%s", name, m[2], err, out)
				}
			}
		}
	}
	if seen < 4 {
		t.Errorf("found only %d examples", seen)
	}
}

func TestNetNSOwners(t *testing.T) {
	proc := t.TempDir()
	for pid, ns := range map[string]string{"1": "net:[1]", "20": "net:[2]", "3": "net:[2]", "4": "net:[4]", "self": "net:[1]"} {
		dir := filepath.Join(proc, pid, "ns")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(ns, filepath.Join(dir, "net")); err != nil {
			t.Fatal(err)
		}
	}
	got := netNSOwners(proc, func(path string) (uint64, error) {
		switch strings.TrimPrefix(path, proc) {
		case "/1/ns/net":
			return 100, nil
		case "/3/ns/net":
			return 0, errors.New("just ended")
		case "/20/ns/net":
			return 200, nil
		}
		return 0, errors.New("not permitted")
	})
	if d := cmp.Diff(map[uint64][]int{100: {1}, 200: {3, 20}}, got); d != "" {
		t.Errorf("owners (-want +got):\n%s", d)
	}
	if got := netNSOwners(filepath.Join(proc, "nothing"), nil); len(got) != 0 {
		t.Errorf("of nothing: %v", got)
	}
}

func TestBuildVersion(t *testing.T) {
	if v := buildVersion(); v.Version == "" || v.GoVersion == "" {
		t.Errorf("got %+v", v)
	}
}
