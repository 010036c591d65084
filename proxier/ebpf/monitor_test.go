// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/monitor"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

func newMonitor(t *testing.T) *monitor.Monitor {
	t.Helper()
	m, err := monitor.New(1000)
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

// follow attaches a monitor to the programs of a node.
func follow(t *testing.T, m *monitor.Monitor, at *lab.Node) (attached int, err error) {
	t.Helper()
	i := inspectNode(t, at)
	err = at.Do(func() error {
		return i.WithPrograms(func(programs []*ciliumebpf.Program) (err error) {
			attached, err = m.Follow(programs)
			return err
		})
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

// TestMonitor: what fails at sockets and by packets is reported with its reason, and who had it.
func TestMonitor(t *testing.T) {
	kernel.Since(t, 5, 17, "bpf_get_func_arg")
	e := newEdge(t, Options{})
	m := newMonitor(t)
	attached := followNode(t, m, e.at)
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
	if n, err := m.LeftOut(); n != 0 || err != nil {
		t.Errorf("%d failures were left out, %v", n, err)
	}
}
