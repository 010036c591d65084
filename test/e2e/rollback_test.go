// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// objects are those of writeManifests, for an API server.
func objects(t testing.TB, service string, pods ...*lab.Pod) []fakeapi.Object {
	t.Helper()
	var s v1.Service
	if err := yaml.Unmarshal([]byte(service), &s); err != nil {
		t.Fatal(err)
	}
	s.Spec.IPFamilies = []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} // as an API server completes it
	list := []fakeapi.Object{&s}
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name + "-" + string(family), Labels: map[string]string{discoveryv1.LabelServiceName: s.Name}},
			AddressType: family,
			Ports: []discoveryv1.EndpointPort{
				{Name: ptr.To("t"), Port: ptr.To[int32](targetPort), Protocol: ptr.To(v1.ProtocolTCP)},
				{Name: ptr.To("u"), Port: ptr.To[int32](targetPort), Protocol: ptr.To(v1.ProtocolUDP)},
			},
		}
		for _, p := range pods {
			addr := p.Addr4
			if family == discoveryv1.AddressTypeIPv6 {
				addr = p.Addr6
			}
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{addr.String()}, NodeName: &p.Node.Name})
		}
		list = append(list, slice)
	}
	return list
}

// everybody are all clients with their targets.
func (s *stage) everybody(do func(from *lab.Sandbox, ways map[string]netip.AddrPort)) {
	do(s.client.Sandbox, targets())
	do(s.node.Sandbox, targets())
	do(s.far.Sandbox, outside(s.node))
}

// follows waits until new connections of all clients reach only that pod.
func (s *stage) follows(pod *lab.Pod) {
	s.t.Helper()
	await(s.t, "new connections to "+pod.Name+" alone", func() (err error) {
		s.everybody(func(from *lab.Sandbox, ways map[string]netip.AddrPort) {
			for name, to := range ways {
				for range 5 {
					reply, askErr := from.Ask(s.t.Context(), name[:3], to)
					if askErr == nil && reply.Server != pod.Name {
						askErr = fmt.Errorf("%s from %s: %s answers", name, from.Name, reply.Server)
					}
					err = errors.Join(err, askErr)
				}
			}
		})
		return err
	})
}

// TestRollBack: the image alone is changed to that of another kube-proxy, and back. New
// connections succeed all the time, and follow the one that runs; established ones continue.
func TestRollBack(t *testing.T) {
	binary := upstream.BinaryT(t)
	for _, tt := range []struct {
		mode string
		kill bool // not terminated
	}{{"iptables", true}, {"nftables", false}, {"ipvs", true}, {"iptables", false}, {"nftables", true}} {
		name := tt.mode + " after the end"
		if tt.kill {
			name = tt.mode + " after a kill"
		}
		if testing.Short() && (tt.mode == "iptables" && !tt.kill || tt.mode == "nftables" && tt.kill) {
			continue // once for each mode
		}
		t.Run(name, func(t *testing.T) {
			s := newStage(t, lab.Options{PortsInTurn: tt.mode == "ipvs"})
			pace := strictly
			if tt.mode == "ipvs" {
				upstream.NeedsIPVS(t, s.node)
				pace = slowly
			}
			s.keepsUDP()
			defer s.end()
			// Longer than the other one's first sync takes, as it has to be.
			flag := "--ebpf-yield-grace-period=" + (3 * lab.RequestTimeout()).String()
			s.start(flag)
			s.serves(t)
			long := s.open()
			w := lab.NewLoad(t)
			defer w.End()
			s.everybody(func(from *lab.Sandbox, ways map[string]netip.AddrPort) { w.Use(from, ways, pace) })
			w.More(100)

			if tt.kill {
				_ = s.Close()
			} else {
				s.Terminate(t)
			}
			s.process = nil
			theirs, err := upstream.Start(t.Context(), s.node, upstream.Options{
				Binary: binary, Mode: tt.mode, Objects: objects(t, loadBalancer, s.here, s.there), Args: upstream.Flags,
			})
			if err != nil {
				t.Fatal(err)
			}
			defer theirs.Close()
			w.More(100)
			theirs.API.Put(objects(t, loadBalancer, s.there)...)
			s.follows(s.there)
			checkAll(t, long)
			long = append(long, openFlows(t, s.client.Sandbox, targets(), s.there)...)
			w.More(100)
			if t.Failed() {
				return
			}

			_ = theirs.Close()
			s.start(flag)
			s.await(t, "a line about the other kube-proxy", s.Says("Another kube-proxy took over while this one was not running"))
			s.await(t, "taking back", s.Says("eBPF programs serve new connections again"))
			checkAll(t, long)
			w.More(100)
			writeManifests(t, s.dir, loadBalancer, s.here) // ends UDP flows to the other endpoint
			s.follows(s.here)
			w.End()
			few(t, w)
		})
	}
}

