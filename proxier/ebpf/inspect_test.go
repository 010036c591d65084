// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

func inspectNode(t testing.TB, at *lab.Node) *inspect.Inspector {
	t.Helper()
	i, err := inspect.Open(at.CgroupPath())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := i.Close(); err != nil {
			t.Error(err)
		}
	})
	return i
}

func statusOf(t testing.TB, i *inspect.Inspector) inspect.Status {
	t.Helper()
	s, err := i.Status()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func servicesOf(t testing.TB, i *inspect.Inspector) []inspect.ServiceView {
	t.Helper()
	views, err := i.Services()
	if err != nil {
		t.Fatal(err)
	}
	return views
}

func TestInspect(t *testing.T) {
	l := lab.NewT(t)
	one, bare := l.Node("node1"), l.Node("bare")
	if _, err := inspect.Open(one.CgroupPath()); !errors.Is(err, inspect.ErrNotRunning) {
		t.Errorf("open without attached programs: %v", err)
	}
	if _, err := inspect.Open(t.TempDir()); err == nil || errors.Is(err, inspect.ErrNotRunning) {
		t.Errorf("open of a directory that is no cgroup: %v", err)
	}

	a, b, client := serve(t, one.Pod("a")), serve(t, one.Pod("b")), one.Pod("client")
	start := time.Now()
	starts, most := smallStart()
	n := newNode(t, one, l, Options{Sizes: most, Start: starts, MaxMemory: 32 << 20})
	n.OnServiceAdd(dualService())
	n.setPods(a, b)
	n.sync(t)

	i := inspectNode(t, one)
	s := statusOf(t, i)
	if s.MapBytesLimit != 32<<20 {
		t.Errorf("maps may take %d bytes", s.MapBytesLimit)
	}
	if !s.Running || s.Layout != lbmap.LayoutVersion || s.Unplaced != 0 || s.Cgroup != one.CgroupPath() || len(s.Programs) != datapath.SignalHook || len(s.MissingHooks) != 0 {
		t.Errorf("status %+v", s)
	}
	if s.LastChange == nil || s.LastChange.Before(start) || s.LastChange.After(time.Now()) {
		t.Errorf("last change %v", s.LastChange)
	}
	for k, p := range s.Programs {
		// Load times have nanoseconds, but are of another clock.
		if p.Name != datapath.Hooks[k].Program || p.ID == 0 || len(p.Tag) != 16 || p.LoadedAt.Before(start.Add(-2*time.Second)) || p.LoadedAt.After(time.Now().Add(2*time.Second)) {
			t.Errorf("program %+v", p)
		}
	}
	used := map[string]int{}
	usage := n.tier.Capacities()
	for _, m := range s.Maps {
		if u, ok := usage[strings.TrimPrefix(m.Name, "tdm_")+"s"]; ok && (lbmap.Capacity{Usage: lbmap.Usage{Used: *m.Used, Max: m.Max}, Limit: m.Limit}) != u {
			t.Errorf("map %s: %d of %d entries, %d at most; the writer reports %+v", m.Name, *m.Used, m.Max, m.Limit, u)
		}
		// An empty LPM trie uses no memory. Empty socket storage reports none before Linux 6.4
		// (map_mem_usage).
		told := m.Type != "LPMTrie" && (m.Type != "SkStorage" || kernel.AtLeast(t, 6, 4))
		if m.ID == 0 || told && (m.MemoryBytes == nil || *m.MemoryBytes == 0) {
			t.Errorf("map %+v", m)
		}
		if m.Used != nil {
			used[m.Name] = *m.Used
		}
	}
	// Two ports with two VIPs each; two pods with two addresses each, for both ports.
	want := map[string]int{
		"tdm_meta": 1, "tdm_successor": 1, "tdm_node": 1, "tdm_local": 0, "tdm_range": 0, "tdm_vip": 0, "tdm_target": 1, "tdm_uplink": 0, "tdm_flow": 0, "tdm_flow_entry": 0, "tdm_frontend": 4, "tdm_service": 2, "tdm_svc_stats": 2, "tdm_set": 8, "tdm_slot": 8,
		"tdm_backend": 8, "tdm_be_stats": 8, "tdm_affinity": 0, "tdm_udp_peer": 0, "tdm_optout": 0,
	}
	if d := cmp.Diff(want, used); d != "" {
		t.Errorf("used entries (-want +got):\n%s", d)
	}

	text := ""
	for _, p := range []string{"p/TCP", "u/UDP"} {
		text += fmt.Sprintf(`ns/web:%s programmed
  frontend 10.96.0.10:80 ClusterIP all ipv4/cluster
  frontend [fd00:10:96::10]:80 ClusterIP all ipv6/cluster
  set ipv4/cluster 2 
  set ipv6/cluster 2 
  backend %s:8080 [ipv4/cluster] local=true terminating=false
  backend %s:8080 [ipv4/cluster] local=true terminating=false
  backend [%s]:8080 [ipv6/cluster] local=true terminating=false
  backend [%s]:8080 [ipv6/cluster] local=true terminating=false
`, p, a.Addr4, b.Addr4, a.Addr6, b.Addr6)
	}
	if d := cmp.Diff(text, textOf(servicesOf(t, i))); d != "" {
		t.Errorf("services (-want +got):\n%s", d)
	}

	t.Run("counters", func(t *testing.T) {
		const asked = 12
		for range asked {
			if _, err := client.Ask(t.Context(), "tcp", targets()["tcp4"]); err != nil {
				t.Fatal(err)
			}
		}
		tcp, udp := servicesOf(t, i)[0], servicesOf(t, i)[1]
		sum := uint64(0)
		for _, b := range tcp.Backends {
			sum += b.Connections
		}
		if want := (inspect.CountersView{Connections: asked}); tcp.Counters != want || sum != asked {
			t.Errorf("counters of the service port %+v, sum of its backends %d", tcp.Counters, sum)
		}
		if udp.Counters != (inspect.CountersView{}) {
			t.Errorf("counters of the UDP port: %+v", udp.Counters)
		}
	})

	t.Run("opt-outs", func(t *testing.T) {
		cookie, err := netns.CookieOf(client.NetNSPath())
		if err != nil {
			t.Fatal(err)
		}
		other, err := netns.CookieOf(a.NetNSPath())
		if err != nil || other == cookie {
			t.Fatalf("cookies %d and %d of two namespaces, error %v", cookie, other, err)
		}
		for range 2 { // adding twice is no error
			if err := i.AddOptOut(cookie); err != nil {
				t.Fatal(err)
			}
		}
		if list, err := i.OptOuts(); err != nil || len(list) != 1 || list[cookie] != lbmap.OptOutByCommand {
			t.Errorf("list %v, %v; want %d", list, err, cookie)
		}
		if got, want := n.tier.Usage()["opt_outs"], (lbmap.Usage{Used: 1, Max: int(i.Maps["tdm_optout"].MaxEntries())}); got != want {
			t.Errorf("usage of opt-outs: %+v, want %+v", got, want)
		}
		if r, err := client.Ask(shortly(t), "tcp", targets()["tcp4"]); err == nil {
			t.Errorf("a pod that has opted out reached %s", r.Server)
		}
		if _, err := a.Ask(t.Context(), "tcp", targets()["tcp4"]); err != nil {
			t.Errorf("a pod that has not opted out: %v", err)
		}
		for _, want := range []bool{true, false} {
			if existed, err := i.RemoveOptOut(cookie); err != nil || existed != want {
				t.Errorf("remove: %v, %v; want %v", existed, err, want)
			}
		}
		if _, err := client.Ask(t.Context(), "tcp", targets()["tcp4"]); err != nil {
			t.Errorf("after the opt-out was removed: %v", err)
		}
		if err := i.AddOptOut(0); err == nil {
			t.Error("cookie 0 was accepted")
		}
	})

	t.Run("read only", func(t *testing.T) {
		for name, m := range i.Maps {
			var value any = make([]byte, m.ValueSize())
			if m.Type() == ciliumebpf.PerCPUArray {
				value = [][]byte{make([]byte, m.ValueSize())}
			}
			if err := m.Put(make([]byte, m.KeySize()), value); !errors.Is(err, fs.ErrPermission) {
				t.Errorf("write to %s: %v", name, err)
			}
		}
	})

	t.Run("other layout", func(t *testing.T) {
		tablesOf(n.tier).Meta.Layout = 99
		defer func() { tablesOf(n.tier).Meta.Layout = lbmap.LayoutVersion }()
		_, err := inspect.Open(one.CgroupPath())
		if !errors.Is(err, lbmap.ErrLayout) || !strings.Contains(err.Error(), "99") {
			t.Errorf("got %v", err)
		}
	})

	t.Run("without privilege", func(t *testing.T) {
		for _, kept := range []uint64{
			0,
			1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_DAC_OVERRIDE,
			1<<unix.CAP_BPF | 1<<unix.CAP_PERFMON | 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_DAC_OVERRIDE,
		} {
			err := withCapabilities(kept, func() error {
				i, err := inspect.Open(one.CgroupPath())
				if err == nil {
					err = errors.Join(errors.New("it went well"), i.Close())
				}
				return err
			})
			if !errors.Is(err, fs.ErrPermission) {
				t.Errorf("with capabilities %#x: %v", kept, err)
			}
			// With CAP_NET_ADMIN, Attached can report that there are no programs.
			for _, at := range []*lab.Node{one, bare} {
				unknown := at == one || kept&(1<<unix.CAP_NET_ADMIN) == 0
				err := withCapabilities(kept, func() error {
					there, err := removal.Attached(at.CgroupPath())
					if there {
						err = errors.Join(err, errors.New("there are programs"))
					}
					return err
				})
				if unknown && !errors.Is(err, fs.ErrPermission) || !unknown && err != nil {
					t.Errorf("%s, with capabilities %#x: %v", at.Name, kept, err)
				}
			}
		}
	})

	t.Run("with CAP_SYS_ADMIN alone", func(t *testing.T) {
		kept := uint64(1 << unix.CAP_SYS_ADMIN)
		if !kernel.AtLeast(t, 6, 12) { // Linux 6.1 requires it to list attached programs
			kept |= 1 << unix.CAP_NET_ADMIN
		}
		err := withCapabilities(kept, func() error {
			i, err := inspect.Open(one.CgroupPath())
			if err != nil {
				return err
			}
			_, err = i.Status()
			return errors.Join(err, i.Close())
		})
		if err != nil {
			t.Error(err)
		}
	})

	t.Run("missing hook", func(t *testing.T) {
		found, err := datapath.FindAttached(n.tier.cgroup)
		if err != nil {
			t.Fatal(err)
		}
		defer datapath.CloseAttached(found)
		if err := datapath.Detach(n.tier.cgroup, found[0]); err != nil {
			t.Fatal(err)
		}
		// Open fails if a map that it needs was freed with this program.
		if i, err := inspect.Open(one.CgroupPath()); err == nil {
			if got := statusOf(t, i).MissingHooks; !slices.Equal(got, []string{"connect4"}) {
				t.Errorf("missing %v", got)
			}
			i.Close()
		} else if !strings.Contains(err.Error(), ": connect4") {
			t.Errorf("the error names no hook: %v", err)
		}
		if err := n.tier.ensureAttached(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := datapath.Detach(n.tier.cgroup, found[1]); err != nil {
			t.Fatal(err)
		}
		if got := statusOf(t, inspectNode(t, one)).MissingHooks; !slices.Equal(got, []string{"connect6"}) {
			t.Errorf("missing %v", got)
		}
	})

	n.close()
	i = inspectNode(t, one)
	if s := statusOf(t, i); s.Running {
		t.Error("Running is true after the process has ended")
	}
	if d := cmp.Diff(text, textOf(servicesOf(t, i))); d != "" {
		t.Errorf("services after the end of the process (-want +got):\n%s", d)
	}
}

// withCapabilities runs fn on a thread that has only these capabilities. The thread ends with
// fn.
func withCapabilities(kept uint64, fn func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		low, high := uint32(kept), uint32(kept>>32)
		data := [2]unix.CapUserData{{Effective: low, Permitted: low}, {Effective: high, Permitted: high}}
		if err := unix.Capset(&header, &data[0]); err != nil {
			done <- err
			return
		}
		done <- fn()
	}()
	return <-done
}

// TestInspectBesideWriter: while a writer publishes changes without pause, Services returns
// complete sets: one that was published at some moment, not parts of two, and no backend of
// another Service.
func TestInspectBesideWriter(t *testing.T) {
	l := lab.NewT(t)
	for name, sizes := range map[string]lbmap.Sizes{
		// The writer must wait until ids can be reused.
		"scarce": {Frontends: 8, Services: 4, Backends: 32, Slots: 64, Affinity: 2, UDPPeers: 2, OptOuts: 2},
		// The writer never has to wait.
		"roomy": {Frontends: 8, Services: 4, Backends: 1 << 14, Slots: 1 << 14, Affinity: 2, UDPPeers: 2, OptOuts: 2},
	} {
		t.Run(name, func(t *testing.T) { inspectBesideWriter(t, newNode(t, l.Node(name), l, Options{Sizes: sizes})) })
	}
}

func inspectBesideWriter(t *testing.T, n *node) {
	// The sets of two Services exchange addresses, so that mix-ups by reused ids are visible.
	rounds := [][2][]string{
		{{"10.244.1.1", "10.244.1.2", "10.244.1.3"}, {"10.244.2.1", "10.244.2.2"}},
		{{"10.244.1.3", "10.244.1.4"}, {"10.244.2.3", "10.244.2.4", "10.244.2.5"}},
		{{"10.244.1.5"}, {"10.244.2.2", "10.244.2.6"}},
	}
	allowed := [2]map[string]bool{{}, {}}
	for _, r := range rounds {
		for k := range r {
			allowed[k][strings.Join(r[k], " ")] = true
		}
	}
	publish := func(round int) error {
		for k, name := range []string{"a", "b"} {
			n.OnEndpointSliceUpdate(nil, writertest.Slice(name+"-1", name, rounds[round][k]...))
		}
		return n.Sync(t.Context())
	}
	n.OnServiceAdd(writertest.Service("a", "10.96.0.1"))
	n.OnServiceAdd(writertest.Service("b", "10.96.0.2"))
	if err := publish(0); err != nil {
		t.Fatal(err)
	}

	stop := make(chan struct{})
	var failed error
	published := 0
	var writing sync.WaitGroup
	writing.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			published++
			if failed = publish(published % len(rounds)); failed != nil {
				return
			}
		}
	})
	defer func() {
		close(stop)
		writing.Wait()
		t.Logf("%d publications", published)
		if failed != nil {
			t.Error(failed)
		}
	}()

	i := inspectNode(t, n.at)
	seen := map[string]int{}
	changing := 0
	deadline := time.Now().Add(20 * time.Second)
	// Read until every set was seen, and at least 1000 times.
	for reads := 0; reads < 1000 || len(seen) < len(allowed[0])+len(allowed[1]); reads++ {
		if time.Now().After(deadline) {
			t.Errorf("after %d reads, only these sets were seen: %v", reads, seen)
			break
		}
		views := servicesOf(t, i)
		if len(views) != 2 {
			t.Fatalf("%d services", len(views))
		}
		for k, v := range views {
			if v.Changing {
				changing++
				continue
			}
			var got []string
			for _, b := range v.Backends {
				got = append(got, b.Address.Addr().String())
			}
			set := strings.Join(got, " ")
			if !allowed[k][set] || len(v.Frontends) != 1 || v.Sets[0].Size != len(got) {
				t.Fatalf("a set that was never published:\n%s", viewText(&v))
			}
			seen[set]++
		}
	}
	t.Logf("seen %v, gave up on %d", seen, changing)
}

