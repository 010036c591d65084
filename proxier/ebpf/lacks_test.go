// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestLacks: a frontend that leads to an endpoint, here or elsewhere, lacks nothing. One whose programs would not do so does, although the
// maps have it. A probe leaves no client without an answer in the counters.
func TestLacks(t *testing.T) {
	for name, opts := range map[string]Options{"": {}, "Geneve": {Dispatch: lbmap.DispatchGeneve}, "options": {Dispatch: lbmap.DispatchOpt}} {
		t.Run(name, func(t *testing.T) { testLacks(t, newEdge(t, opts)) })
	}
}

// TestProbeWhileMapsGrow: a probe holds the lock of devices, and does not wait for the one that a growth of the maps acquires before it.
func TestProbeWhileMapsGrow(t *testing.T) {
	e := newEdge(t, Options{})
	e.use(t, e.here)
	d := e.Table().All()[0].New
	lb := slices.IndexFunc(d.Frontends, func(f proxier.Frontend) bool { return f.Kind == proxier.LoadBalancer })
	done := make(chan error, 1)
	e.tier.gen.Lock()
	go func() { done <- e.tier.probe(d, &d.Frontends[lb], nil) }()
	select {
	case err := <-done:
		e.tier.gen.Unlock()
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("a probe waits")
		e.tier.gen.Unlock()
		<-done
	}
}

// connections ends all flows, and returns how many of clients outside there ever were. All of them have to have ended with an answer or a reset.
func (e *edge) connections(t *testing.T) (n uint64) {
	t.Helper()
	if _, err := e.tier.flowTable.Sweep(t.Context(), &flowtable.Timeouts{}, flowtable.MonotonicSeconds()+math.MaxInt32/2); err != nil {
		t.Fatal(err)
	}
	traffic, err := e.tier.Traffic()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range traffic {
		if s.Unanswered > 0 {
			t.Errorf("%s: %d connections got no answer", s.Name, s.Unanswered)
		}
		n += s.Node.Connections + s.Outside.Connections
	}
	return n
}

func testLacks(t *testing.T, e *edge) {
	lacks := func(uplinks ...string) (list []string) {
		t.Helper()
		for _, c := range e.Table().All() {
			d := c.New
			for i := range d.Frontends {
				f := &d.Frontends[i]
				if f.Kind != proxier.LoadBalancer {
					continue
				}
				if err := e.tier.Lacks(d, f, uplinks); err != nil {
					list = append(list, fmt.Sprintf("%s/%s: %v", d.Name.Protocol, f.Addr, err))
				}
			}
		}
		return list
	}
	change := func(what string, edit func(*v1.Service)) {
		t.Helper()
		e.OnServiceUpdate(nil, edgeService(edit))
		e.sync(t)
		e.tier.probes.reset()
		if list := lacks(); len(list) > 0 {
			t.Errorf("%s: %s", what, strings.Join(list, "\n"))
		}
	}
	for _, test := range []struct {
		what string
		pods []*lab.Pod
	}{{"no endpoint", nil}, {"an endpoint on this node", []*lab.Pod{e.here}}, {"one on another", []*lab.Pod{e.there}}} {
		e.use(t, test.pods...)
		change(test.what, nil)
	}
	if e.connections(t) == 0 {
		t.Error("nothing was probed")
	}
	change("ranges", func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.1.0.0/16", "2001:db8:7::/48"} })
	change("ranges of one family", func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.1.0.0/16"} })
	change("affinity", func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP })
	policy := proxier.Policy{NodePorts: proxier.NodePortSelector{Primary: true}, Forwarding: proxier.DSR}
	e.UpdatePolicy(policy, func(*proxier.Facts) {})
	for _, s := range slicesOf("web", e.there) {
		for i := range s.Endpoints {
			s.Endpoints[i].NodeName = &e.two.Name
		}
		e.OnEndpointSliceUpdate(nil, s)
	}
	change("direct server return to a node that does not take it", nil)
	e.tier.writer.SetDirect(map[netip.Addr]struct{}{e.there.Addr4: {}, e.there.Addr6: {}})
	change("direct server return", nil)

	before := e.connections(t)
	if list := lacks(); len(list) > 0 || e.connections(t) != before {
		t.Errorf("looked again: %v, and %d connections more", list, e.connections(t)-before)
	}
	// The maps are right, but programs miss the bit of the port.
	e.tier.probes.reset()
	ports := e.tier.maps["tdm_port"]
	var bits uint64
	word := uint32(lbPort / 64)
	if err := ports.Lookup(word, &bits); err != nil {
		t.Fatal(err)
	}
	if err := ports.Put(word, uint64(0)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if list := lacks(); len(list) != 2 || !strings.Contains(list[0], "TCP/") {
			t.Errorf("programs that do not find the port: %v", list)
		}
	}
	if err := ports.Put(word, bits); err != nil {
		t.Fatal(err)
	}
	if list := lacks(lab.Uplink); len(list) > 0 {
		t.Errorf("programs that find it again: %v", list)
	}
}
