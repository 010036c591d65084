// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
)

var sequences = flag.Int("sequences", 24, "random event sequences in TestModel; -short plays a tenth")

// world makes random events, and has the resulting objects. Names and addresses come from small
// ranges, so that they collide often.
type world struct {
	*rand.Rand
	t        *testing.T
	size     int
	tools    *iptablestest.Simulated
	node     *node
	failed   bool // a call of the tools, in this sync
	services map[string]*v1.Service
	slices   map[string]*discoveryv1.EndpointSlice
}

func (w *world) chance(p float64) bool { return w.Float64() < p }

func (w *world) service(i int) *v1.Service {
	s := service(i)
	if w.chance(0.3) { // an address that another Service has, or may get
		s = service(w.IntN(w.size))
		s.Name = fmt.Sprintf("s%d", i)
	}
	if w.chance(0.5) {
		for _, change := range kindOf(w.IntN(10)) {
			change(s)
		}
	}
	if s.Spec.Ports[0].NodePort != 0 {
		s.Spec.Ports[0].NodePort = int32(30000 + w.IntN(4*w.size))
	}
	for j := range s.Status.LoadBalancer.Ingress {
		s.Status.LoadBalancer.Ingress[j].IP = fmt.Sprintf("203.0.113.%d", w.IntN(w.size/4+2))
	}
	if w.chance(0.2) {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "q", Port: 53, Protocol: v1.ProtocolUDP})
	}
	if w.chance(0.05) {
		s.Spec.ClusterIP, s.Spec.ClusterIPs = v1.ClusterIPNone, []string{v1.ClusterIPNone}
	}
	return s
}