// viewText formats a Service for comparisons.
func viewText(v *inspect.ServiceView) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s/%s%s/%s %s", v.Namespace, v.Name, strings.TrimSuffix(":"+v.Port, ":"), v.Protocol, v.State)
	if v.Reason != "" {
		fmt.Fprintf(&b, ": %s", v.Reason)
	}
	if v.AffinitySeconds > 0 {
		fmt.Fprintf(&b, " affinity=%d", v.AffinitySeconds)
	}
	if v.Changing {
		b.WriteString(" changing")
	}
	b.WriteByte('\n')
	for _, f := range v.Frontends {
		fmt.Fprintf(&b, "  frontend %s %s %s %s\n", f.Address, f.Kind, f.Clients, f.Set)
	}
	for _, s := range v.Sets {
		fmt.Fprintf(&b, "  set %s %d %s\n", s.Name, s.Size, s.Verdict)
	}
	for _, e := range v.Backends {
		fmt.Fprintf(&b, "  backend %s %v local=%v terminating=%v\n", e.Address, e.Sets, e.Local, e.Terminating)
	}
	return b.String()
}

func textOf(views []inspect.ServiceView) string {
	var b strings.Builder
	for i := range views {
		b.WriteString(viewText(&views[i]))
	}
	return b.String()
}
