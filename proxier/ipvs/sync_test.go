// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/proxiertest"
)

var (
	everybody = [proxier.Origins]proxier.Route{{}, {}, {}}
	nodeRules = &proxier.NodeRules{NodePortAddrs: []netip.Addr{netip.MustParseAddr("172.18.0.1")}, LocalAddrs: []netip.Addr{netip.MustParseAddr("172.18.0.1")}}
)

// clusterIPOf is service port i with a ClusterIP, with so many backends.
func clusterIPOf(i, backends int) *proxier.Decision {
	name := proxier.ServicePortName{Protocol: proxier.TCP}
	name.Namespace, name.Name = "default", fmt.Sprintf("s%d", i)
	d := proxiertest.Decision(name, uint32(i))
	addr := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
	d.Frontends = []proxier.Frontend{{Addr: netip.AddrPortFrom(addr, 80), Kind: proxier.ClusterIP, Routes: everybody}}
	for b := range backends {
		d.Backends = append(d.Backends, proxier.Backend{
			Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i), byte(b + 1)}), 8080), Members: proxier.InCluster, Local: b%2 == 0,
		})
	}
	return d
}

// TestOneChange: a change costs what changes, however many Services there are, and asks
// for no list.
func TestOneChange(t *testing.T) {
	for _, services := range []int{10, 1000} {
		k := newFakeKernel()
		tier := process(k, Options{}, newFakeRules(k))
		all := proxier.Update{Full: true, NodeRules: nodeRules}
		for i := range services {
			all.Changes = append(all.Changes, proxier.PortChange{New: clusterIPOf(i, 4)})
		}
		if err := tier.Sync(t.Context(), all); err != nil {
			t.Fatal(err)
		}
		rules := tier.rules.(*fakeRules)
		steps := []struct {
			what     string
			old, new *proxier.Decision
			most     int
		}{
			{"an endpoint comes, which is here", clusterIPOf(3, 4), clusterIPOf(3, 5), 2},
			{"an endpoint goes, which is here", clusterIPOf(3, 5), clusterIPOf(3, 4), 2},
			{"an endpoint goes, which is elsewhere", clusterIPOf(3, 4), clusterIPOf(3, 3), 1},
			{"nothing", clusterIPOf(3, 3), clusterIPOf(3, 3), 0},
			{"a service port comes", nil, clusterIPOf(services, 1), 6},
		}
		for _, s := range steps {
			k.Messages, k.Lists, rules.Syncs = 0, 0, 0
			if err := tier.Sync(t.Context(), proxier.Update{Changes: []proxier.PortChange{{Old: s.old, New: s.new}}}); err != nil {
				t.Fatal(err)
			}
			if k.Messages > s.most || k.Lists > 0 || rules.Syncs > 0 {
				t.Errorf("%d services: %s: %d messages, %d lists, %d syncs of rules; want at most %d messages", services, s.what, k.Messages, k.Lists, rules.Syncs, s.most)
			}
		}
		k.Messages = 0
		if err := tier.Sync(t.Context(), proxier.Update{}); err != nil || k.Messages > 0 {
			t.Errorf("%d services: nothing to do: %d messages, %v", services, k.Messages, err)
		}
	}
}

// TestRestart: a process that finds everything in the kernel writes nothing.
func TestRestart(t *testing.T) {
	k := newFakeKernel()
	rules := newFakeRules(k)
	all := proxier.Update{Full: true, NodeRules: nodeRules}
	for i := range 10 {
		all.Changes = append(all.Changes, proxier.PortChange{New: clusterIPOf(i, 4)})
	}
	for range 2 {
		k.Messages, k.Lists, rules.Syncs = 0, 0, 0
		if err := process(k, Options{}, rules).Sync(t.Context(), all); err != nil {
			t.Fatal(err)
		}
	}
	if writes := k.Messages - k.Lists - rules.Syncs; writes > 0 {
		t.Errorf("the second process sends %d messages besides lists and rules", writes)
	}
}