func (w *world) slice(i int) *discoveryv1.EndpointSlice {
	var addrs []string
	for range w.IntN(4) {
		if a := pod(w.IntN(400)); !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	s := endpoints(i, addrs...)
	if w.chance(0.2) {
		s = endpoints(i, fmt.Sprintf("fd00:10:244:1::%x", 1+w.IntN(9)))
	}
	if w.chance(0.5) {
		udp := s.Ports[0]
		name, protocol := "q", v1.ProtocolUDP
		udp.Name, udp.Protocol = &name, &protocol
		s.Ports = append(s.Ports, udp)
	}
	return s
}

func (w *world) event() {
	n := w.node
	i := w.IntN(w.size)
	name := fmt.Sprintf("s%d", i)
	switch w.IntN(10) {
	case 0, 1:
		if s := w.services[name]; s != nil {
			delete(w.services, name)
			n.OnServiceDelete(s)
		}
	case 2: // two Services swap their addresses
		other := fmt.Sprintf("s%d", w.IntN(w.size))
		a, b := w.services[name], w.services[other]
		if a == nil || b == nil || a == b {
			return
		}
		a, b = a.DeepCopy(), b.DeepCopy()
		a.Spec, b.Spec = b.Spec, a.Spec
		a.Status, b.Status = b.Status, a.Status
		w.put(a)
		w.put(b)
	case 3, 4, 5:
		w.put(w.service(i))
	default:
		s := w.slice(i)
		w.slices[s.Name] = s
		n.OnEndpointSliceUpdate(nil, s)
	}
}

func (w *world) put(s *v1.Service) {
	w.services[s.Name] = s
	w.node.OnServiceUpdate(nil, s)
}

// tell calls a node's event handlers with all objects.
func (w *world) tell(n *node) {
	for _, name := range slices.Sorted(maps.Keys(w.services)) {
		n.OnServiceAdd(w.services[name])
	}
	for _, name := range slices.Sorted(maps.Keys(w.slices)) {
		n.OnEndpointSliceAdd(w.slices[name])
	}
}

// fresh returns a new node, with the rules that a process writes that starts on an empty node with the
// same shape of shared chains.
func (w *world) fresh() *node {
	n := unstartedNode(w.t, newSimulated())
	tier := newSimulatedTier(n.options())
	for f := range proxier.Families {
		old := w.node.Tier.(*simulatedTier).families[f]
		tier.families[f].renderer.comments = old.renderer.comments
		for i := range sharedCount {
			tier.families[f].shared[i].split = old.shared[i].split
		}
	}
	n.Start(tier, iptablestest.Facts, proxier.Policy{})
	rules := w.node.Table().NodeRules()
	if err := tier.Sync(w.t.Context(), proxier.Update{Full: true, NodeRules: &rules, Changes: w.node.Table().All()}); err != nil {
		w.t.Fatal(err)
	}
	return n
}

// damage flushes a chain of the proxy, as another program might. The next full sync must repair it.
func (w *world) damage() {
	f := proxier.Family(w.IntN(int(proxier.Families)))
	var chains []string
	for at := range contents(w.t, w.tools, f) {
		if table, chain, _ := strings.Cut(at, " "); table == "nat" && isOurs(chain) {
			chains = append(chains, chain)
		}
	}
	if len(chains) == 0 {
		return
	}
	slices.Sort(chains)
	w.node.Restore(f, "*nat\n-F "+chains[w.IntN(len(chains))]+"\nCOMMIT\n")
}

// sync calls do, and expects an error exactly if a tool failed. All chains to be deleted could be
// deleted.
func (w *world) sync(do func() error) (ok bool) {
	w.t.Helper()
	w.failed = false
	if err := do(); (err != nil) != w.failed {
		w.t.Fatalf("failed: %v, error: %v", w.failed, err)
	}
	for _, f := range w.node.Tier.(*simulatedTier).families {
		for name := range f.referenced {
			if !slices.Contains(commonChains, name) { // chains of the kernel jump to those
				w.t.Fatalf("%s: chain %s could not be deleted", f.name, name)
			}
		}
	}
	return !w.failed
}

// check compares the rules with those of a fresh process. Of a family whose rules were read, it
// compares all rules. Otherwise it compares entries, because shared chains keep their shape then.
func (w *world) check(read [proxier.Families]int) {
	w.t.Helper()
	want := w.fresh()
	for f := range proxier.Families {
		got, wrong := entries(w.t, w.node.Tools, f)
		wanted, _ := entries(w.t, want.Tools, f)
		if diff := cmp.Diff(wanted, got); diff != "" || len(wrong) > 0 {
			w.t.Fatalf("%s; entries (-want +got):\n%s%q", f, diff, wrong)
		}
		if diff := cmp.Diff(w.own(want, f), w.own(w.node, f)); diff != "" {
			w.t.Fatalf("%s; chains (-want +got):\n%s", f, diff)
		}
		if read[f] == 0 {
			continue
		}
		if diff := cmp.Diff(saved(w.t, want.Tools, f), saved(w.t, w.node.Tools, f)); diff != "" {
			w.t.Fatalf("%s (-want +got):\n%s", f, diff)
		}
	}
}

func (w *world) own(n *node, f proxier.Family) map[string][]string {
	all := contents(w.t, n.Tools, f)
	maps.DeleteFunc(all, func(at string, _ []string) bool { return !isOfServicePort(at[len("nat "):]) || at[:4] != "nat " })
	return all
}

// TestModel: after any history, rules are those that a new process writes for the same objects.
// Processes restart, calls of tools fail, and another program damages rules. A full sync notices that
// by reading the rules, or by their generation.
func TestModel(t *testing.T) {
	for seed := range uint64(*sequences) {
		if testing.Short() && seed%10 != 5 { // one of large clusters, one with failures
			continue
		}
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 7))
			tools := newSimulated()
			tools.Simulates, tools.HasGeneration = variants[r.IntN(2)], r.IntN(2) == 1
			w := &world{
				Rand: r, t: t, size: []int{6, 30, 12, 30, 6, 260}[seed%6], tools: tools, node: newNode(t, tools),
				services: map[string]*v1.Service{}, slices: map[string]*discoveryv1.EndpointSlice{},
			}
			failing := seed%4 > 1
			w.node.Tools.Before = func(string) error {
				if failing && w.chance(0.2) {
					w.failed = true
					return errors.New("out of order")
				}
				return nil
			}

			for range 20 {
				switch {
				case w.chance(0.1): // most Services are created or deleted
					for range w.size * 2 {
						w.event()
					}
				default:
					for range 1 + w.IntN(4) {
						w.event()
					}
				}
				if w.chance(0.05) {
					w.node.restart()
					w.tell(w.node)
				}
				if !w.sync(func() error { return w.node.Sync(t.Context()) }) {
					continue
				}
				w.check([proxier.Families]int{})
				if w.chance(0.3) {
					if w.chance(0.3) {
						w.damage()
					}
					tools.Reads = [proxier.Families]int{}
					if w.sync(w.node.FullSync) {
						w.check(tools.Reads)
					}
				}
			}
			if len(w.node.Problems) > 0 {
				t.Errorf("reported %+v", w.node.Problems)
			}
		})
	}
}
