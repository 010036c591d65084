// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/monitor"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// plenty of reports per second for tests that cause few failures.
const plenty = 1000

func newMonitor(t *testing.T, perSecond uint32) *monitor.Monitor {
	t.Helper()
	m, err := monitor.New(perSecond)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func withPrograms(t *testing.T, at *lab.Node, fn func([]*ciliumebpf.Program) error) error {
	t.Helper()
	i := inspectNode(t, at)
	return at.Do(func() error { return i.WithPrograms(fn) })
}

// follow attaches a monitor to the programs of a node.
func follow(t *testing.T, m *monitor.Monitor, at *lab.Node) (attached int, err error) {
	t.Helper()
	err = withPrograms(t, at, func(programs []*ciliumebpf.Program) (err error) {
		attached, err = m.Follow(programs)
		return err
	})
	return attached, err
}

// followNode is follow for tests of the monitor.
func followNode(t *testing.T, m *monitor.Monitor, at *lab.Node) int {
	t.Helper()
	attached, err := follow(t, m, at)
	if errors.Is(err, monitor.ErrNotSupported) {
		lab.SkipOrFailModule(t, err)
	}
	if err != nil || attached == 0 {
		t.Fatalf("attached to %d functions, %v", attached, err)
	}
	return attached
}

// failureAt is what the monitor reports next about a frontend.
func failureAt(t *testing.T, m *monitor.Monitor, to netip.AddrPort) monitor.Failure {
	t.Helper()
	for end := time.Now().Add(lab.Slower() * 5 * time.Second); ; {
		f, err := m.Next(t.Context(), end)
		if err != nil {
			t.Fatalf("no failure at %s: %v", to, err)
		}
		if f.Frontend == to {
			return f
		}
	}
}

// failureFor is what the monitor reports next about a frontend for this reason.
func failureFor(t *testing.T, m *monitor.Monitor, to netip.AddrPort, reason string) monitor.Failure {
	t.Helper()
	for {
		if f := failureAt(t, m, to); f.Reason == reason {
			return f
		}
	}
}

// monitored counts what traces the programs of a node.
func monitored(t *testing.T, at *lab.Node) (count int) {
	t.Helper()
	ids := map[uint32]bool{}
	err := withPrograms(t, at, func(programs []*ciliumebpf.Program) error {
		for _, p := range programs {
			info, err := p.Info()
			if err != nil {
				return err
			}
			id, _ := info.ID()
			ids[uint32(id)] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var links link.Iterator
	defer links.Close()
	for links.Next() {
		info, err := links.Link.Info()
		if err == nil && info.Tracing() != nil && ids[info.Tracing().TargetObjectId] {
			count++
		}
	}
	if err := links.Err(); err != nil {
		t.Fatal(err)
	}
	return count
}

// TestMonitoredPrograms: each program that counts a failure has the function that the monitor attaches to, and those
// that hold packets back are found for their own node.
func TestMonitoredPrograms(t *testing.T) {
	kernel.Needs(t, capabilities.NetfilterHook)
	want := []string{"tdm_connect4", "tdm_connect6", "tdm_hold_in4", "tdm_hold_in6", "tdm_hold_pod4", "tdm_hold_pod6", "tdm_in", "tdm_out", "tdm_sendmsg4", "tdm_sendmsg6", "tdm_xdp"}
	opts := Options{Acceleration: datapath.Native}
	for _, e := range []*edge{newEdge(t, opts), newEdge(t, opts)} {
		var got []string
		err := withPrograms(t, e.at, func(programs []*ciliumebpf.Program) error {
			for _, p := range programs {
				info, err := p.Info()
				if err != nil {
					return err
				}
				functions, err := info.FuncInfos()
				if err != nil {
					return err
				}
				if slices.ContainsFunc(functions, func(f btf.FuncOffset) bool {
					return f.Func.Name == "packet_failed" || f.Func.Name == "connection_failed"
				}) {
					got = append(got, info.Name)
				}
			}
			return nil
		})
		slices.Sort(got)
		if d := cmp.Diff(want, got); err != nil || d != "" {
			t.Errorf("%v, programs (-want +got):\n%s", err, d)
		}
	}
}

// TestMonitor: what fails at sockets and by packets is reported with its reason, and who had it. Nothing is attached
// before and afterwards.
func TestMonitor(t *testing.T) {
	kernel.Since(t, 5, 17, "bpf_get_func_arg")
	e := newEdge(t, Options{})
	if n := monitored(t, e.at); n != 0 {
		t.Errorf("%d programs trace those of a node that is not monitored", n)
	}
	m := newMonitor(t, plenty)
	attached := followNode(t, m, e.at)
	if n := monitored(t, e.at); n != attached {
		t.Errorf("%d programs trace those of the node; the monitor is attached to %d functions", n, attached)
	}
	if again := followNode(t, m, e.at); again != attached {
		t.Errorf("attached to %d functions, and then to %d", attached, again)
	}
	for _, n := range e.entries() { // without endpoints
		t.Run(n.String(), func(t *testing.T) {
			began := time.Now()
			if r, err := e.client.Ask(t.Context(), n.network, n.to); err == nil {
				t.Fatalf("reply from %s", r.Server)
			}
			f := failureAt(t, m, n.to)
			if f.Reason != monitor.RejectedNoBackend || f.Client.Addr() != addrOf(e.client.Sandbox, n.to.Addr()) || f.Client.Port() == 0 ||
				f.Protocol.String() != protocolOf(n.network) || f.PID != 0 || f.Time.Before(began.Add(-time.Second)) || f.Time.After(time.Now().Add(time.Second)) {
				t.Errorf("got %+v", f)
			}
		})
	}
	for name, to := range targets() {
		t.Run("socket "+name, func(t *testing.T) {
			if r, err := e.here.Ask(t.Context(), name[:3], to); err == nil {
				t.Fatalf("reply from %s", r.Server)
			}
			f := failureAt(t, m, to)
			if f.Reason != monitor.RejectedNoBackend || f.PID != os.Getpid() || f.Process == "" || f.Client.IsValid() || f.Protocol.String() != protocolOf(name[:3]) {
				t.Errorf("got %+v", f)
			}
		})
	}
	t.Run("policy and source ranges", func(t *testing.T) {
		e.OnServiceUpdate(nil, edgeService(func(s *v1.Service) { s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal }))
		e.use(t, e.there)
		to := netip.AddrPortFrom(e.at.Addr4, nodePort)
		for _, want := range []string{"dropped_policy", "dropped_source_range"} {
			if want == "dropped_source_range" {
				to = netip.AddrPortFrom(lb4, lbPort)
				e.OnServiceUpdate(nil, edgeService(func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24"} }))
				e.sync(t)
			}
			if r, err := e.client.Ask(shortly(t), "tcp", to); err == nil {
				t.Fatalf("reply from %s", r.Server)
			}
			if f := failureAt(t, m, to); f.Reason != want {
				t.Errorf("got %+v, want %s", f, want)
			}
		}
	})
	t.Run("passed resets", func(t *testing.T) {
		to, from := netip.AddrPortFrom(e.at.Addr4, nodePort), netip.AddrPortFrom(e.client.Addr4, 1000)
		w := newWire(t, e.client, to.Addr())
		if err := w.send(w.frame(packet.NewTCP(from, to, packet.RST, nil))); err != nil {
			t.Fatal(err)
		}
		if f := failureFor(t, m, to, "passed_reset"); f.Client != from || f.Protocol != proxier.TCP {
			t.Errorf("got %+v", f)
		}
	})
	t.Run("other programs", func(t *testing.T) {
		e.close()
		e.begin(t, Options{Sizes: drainSizes}, nil) // other maps, and so other programs
		e.sync(t)
		// The program that checks packets of sockets is there as long as there were source ranges.
		if again := followNode(t, m, e.at); again != attached && again != attached+1 {
			t.Errorf("attached to %d functions, and then to %d", attached, again)
		}
		to := targets()["tcp4"]
		if r, err := e.here.Ask(t.Context(), "tcp", to); err == nil {
			t.Fatalf("reply from %s", r.Server)
		}
		if f := failureAt(t, m, to); f.Protocol != proxier.TCP {
			t.Errorf("got %+v", f)
		}
	})
	t.Run("evicted flows", func(t *testing.T) {
		e.use(t, serve(t, e.here))
		to := netip.AddrPortFrom(e.at.Addr4, nodePort)
		flows := e.tier.flowTable
		seen := newPace(func() uint64 { return flows.Count(lbmap.FlowBorn) })
		if err := newFlooder(t, e.client, to, 1, seen, syn).send(int(drainSizes.YoungFlows) + 10); err != nil {
			t.Fatal(err)
		}
		if f := failureFor(t, m, to, "pushed_out"); !netip.MustParsePrefix("198.18.0.0/15").Contains(f.Client.Addr()) || f.Protocol != proxier.TCP {
			t.Errorf("got %+v", f)
		}
	})
	t.Run("held back", func(t *testing.T) {
		kernel.Needs(t, capabilities.NetfilterHook)
		v := e.visit(t, e.entries("tcp")[0])
		e.detachFrom(t, tc.Ingress)
		followNode(t, m, e.at)
		if _, err := lab.AskConn(shortly(t), v.conn); err == nil {
			t.Fatal("a reply without the program at ingress")
		}
		if f := failureFor(t, m, v.entry.to, "held_back"); f.Client.String() != v.conn.LocalAddr().String() {
			t.Errorf("got %+v", f)
		}
	})
	if n, err := m.LeftOut(); n != 0 || err != nil {
		t.Errorf("%d failures were left out, %v", n, err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the programs to be traced no more", func() bool { return monitored(t, e.at) == 0 })
}

// TestMonitorXDP: what XDP drops is reported as by the programs of tc.
func TestMonitorXDP(t *testing.T) {
	kernel.Since(t, 5, 17, "bpf_get_func_arg")
	e := newEdge(t, Options{Acceleration: datapath.Native}, lab.Options{NoOffload: true, XDP: true})
	e.OnServiceUpdate(nil, edgeService(func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24"} }))
	e.use(t, e.there)
	m := newMonitor(t, plenty)
	followNode(t, m, e.at)
	to := netip.AddrPortFrom(lb4, lbPort)
	if r, err := e.client.Ask(shortly(t), "tcp", to); err == nil {
		t.Fatalf("reply from %s", r.Server)
	}
	if f := failureAt(t, m, to); f.Reason != "dropped_source_range" || f.Client.Addr() != e.client.Addr4 {
		t.Errorf("got %+v", f)
	}
	counts, err := e.tier.Packets()
	if err != nil || !slices.ContainsFunc(counts, func(c lbmap.PacketCount) bool { return c.Result == "accelerated" && c.Count > 0 }) {
		t.Errorf("not dropped by XDP: %v, error %v", counts, err)
	}
}

// TestMonitorRate: of the failures in one second on one CPU, as many as the rate are reported, and the others counted.
func TestMonitorRate(t *testing.T) {
	kernel.Since(t, 5, 17, "bpf_get_func_arg")
	const rate, failures = 3, 20
	l := lab.NewT(t)
	one := l.Node("node1")
	n := newNode(t, one, l, Options{})
	n.OnServiceAdd(dualService()) // without endpoints
	n.sync(t)
	m := newMonitor(t, rate)
	followNode(t, m, one)
	second := func() int64 {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			t.Fatal(err)
		}
		return int64(now.Sec)
	}
	for tries := 1; ; tries++ {
		began, before := second(), leftOut(t, m)
		waitFor(t, "the next second", func() bool { return second() != began })
		began = second()
		if err := one.Do(func() error { return refusedOnOneCPU(failures) }); err != nil {
			t.Fatal(err)
		}
		within := second() == began
		reported := 0
		for ; uint64(reported)+leftOut(t, m)-before < failures; reported++ {
			failureAt(t, m, netip.AddrPortFrom(vip4, 80))
		}
		if within {
			if left := leftOut(t, m) - before; reported != rate || left != failures-rate {
				t.Errorf("%d failures are reported and %d counted, of %d", reported, left, failures)
			}
			return
		}
		if tries == 10 {
			t.Fatal("this machine takes more than a second for some connections")
		}
	}
}

func leftOut(t *testing.T, m *monitor.Monitor) uint64 {
	t.Helper()
	n, err := m.LeftOut()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// refusedOnOneCPU tries to connect UDP sockets to a Service without endpoints.
func refusedOnOneCPU(times int) error {
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return err
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if before.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return err
	}
	defer func() { _ = unix.SchedSetaffinity(0, &before) }()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for range times {
		if err := unix.Connect(fd, &unix.SockaddrInet4{Port: 80, Addr: vip4.As4()}); err == nil {
			return errors.New("connected to a Service without endpoints")
		}
	}
	return nil
}