// TestRefusal: what the kernel refuses is carried by rules, and told once. All others are
// served. With the next full sync it is tried again.
func TestRefusal(t *testing.T) {
	k := newFakeKernel()
	rules := newFakeRules(k)
	var told []proxier.Problem
	tier := process(k, Options{Reporter: proxier.ReporterFunc(func(p proxier.Problem) { told = append(told, p) })}, rules)
	refusing := refusingServers{serversOf(k), netip.MustParseAddrPort("10.96.0.1:80"), unix.EINVAL}
	tier.servers.kernel = &refusing
	all := proxier.Update{Full: true, NodeRules: nodeRules}
	for i := range 3 {
		all.Changes = append(all.Changes, proxier.PortChange{New: clusterIPOf(i, 2)})
	}
	sync := func(u proxier.Update, servers, ruled, problems int) {
		t.Helper()
		if err := tier.Sync(t.Context(), u); err != nil {
			t.Fatal(err)
		}
		if len(k.Servers) != servers || len(k.Addrs) != servers || len(rules.There) != ruled || len(told) != problems {
			t.Errorf("%d virtual servers, %d addresses, %d carried by rules, told %+v; want %d, %d and %d", len(k.Servers), len(k.Addrs), len(rules.There), told, servers, ruled, problems)
		}
	}
	d := all.Changes[1].New
	sync(all, 2, 1, 1)
	if tier.Why(d, &d.Frontends[0]) == nil || tier.Supports(d, &d.Frontends[0]) != nil {
		t.Error("it is not reported that rules serve it")
	}
	sync(proxier.Update{}, 2, 1, 1)
	sync(all, 2, 1, 1)
	refusing.err = nil
	sync(proxier.Update{}, 2, 1, 1)
	sync(all, 3, 0, 1)
	if err := tier.Why(d, &d.Frontends[0]); err != nil {
		t.Error(err)
	}
}

// refusingServers refuse one.
type refusingServers struct {
	fakeServers
	at  netip.AddrPort
	err error
}

func (r *refusingServers) Add(k serverKey, is server) error {
	if k.Addr == r.at && r.err != nil {
		return r.err
	}
	return r.fakeServers.Add(k, is)
}

// TestClaims: an address that is a frontend comes before a NodePort there, and the
// NodePort has it again when the frontend is gone.
func TestClaims(t *testing.T) {
	k := newFakeKernel()
	tier := process(k, Options{}, newFakeRules(k))
	at := keyOf(netip.MustParseAddrPort("172.18.0.1:30080"), proxier.TCP)
	nodePort, external := clusterIPOf(1, 1), clusterIPOf(2, 1)
	nodePort.Frontends = []proxier.Frontend{{Addr: netip.MustParseAddrPort("0.0.0.0:30080"), Kind: proxier.NodePort, Routes: hidden}}
	external.Frontends = []proxier.Frontend{{Addr: at.Addr, Kind: proxier.ExternalIP, Routes: hidden}}
	for _, step := range []struct {
		what string
		u    proxier.Update
		to   *proxier.Decision
	}{
		{"the frontend is first", proxier.Update{Full: true, NodeRules: nodeRules, Changes: []proxier.PortChange{{New: external}, {New: nodePort}}}, external},
		{"the frontend is gone", proxier.Update{Changes: []proxier.PortChange{{Old: external}}}, nodePort},
		{"the frontend is last", proxier.Update{Changes: []proxier.PortChange{{New: external}}}, external},
		{"the NodePort is gone", proxier.Update{Changes: []proxier.PortChange{{Old: nodePort}}}, external},
	} {
		if err := tier.Sync(t.Context(), step.u); err != nil {
			t.Fatal(err)
		}
		for a, d := range k.Servers[at].To {
			if is := a == step.to.Backends[0].Addr; is != (d.Weight > 0) {
				t.Errorf("%s: %s has weight %d", step.what, a, d.Weight)
			}
		}
	}
}

// TestUnansweredChange: what an unanswered message was about is written again, though it
// may have been done.
func TestUnansweredChange(t *testing.T) {
	k := newFakeKernel()
	tier := process(k, Options{}, newFakeRules(k))
	both, one := clusterIPOf(1, 2), clusterIPOf(1, 1)
	if err := tier.Sync(t.Context(), proxier.Update{Full: true, NodeRules: nodeRules, Changes: []proxier.PortChange{{New: both}}}); err != nil {
		t.Fatal(err)
	}
	for _, d := range k.Servers[keyOf(both.Frontends[0].Addr, proxier.TCP)].To {
		d.Active = 1 // or it goes as a whole, while rules carry it
	}
	k.Fails = func(what string) (before, after error) {
		if strings.HasPrefix(what, "change") {
			return nil, errLost
		}
		return nil, nil
	}
	if err := tier.Sync(t.Context(), proxier.Update{Changes: []proxier.PortChange{{Old: both, New: one}}}); err == nil {
		t.Fatal("nothing was lost")
	}
	k.Fails = nil
	if err := tier.Sync(t.Context(), proxier.Update{Changes: []proxier.PortChange{{Old: one, New: both}}}); err != nil {
		t.Fatal(err)
	}
	for a, d := range k.Servers[keyOf(both.Frontends[0].Addr, proxier.TCP)].To {
		if d.Weight != 1 {
			t.Errorf("%s has weight %d", a, d.Weight)
		}
	}
}