// TestRestartsAreNoSuccessor: for the programs, processes of this proxy are no other kube-proxy, with the shortest
// grace period also: neither one that is killed and starts again, with gaps longer than that, nor one that waits for
// another to end, nor one of another mode.
func TestRestartsAreNoSuccessor(t *testing.T) {
	s := newStage(t)
	defer s.end()
	const grace = 2 * time.Second // the shortest that is allowed
	flag := "--ebpf-yield-grace-period=" + grace.String()
	s.start(flag)
	s.serves(t)
	w := lab.NewLoad(t)
	defer w.End()
	s.everybody(func(from *lab.Sandbox, ways map[string]netip.AddrPort) { w.Use(from, ways, strictly) })
	w.More(100)
	kill := func() {
		_ = s.Close()
		s.process = nil
	}
	goesOn := func() {
		w.More(20)
		if s.Says("Another kube-proxy took over")() == nil {
			t.Errorf("an earlier process was taken for another kube-proxy:\n%s", s.Log)
		}
	}
	for range kernel.Rounds(2) {
		kill()
		dead := time.Now()
		for w.More(20); time.Since(dead) < 2*grace; {
			w.More(20)
		}
		s.start(flag)
		goesOn()
	}
	waiting := start(t, s.node, s.dir, flag)
	waiting.await(t, "the second process to wait", waiting.Says("waiting for it to end"))
	w.More(20)
	kill()
	s.process = waiting
	waiting.synced(t)
	goesOn()
	kill()
	s.start(flag, "--proxy-mode=iptables")
	goesOn()
	w.More(100)
	w.End()
	few(t, w)
}

// TestCleanupBeside: --cleanup touches nothing while a kube-proxy serves the node, this one in any mode or
// another.
func TestCleanupBeside(t *testing.T) {
	s := newStage(t)
	defer s.end()
	check := func(t *testing.T) {
		// The rest has the time and counters.
		appended := func() []string {
			return slices.DeleteFunc(strings.Split(rules(t, s.node), "\n"), func(line string) bool { return !strings.HasPrefix(line, "-A ") })
		}
		before := appended()
		out := command(s.node, "--cleanup")
		if err := out.Run(); err == nil || out.Says("a kube-proxy serves this node, so nothing was cleaned up")() != nil {
			t.Errorf("error %v\n%s", err, out.Log)
		}
		if d := cmp.Diff(before, appended()); d != "" {
			t.Errorf("rules changed:\n%s", d)
		}
		s.everybody(func(from *lab.Sandbox, ways map[string]netip.AddrPort) {
			for name, to := range ways {
				if _, err := from.Ask(t.Context(), name[:3], to); err != nil {
					t.Errorf("%s from %s: %v", name, from.Name, err)
				}
			}
		})
	}
	ends := func(t *testing.T) {
		s.Terminate(t)
		s.process = nil
		cleanup(t, s.node)
	}
	for _, mode := range []string{"iptables", "ipvs", "ebpf"} {
		t.Run(mode, func(t *testing.T) {
			if needs(t, []string{"--proxy-mode=" + mode}); mode == "ipvs" {
				upstream.NeedsIPVS(t, s.node)
			}
			// With ports that the configuration of the cleanup does not name.
			s.start("--proxy-mode="+mode, "--healthz-bind-address=0.0.0.0:11256", "--metrics-bind-address=127.0.0.1:11249")
			defer ends(t) // so that the next one has nothing to drain, which takes a lock as well
			await(t, "the first sync", func() error { return s.reaches("here", 3) })
			check(t)
		})
	}
	t.Run("upstream", func(t *testing.T) {
		binary := upstream.BinaryT(t)
		theirs, err := upstream.Start(t.Context(), s.node, upstream.Options{
			Binary: binary, Mode: "iptables", Objects: objects(t, loadBalancer, s.here, s.there), Args: upstream.Flags,
		})
		if err != nil {
			t.Fatal(err)
		}
		defer theirs.Close()
		await(t, "upstream's first sync", func() error { return s.reaches("here", 3) })
		check(t)
		// Nor does it if that one is only stopped, and does not answer.
		if err := theirs.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		check(t)
	})
}

// TestCleanupOfUpstream: --cleanup of upstream's kube-proxy leaves no rule of mode iptables that a packet
// passes.
func TestCleanupOfUpstream(t *testing.T) {
	binary := upstream.BinaryT(t)
	s := newStage(t)
	s.start("--proxy-mode=iptables")
	s.await(t, "health", healthy(s.node))
	s.Terminate(t)
	s.process = nil
	if out, err := s.node.Command(t.Context(), binary, "--cleanup").CombinedOutput(); err != nil {
		t.Errorf("upstream's --cleanup: %v\n%s", err, out)
	}
	// A chain with a name that it does not know stays, and nothing leads to it.
	for line := range strings.Lines(rules(t, s.node)) {
		if strings.Contains(line, "KUBE-") && !strings.HasPrefix(line, ":KUBE-REFUSED-PORTS ") && !strings.HasPrefix(line, "-A KUBE-REFUSED-PORTS ") {
			t.Errorf("left: %s", line)
		}
	}
	s.end()
}
