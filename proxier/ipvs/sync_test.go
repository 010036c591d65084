// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

var (
	everybody = [proxier.Origins]proxier.Route{{}, {}, {}}
	nodeRules = &proxier.NodeRules{NodePortAddrs: []netip.Addr{netip.MustParseAddr("172.18.0.1")}, LocalAddrs: []netip.Addr{netip.MustParseAddr("172.18.0.1")}}
)

// clusterIPOf is service port i with a ClusterIP, with so many backends.
func clusterIPOf(i, backends int) *proxier.Decision {
	name := proxier.ServicePortName{Protocol: proxier.TCP}
	name.Namespace, name.Name = "default", fmt.Sprintf("s%d", i)
	d := proxier.NewDecision(name, uint32(i))
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
		tier := k.process(Options{}, newFakeRules(k))
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
			k.messages, k.lists, rules.syncs = 0, 0, 0
			if err := tier.Sync(t.Context(), proxier.Update{Changes: []proxier.PortChange{{Old: s.old, New: s.new}}}); err != nil {
				t.Fatal(err)
			}
			if k.messages > s.most || k.lists > 0 || rules.syncs > 0 {
				t.Errorf("%d services: %s: %d messages, %d lists, %d syncs of rules; want at most %d messages", services, s.what, k.messages, k.lists, rules.syncs, s.most)
			}
		}
		k.messages = 0
		if err := tier.Sync(t.Context(), proxier.Update{}); err != nil || k.messages > 0 {
			t.Errorf("%d services: nothing to do: %d messages, %v", services, k.messages, err)
		}
	}
}

// TestRefusal: what the kernel refuses is carried by rules, and told once. All others are
// served. With the next full sync it is tried again.
func TestRefusal(t *testing.T) {
	k := newFakeKernel()
	rules := newFakeRules(k)
	var told []proxier.Problem
	tier := k.process(Options{Reporter: proxier.ReporterFunc(func(p proxier.Problem) { told = append(told, p) })}, rules)
	refusing := refusingServers{fakeServers{k}, netip.MustParseAddrPort("10.96.0.1:80"), unix.EINVAL}
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
		if len(k.servers) != servers || len(k.addrs) != servers || len(rules.there) != ruled || len(told) != problems {
			t.Errorf("%d virtual servers, %d addresses, %d carried by rules, told %+v; want %d, %d and %d", len(k.servers), len(k.addrs), len(rules.there), told, servers, ruled, problems)
		}
	}
	d := all.Changes[1].New
	sync(all, 2, 1, 1)
	if tier.Why(d, &d.Frontends[0]) == nil || tier.Supports(d, &d.Frontends[0]) != nil {
		t.Error("it is not told that rules carry it")
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
	if k.addr == r.at && r.err != nil {
		return r.err
	}
	return r.fakeServers.Add(k, is)
}