// TestDrainingAddress: an address that another device gets is not kept on kube-ipvs0 for
// connections, nor among those where all else is refused.
func TestDrainingAddress(t *testing.T) {
	k := newFakeKernel()
	tier := process(k, Options{}, newFakeRules(k))
	d := clusterIPOf(1, 1)
	addr := d.Frontends[0].Addr
	if err := tier.Sync(t.Context(), proxier.Update{Full: true, NodeRules: nodeRules, Changes: []proxier.PortChange{{New: d}}}); err != nil {
		t.Fatal(err)
	}
	k.Servers[keyOf(addr, proxier.TCP)].To[d.Backends[0].Addr].Active = 1
	if err := tier.Sync(t.Context(), proxier.Update{Changes: []proxier.PortChange{{Old: d}}}); err != nil {
		t.Fatal(err)
	}
	bound := member{set: set{boundIPs, proxier.IPv4}, addr: addr.Addr()}
	if !has(k.Addrs, addr.Addr()) || !has(k.Members, bound) {
		t.Error("the address of a connection is gone")
	}
	rules := *nodeRules
	rules.LocalAddrs = append([]netip.Addr{addr.Addr()}, rules.LocalAddrs...)
	if err := tier.Sync(t.Context(), proxier.Update{NodeRules: &rules}); err != nil {
		t.Fatal(err)
	}
	if has(k.Addrs, addr.Addr()) || has(k.Members, bound) || len(k.Servers) != 1 {
		t.Errorf("the address is still there, or the connection is not: %v", k.Servers)
	}
}

// TestDeletedByOthers: a virtual server that another program deletes is whole again with the
// second sync that has to do with it, and rules carry it meanwhile.
func TestDeletedByOthers(t *testing.T) {
	k := newFakeKernel()
	rules := newFakeRules(k)
	tier := process(k, Options{}, rules)
	two, three := clusterIPOf(1, 2), clusterIPOf(1, 3)
	if err := tier.Sync(t.Context(), proxier.Update{Full: true, NodeRules: nodeRules, Changes: []proxier.PortChange{{New: two}}}); err != nil {
		t.Fatal(err)
	}
	at := keyOf(two.Frontends[0].Addr, proxier.TCP)
	delete(k.Servers, at)
	if err := tier.Sync(t.Context(), proxier.Update{Changes: []proxier.PortChange{{Old: two, New: three}}}); err == nil || len(rules.There) != 1 {
		t.Errorf("it is not noticed: %v", err)
	}
	if err := tier.Sync(t.Context(), proxier.Update{}); err != nil {
		t.Fatal(err)
	}
	if s := k.Servers[at]; s == nil || len(s.To) != 3 || len(rules.There) != 0 {
		t.Errorf("it has %+v, and rules have %v", s, rules.There)
	}
}

// TestNoWeight: a UDP endpoint that accepts no new clients keeps those it has. One that never had
// any through a virtual server is not added to it.
func TestNoWeight(t *testing.T) {
	k := newFakeKernel()
	tier := process(k, Options{}, newFakeRules(k))
	both, leaving := clusterIPOf(1, 2), clusterIPOf(1, 3)
	both.Name.Protocol, leaving.Name.Protocol = proxier.UDP, proxier.UDP
	for i := range leaving.Backends[1:] {
		leaving.Backends[1+i].Members = 0
	}
	if err := tier.Sync(t.Context(), proxier.Update{Full: true, NodeRules: nodeRules, Changes: []proxier.PortChange{{New: both}}}); err != nil {
		t.Fatal(err)
	}
	if err := tier.Sync(t.Context(), proxier.Update{Changes: []proxier.PortChange{{Old: both, New: leaving}}}); err != nil {
		t.Fatal(err)
	}
	weights := map[netip.AddrPort]int{}
	for a, d := range k.Servers[keyOf(both.Frontends[0].Addr, proxier.UDP)].To {
		weights[a] = d.Weight
	}
	want := map[netip.AddrPort]int{both.Backends[0].Addr: 1, both.Backends[1].Addr: 0}
	if !maps.Equal(weights, want) {
		t.Errorf("weights are %v, want %v", weights, want)
	}
}
