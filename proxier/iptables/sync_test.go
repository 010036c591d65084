// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
)

// sizes of clusters: shared chains that are not split, that are split, and rules without comments.
var sizes = []struct {
	name            string
	services, each  int
	split, comments bool
}{
	{"small", 20, 3, false, true},
	{"split", 200, 2, true, true},
	{"endpoints", 150, 8, true, false},
}

// TestNothingToDo: a sync that compares everything writes nothing if nothing changed, and
// so does the first one of another process.
func TestNothingToDo(t *testing.T) {
	for _, size := range sizes {
		t.Run(size.name, func(t *testing.T) {
			n := newNode(t, newSimulated())
			n.Serve(0, size.services, size.each)
			n.MustSync()
			n.MustFullSync() // the number of endpoints is known now
			n.Tools.Take()
			text := saved(t, n.Tools, proxier.IPv4)
			if split := strings.Contains(text, "nat KUBE-SVC-SLOT-05\n"); split != size.split {
				t.Errorf("shared chains are split: %v", split)
			}
			if comments := strings.Contains(text, `"shop/s0:p cluster IP"`); comments != size.comments {
				t.Errorf("rules have comments: %v", comments)
			}
			n.MustFullSync()
			n.restart()
			n.Serve(0, size.services, size.each)
			n.MustSync()
			n.MustFullSync()
			if wrote := n.Tools.Take(); len(wrote) > 0 {
				t.Errorf("%d times written, first:\n%.2000s", len(wrote), wrote[0])
			}
		})
	}
}

// TestSlotEmpties: a slot of a tree whose last rule goes with a full sync goes too.
func TestSlotEmpties(t *testing.T) {
	n := newNode(t, newSimulated())
	n.Serve(0, 200, 1)
	n.MustSync()
	n.MustFullSync()
	const slot = "KUBE-SVC-SLOT-65" // of s100 alone
	rest := slices.DeleteFunc(n.Table().All(), func(c proxier.PortChange) bool { return c.New.Name.Name == "s100" })
	if len(contents(t, n.Tools, proxier.IPv4)["nat "+slot]) != 1 {
		t.Fatalf("%s does not hold one rule", slot)
	}
	if err := n.Tier.Sync(t.Context(), proxier.Update{Full: true, Changes: rest}); err != nil {
		t.Error(err)
	}
	if strings.Contains(saved(t, n.Tools, proxier.IPv4), slot) {
		t.Errorf("%s is left", slot)
	}
}

// TestRefused: what the kernel refuses of one Service is told once, costs no other one
// anything, and nothing that was there. When it is no longer refused it is written.
func TestRefused(t *testing.T) {
	name := proxier.ServicePortName{Port: "p", Protocol: proxier.TCP}
	name.Namespace, name.Name = "shop", "s31"
	bad := chainName(clusterPrefix, &name, "")
	for _, size := range []int{50, 200} {
		for i := range 4 {
			restart, tells := i%2 == 1, i > 1
			t.Run(fmt.Sprintf("%d/restart=%v/tells=%v", size, restart, tells), func(t *testing.T) {
				tools := newSimulated()
				tools.HasGeneration = tells
				n := newNode(t, tools)
				n.Serve(0, size, 2)
				n.MustSync()
				before := contents(t, n.Tools, proxier.IPv4)
				n.Tools.Before = iptablestest.Refusing(bad)
				change := func() {
					for i := range size {
						if i%10 != 7 {
							n.OnEndpointSliceUpdate(nil, endpoints(i, pod(1000+i)))
						}
					}
				}
				if restart {
					n.restart()
					n.Serve(0, size, 2)
				}
				change()
				n.MustSync()
				got := contents(t, n.Tools, proxier.IPv4)
				name := name
				if diff := cmp.Diff(before["nat "+bad], got["nat "+bad]); diff != "" {
					t.Errorf("the chain refused (-before +after):\n%s", diff)
				}
				for _, r := range before["nat "+bad] {
					if to := jumpOf(r); isOfServicePort(to) && len(got["nat "+to]) != 2 {
						t.Errorf("%s has rules %q", to, got["nat "+to])
					}
				}
				if list, wrong := entries(t, n.Tools, proxier.IPv4); len(wrong) > 0 || !slices.ContainsFunc(list, func(r string) bool { return strings.HasSuffix(r, "-j "+chainName(externalPrefix, &name, "")) }) {
					t.Errorf("nothing leads to it; wrong: %q", wrong)
				}
				for i := range size {
					other := name
					other.Name = fmt.Sprintf("s%d", i)
					chain := chainName(clusterPrefix, &other, "")
					if to := chainName(endpointPrefix, &other, pod(1000+i)+":8080"); i%10 != 7 && i%10 != 5 && i != 31 &&
						(jumpOf(got["nat "+chain][len(got["nat "+chain])-1]) != to || len(got["nat "+to]) != 2) {
						t.Fatalf("service %d: rules %q", i, got["nat "+chain])
					}
				}
				for range 2 {
					n.MustFullSync()
				}
				if len(n.Problems) != 1 || n.Problems[0].Object.Name != "s31" || !strings.Contains(n.Problems[0].Message, "no chain like that one") {
					t.Errorf("told %+v", n.Problems)
				}
				n.Tools.Before = nil
				n.MustFullSync()
				n.Tools.Take()
				n.MustFullSync()
				got = contents(t, n.Tools, proxier.IPv4)
				if to := chainName(endpointPrefix, &name, pod(1031)+":8080"); len(got["nat "+to]) != 2 || len(n.Tools.Take()) > 0 {
					t.Error("it is not written when it could be")
				}
			})
		}
	}
}

// TestRefusedNew: a kernel without SCTP's match refuses rules of such a Service, also
// those of one that nobody serves, and also when all others are taken over from
// somebody else.
func TestRefusedNew(t *testing.T) {
	withoutSCTP := func(input string) error {
		if strings.Contains(input, "-m sctp") {
			return &xtables.RestoreError{Line: 2, Output: "no match sctp"}
		}
		return nil
	}
	sctp := func(s *v1.Service) { s.Spec.Ports[0].Protocol = v1.ProtocolSCTP }
	for _, takeOver := range []bool{false, true} {
		n := newNode(t, newSimulated())
		if takeOver {
			n.Serve(0, 30, 2)
			n.MustSync()
			n.restart()
		}
		n.Tools.Before = withoutSCTP
		n.Serve(5, 40, 1)
		n.OnServiceAdd(service(45, sctp))
		n.MustSync()
		n.MustFullSync()
		if len(n.Problems) != 1 || n.Problems[0].Object.Name != "s45" {
			t.Errorf("take-over %v: told %+v", takeOver, n.Problems)
		}
		want := newNode(t, newSimulated())
		want.Serve(5, 40, 1)
		want.MustSync()
		if diff := cmp.Diff(saved(t, want.Tools, proxier.IPv4), saved(t, n.Tools, proxier.IPv4)); diff != "" {
			t.Errorf("take-over %v: (-want +got):\n%s", takeOver, diff)
		}
	}
}

// TestRefusedByHalf: tables are changed one after the other. When one is refused, what was
// changed before it is put back.
func TestRefusedByHalf(t *testing.T) {
	n := newNode(t, newSimulated())
	n.Serve(0, 20, 2)
	n.OnServiceAdd(service(30, nodePort(30500)))
	n.MustSync()
	before := saved(t, n.Tools, proxier.IPv4)
	refused := 0
	n.Tools.Before = func(input string) error {
		filter, nat, both := strings.Cut(input, "*nat\n")
		if !both || !strings.Contains(nat, "shop/s30:p") || !strings.Contains(nat, "DNAT") {
			return nil
		}
		refused++
		if err := n.Tools.Tools.Restore(t.Context(), proxier.IPv4, []byte(filter)); err != nil {
			t.Error(err)
		}
		return &xtables.RestoreError{Line: 2, Output: "not in nat"}
	}
	n.OnEndpointSliceAdd(endpoints(30, pod(1)))
	n.MustSync()
	if refused == 0 || len(n.Problems) != 1 {
		t.Errorf("refused %d times, told %+v", refused, n.Problems)
	}
	if diff := cmp.Diff(before, saved(t, n.Tools, proxier.IPv4)); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
}

// TestGoneAndRepaired: a Service goes while a shared chain has to be repaired, which its chains have
// to outlive.
func TestGoneAndRepaired(t *testing.T) {
	n := newNode(t, newSimulated())
	n.Serve(0, 20, 2)
	n.MustSync()
	n.Tools.Before = func(string) error { return xtables.ErrLocked }
	n.OnServiceDelete(service(1))
	if err := n.Sync(t.Context()); !errors.Is(err, xtables.ErrLocked) {
		t.Fatalf("error %v", err)
	}
	n.Tools.Before = nil
	if err := n.Tools.Tools.Restore(t.Context(), proxier.IPv4, []byte("*nat\n-I KUBE-SERVICES 1 -j RETURN\nCOMMIT\n")); err != nil {
		t.Fatal(err)
	}
	n.Tools.Take()
	calls := 0
	n.Tools.Before = func(string) error { calls++; return nil }
	n.MustFullSync()
	if wrote := n.Tools.Take(); len(wrote) != calls || len(n.Problems) > 0 {
		t.Errorf("%d of %d calls succeeded, told %+v", len(wrote), calls, n.Problems)
	}
	want := newNode(t, newSimulated())
	want.Serve(0, 20, 2)
	want.OnServiceDelete(service(1))
	want.MustSync()
	if diff := cmp.Diff(saved(t, want.Tools, proxier.IPv4), saved(t, n.Tools, proxier.IPv4)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestErrors: when the tools fail altogether, at any call, Sync says so, and the next one
// writes what is owed, whatever that one is about.
func TestErrors(t *testing.T) {
	steps := []func(n *node){
		func(n *node) { n.Serve(0, 60, 2) },
		func(n *node) { n.OnServiceDelete(service(3)); n.OnServiceDelete(service(8)) },
		func(n *node) { n.Serve(100, 1, 2); n.OnServiceAdd(service(3, kindOf(3)...)) },
		func(n *node) { n.Serve(100, 100, 1) },
	}
	want := newNode(t, newSimulated())
	for _, step := range steps {
		step(want)
	}
	want.MustSync()
	want.MustFullSync()
	for _, full := range []bool{false, true} {
		for at, more := 1, true; more; at += 1 + at/4 {
			n := newNode(t, newSimulated())
			call, failed := 0, 0
			n.Tools.Before = func(string) error {
				if call++; call%at == 0 && failed < 3 {
					failed++
					return xtables.ErrLocked
				}
				return nil
			}
			errs := 0
			sync := func(f func() error) {
				if err := f(); errors.Is(err, xtables.ErrLocked) {
					errs++
				} else if err != nil {
					t.Fatal(err)
				}
			}
			for _, step := range steps {
				step(n)
				sync(func() error { return n.Sync(t.Context()) })
				if full {
					sync(n.FullSync)
				}
			}
			for range 3 { // as often as it failed
				sync(n.FullSync)
			}
			more = failed > 0
			if (errs > 0) != (failed > 0) || len(n.Problems) > 0 {
				t.Fatalf("call %d: %d failures, %d errors; told %+v", at, failed, errs, n.Problems)
			}
			for _, f := range []proxier.Family{proxier.IPv4, proxier.IPv6} {
				if diff := cmp.Diff(saved(t, want.Tools, f), saved(t, n.Tools, f)); diff != "" {
					t.Fatalf("every call %d fails (-want +got):\n%.3000s", at, diff)
				}
			}
		}
	}
}

// TestOwed: after an error the next sync, which brings nothing, writes all that is owed.
func TestOwed(t *testing.T) {
	n := newNode(t, newSimulated())
	n.Serve(0, 20, 2)
	n.MustSync()
	fail := true
	n.Tools.Before = func(string) error {
		if fail {
			return errors.New("out of order")
		}
		return nil
	}
	n.OnServiceDelete(service(1, kindOf(1)...))
	n.Serve(20, 5, 1)
	if err := n.Sync(t.Context()); err == nil {
		t.Fatal("no error")
	}
	// Another one gets the place of the one that is gone.
	n.Serve(30, 3, 1)
	n.OnServiceAdd(service(1, kindOf(1)...))
	if err := n.Sync(t.Context()); err == nil {
		t.Fatal("no error")
	}
	fail = false
	n.Tools.Take()
	if err := n.Tier.Sync(t.Context(), proxier.Update{}); err != nil {
		t.Fatal(err)
	}
	if wrote := n.Tools.Take(); len(wrote) != 2 || len(n.Problems) > 0 { // once in each family, so nothing was refused
		t.Errorf("%d times written, told %+v", len(wrote), n.Problems)
	}
	want := newNode(t, newSimulated())
	want.Serve(0, 25, 2)
	for i := 20; i < 25; i++ {
		want.OnEndpointSliceUpdate(nil, endpoints(i, pod(i)))
	}
	want.Serve(30, 3, 1)
	want.OnServiceAdd(service(1, kindOf(1)...))
	want.MustSync()
	if diff := cmp.Diff(saved(t, want.Tools, proxier.IPv4), saved(t, n.Tools, proxier.IPv4)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestSlots: chains of a tree come and go with the Services in them, whatever fails in
// between, and all that hold something are reached.
func TestSlots(t *testing.T) {
	lone := service(1) // whose slot has no other
	for name, steps := range map[string]func(n *node, fail func(bool)){
		"comes, which fails, and goes": func(n *node, fail func(bool)) {
			fail(true)
			n.OnServiceAdd(lone)
			_ = n.Sync(t.Context())
			fail(false)
			n.OnServiceDelete(lone)
			n.MustSync()
		},
		"goes while all is read": func(n *node, fail func(bool)) {
			n.OnServiceAdd(lone)
			n.MustSync()
			n.OnServiceDelete(lone)
			fail(true)
			_ = n.Sync(t.Context())
			fail(false)
			n.MustFullSync()
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newSimulated())
			for i := 0; i < 300; i += 2 {
				n.OnServiceAdd(service(i))
				n.OnEndpointSliceAdd(endpoints(i, pod(i)))
			}
			n.OnEndpointSliceAdd(endpoints(1, pod(1)))
			n.MustSync()
			steps(n, func(yes bool) {
				n.Tools.Before = nil
				if yes {
					n.Tools.Before = func(string) error { return xtables.ErrLocked }
				}
			})
			f := n.Tier.(*simulatedTier).families[proxier.IPv4]
			if slot := f.shared[servicesNAT].chainOf(addrSlot(netip.MustParseAddr(lone.Spec.ClusterIP))); has(f.referenced, slot) {
				t.Errorf("%s could not be deleted", slot)
			}
			n.OnServiceAdd(lone)
			n.MustSync()
			if _, wrong := entries(t, n.Tools, proxier.IPv4); len(wrong) > 0 {
				t.Errorf("wrong: %q", wrong)
			}
		})
	}
}

// TestFamiliesApart: a family whose rules cannot be written reads again and again, the
// other does not.
func TestFamiliesApart(t *testing.T) {
	for _, tells := range []bool{false, true} {
		for family := range proxier.Families {
			t.Run(fmt.Sprintf("%s/tells=%v", family, tells), func(t *testing.T) {
				fake := newSimulated()
				fake.HasGeneration = tells
				tools := &failingTools{fake, proxier.Families}
				n := newNode(t, tools)
				n.Serve(0, 20, 2)
				n.MustSync()
				reads := func(what string, want int) {
					t.Helper()
					if other := 1 - family; fake.Reads[other] != want {
						t.Errorf("%s: read %d times, want %d", what, fake.Reads[other], want)
					}
					fake.Reads = [proxier.Families]int{}
				}
				reads("at first", 1)
				n.Restore(family, "*nat\n-F KUBE-SERVICES\nCOMMIT\n")
				tools.family = family
				if err := n.FullSync(); err == nil {
					t.Error("no error")
				}
				reads("broken", 1)
				for i := range 3 {
					n.OnServiceAdd(service(30+i, dualStack(30+i)))
					_ = n.Sync(t.Context())
					if fake.Reads[family] != 1 {
						t.Errorf("event %d: read %d times, want 1", i, fake.Reads[family])
					}
					reads(fmt.Sprint("event ", i), 0)
				}
				_ = n.FullSync()
				if reads("full sync", map[bool]int{false: 1, true: 0}[tells]); !tells {
					return
				}
				tools.family = proxier.Families
				n.MustFullSync()
				reads("mended", 0)
				n.MustFullSync()
				if fake.Reads[family] > 0 {
					t.Errorf("in the end: read %d times", fake.Reads[family])
				}
				reads("in the end", 0)
				n.Restore(family, "*filter\n-A FORWARD -j ACCEPT\nCOMMIT\n")
				n.MustFullSync()
				reads("somebody else changed something", 1)
			})
		}
	}
}

// TestNodeRules: what is known of the node has rules read only where it changes some.
func TestNodeRules(t *testing.T) {
	primary := proxier.NodePortSelector{Primary: true}
	addr := func(text string) func(*proxier.Facts, *proxier.Policy) {
		return func(f *proxier.Facts, _ *proxier.Policy) {
			f.LocalAddrs = append(slices.Clone(f.LocalAddrs), netip.MustParseAddr(text))
		}
	}
	none, one, both := [proxier.Families]int{}, [proxier.Families]int{1, 0}, [proxier.Families]int{1, 1}
	for _, tc := range []struct {
		name      string
		nodePorts proxier.NodePortSelector
		change    func(*proxier.Facts, *proxier.Policy)
		want      [proxier.Families]int
	}{
		{"an address", proxier.NodePortSelector{}, addr("172.18.1.1"), none},
		{"an address that is not selected", primary, addr("172.18.1.1"), none},
		{"a selected one", proxier.NodePortSelector{CIDRs: []netip.Prefix{netip.MustParsePrefix("172.18.0.0/16")}}, addr("172.18.1.1"), one},
		{"the primary one", primary, func(f *proxier.Facts, _ *proxier.Policy) {
			f.NodeIPs[proxier.IPv4] = netip.MustParseAddr("172.18.0.9")
			f.LocalAddrs = []netip.Addr{f.NodeIPs[proxier.IPv4], f.NodeIPs[proxier.IPv6]}
		}, one},
		{"pods", primary, func(f *proxier.Facts, _ *proxier.Policy) {
			f.Pods.CIDRs = []netip.Prefix{netip.MustParsePrefix("10.245.0.0/16"), f.Pods.CIDRs[1]}
		}, one},
		{"devices of pods", primary, func(f *proxier.Facts, _ *proxier.Policy) { f.Pods = proxier.Detector{Interface: "cni0"} }, both},
		{"loopback addresses", primary, func(_ *proxier.Facts, p *proxier.Policy) { p.NodePorts.Localhost = true }, one},
		{"ranges of Services", primary, func(f *proxier.Facts, _ *proxier.Policy) { f.ServiceCIDRs = iptablestest.ServiceCIDRs[:1] }, one},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tools := newSimulated()
			n := unstartedNode(t, tools)
			facts, policy := iptablestest.Facts, proxier.Policy{NodePorts: tc.nodePorts}
			n.Start(newSimulatedTier(n.options()), facts, policy)
			n.Serve(0, 20, 2)
			n.MustSync()
			tools.Reads = none
			tc.change(&facts, &policy)
			rules := policy.NodeRules(&facts)
			if err := n.Tier.Sync(t.Context(), proxier.Update{NodeRules: &rules}); err != nil {
				t.Fatal(err)
			}
			if tools.Reads != tc.want {
				t.Errorf("read %v times, want %v", tools.Reads, tc.want)
			}
			want := unstartedNode(t, newSimulated())
			want.Start(newSimulatedTier(want.options()), facts, policy)
			want.Serve(0, 20, 2)
			want.MustSync()
			for f := range proxier.Families {
				if diff := cmp.Diff(saved(t, want.Tools, f), saved(t, n.Tools, f)); diff != "" {
					t.Errorf("%s (-want +got):\n%s", f, diff)
				}
			}
		})
	}
}

// TestShapeIsSettled: the shape of shared chains is chosen when everything is read, and events do
// not have that done again and again: not if service ports share rules, and not if many of
// them were refused.
func TestShapeIsSettled(t *testing.T) {
	four := func(i int) *v1.Service { // ports, of which each has the load balancer IP answer echo requests
		s := service(i, balanced(i))
		s.Spec.Ports = nil
		for port := range 4 {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprintf("p%d", port), Port: int32(80 + port), Protocol: v1.ProtocolTCP})
		}
		return s
	}
	serveFour := func(n *node, i int) {
		n.OnServiceAdd(four(i))
		s := endpoints(i, pod(i))
		for port := range 4 {
			p := s.Ports[0]
			name := fmt.Sprintf("p%d", port)
			p.Name = &name
			s.Ports = append(s.Ports, p)
		}
		n.OnEndpointSliceAdd(s)
	}
	for name, begin := range map[string]func(n *node){
		"shared": func(n *node) {
			for i := range 20 {
				serveFour(n, i)
			}
			n.MustSync()
			for i := 7; i < 20; i++ {
				n.OnServiceDelete(four(i))
			}
		},
		"refused": func(n *node) {
			n.Tools.Before = func(input string) error {
				if strings.Contains(input, "-m sctp") {
					return &xtables.RestoreError{Line: 2, Output: "no match sctp"}
				}
				return nil
			}
			for i := range 140 {
				n.OnServiceAdd(service(i, func(s *v1.Service) {
					if i >= 60 {
						s.Spec.Ports[0].Protocol = v1.ProtocolSCTP
					}
				}))
				sctp := v1.ProtocolSCTP
				s := endpoints(i, pod(i))
				if i >= 60 {
					s.Ports[0].Protocol = &sctp
				}
				n.OnEndpointSliceAdd(s)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			tools := newSimulated()
			n := newNode(t, tools)
			begin(n)
			n.MustSync()
			n.MustFullSync()
			tools.Reads = [proxier.Families]int{}
			for i := range 3 {
				n.OnServiceAdd(service(200 + i))
				n.OnEndpointSliceAdd(endpoints(200+i, pod(200+i)))
				n.MustSync()
				n.OnServiceDelete(service(200 + i))
				n.MustSync()
			}
			if tools.Reads != [proxier.Families]int{} {
				t.Errorf("rules were read %v times", tools.Reads)
			}
			n.Serve(300, 200, 1)
			n.MustSync()
			n.Serve(500, 1, 1)
			n.MustSync()
			if !strings.Contains(saved(t, n.Tools, proxier.IPv4), "nat KUBE-SVC-SLOT-05\n") {
				t.Error("shared chains are not split when they should be")
			}
		})
	}
}

// TestSizeOfChanges: among 2,000 Services, what is written is what changed.
func TestSizeOfChanges(t *testing.T) {
	n := newNode(t, newSimulated())
	n.Serve(0, 2000, 1)
	n.MustSync()
	n.MustFullSync() // shared chains are split
	n.MustFullSync()
	n.Tools.Take()
	lines := func() (chains, inserts, rules int) {
		t.Helper()
		n.MustSync()
		wrote := n.Tools.Take()
		if len(wrote) != 1 {
			t.Fatalf("%d times written", len(wrote))
		}
		for line := range strings.Lines(wrote[0]) {
			switch line[0] {
			case ':':
				chains++
			case '-':
				rules++
				if strings.HasPrefix(line, "-I") {
					inserts++
				}
			}
		}
		return chains, inserts, rules
	}
	n.OnEndpointSliceUpdate(nil, endpoints(10, "10.244.9.9"))
	if chains, inserts, rules := lines(); chains != 3 || inserts != 0 || rules > 6 {
		t.Errorf("an endpoint: %d chains, %d inserted, %d lines", chains, inserts, rules)
	}
	n.OnServiceAdd(service(2001, balanced(2001), func(s *v1.Service) { s.Spec.Ports[0].NodePort = 31999 }))
	n.OnEndpointSliceAdd(endpoints(2001, "10.244.9.10"))
	// Its ClusterIP, load balancer IP, the latter's echo, and NodePort.
	if chains, inserts, rules := lines(); chains != 3 || inserts != 4 || rules > 12 {
		t.Errorf("a Service: %d chains, %d inserted, %d lines", chains, inserts, rules)
	}
	n.OnServiceDelete(service(2001))
	if chains, inserts, rules := lines(); chains > 7 || inserts != 0 || rules > 150 {
		t.Errorf("a Service that goes: %d chains, %d inserted, %d lines", chains, inserts, rules)
	}
}

// TestSizeOfDeletions: when thousands of Services go at once, or lose all their endpoints,
// no restore of the nft variant is longer than one that makes them, as its time grows with
// the square of that.
func TestSizeOfDeletions(t *testing.T) {
	const services, each = 1000, 10
	addrs := func(i int) (list []string) {
		for j := range each {
			list = append(list, pod((i*each+j)%10000))
		}
		return list
	}
	for name, change := range map[string]func(n *node, i int){
		"deleted":  func(n *node, i int) { n.OnServiceDelete(service(i)) },
		"unserved": func(n *node, i int) { n.OnEndpointSliceDelete(endpoints(i, addrs(i)...)) },
		"moved":    func(n *node, i int) { n.OnEndpointSliceUpdate(nil, endpoints(i, addrs(i+1)...)) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newSimulated())
			for i := range services {
				n.OnServiceAdd(service(i))
				n.OnEndpointSliceAdd(endpoints(i, addrs(i)...))
			}
			n.MustSync()
			n.Tools.Take()
			for i := range services {
				change(n, i)
			}
			n.MustSync()
			most := n.Tier.(*simulatedTier).families[proxier.IPv4].batchSize()
			all := 0
			for _, wrote := range n.Tools.Take() {
				chains := strings.Count(wrote, "\n:")
				all += chains
				if chains > most+addrSlots+2*(each+2) { // a port more, and parts of a shared chain
					t.Errorf("%d chains at once, want %d", chains, most)
				}
			}
			if all < services*each {
				t.Errorf("%d chains were written", all)
			}
		})
	}
}

var comments = regexp.MustCompile(`-m comment --comment "[^"]*" `)

// TestDeath: a process can end between any two calls of the tools, or one of them fails and
// it goes on. What frontends there were before and are still wanted are there at any
// moment, and in the end all is as it should be.
func TestDeath(t *testing.T) {
	changes := map[string]struct{ before, after func(n *node) }{
		"start": {func(*node) {}, func(n *node) { n.Serve(0, 60, 2) }},
		"flat":  {func(n *node) { n.Serve(0, 60, 2) }, func(n *node) { n.Serve(5, 70, 3) }},
		"split": {func(n *node) { n.Serve(0, 90, 2) }, func(n *node) { n.Serve(5, 160, 2) }},
		"join":  {func(n *node) { n.Serve(0, 160, 2) }, func(n *node) { n.Serve(5, 30, 2) }},
		"tree":  {func(n *node) { n.Serve(0, 160, 2) }, func(n *node) { n.Serve(0, 161, 1) }},
		"one": {func(n *node) { n.Serve(0, 140, 1) }, func(n *node) {
			n.Serve(0, 140, 1)
			n.OnEndpointSliceUpdate(nil, endpoints(1, pod(7))) // one of two in a chain of the tree
		}},
		"comments": {func(n *node) { n.Serve(0, 70, 18) }, func(n *node) { n.Serve(0, 70, 2) }},
	}
	step := 1
	if testing.Short() {
		step = 9 // odd, so that processes both end and go on
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			want := newNode(t, newSimulated())
			change.after(want)
			want.MustSync()
			want.MustFullSync()
			// Whether they have comments does not matter.
			frontends := func(n *node) []string {
				list, _ := entries(t, n.Tools, proxier.IPv4)
				for i := range list {
					list[i] = comments.ReplaceAllString(list[i], "")
				}
				return list
			}
			wanted := frontends(want)
			for i := 0; ; i += step {
				calls, goesOn := i, false
				if name == "flat" || name == "comments" {
					calls, goesOn = i/2, i%2 == 1
				}
				n := newNode(t, newSimulated())
				change.before(n)
				n.MustSync()
				n.MustFullSync()
				there := slices.DeleteFunc(frontends(n), func(r string) bool { return !slices.Contains(wanted, r) })
				n.Tools.After = func(f proxier.Family) {
					if f != proxier.IPv4 {
						return
					}
					if missing := without(there, frontends(n)); len(missing) > 0 {
						t.Fatalf("after %d calls: lost %q", calls, missing)
					}
				}
				n.restart()
				change.after(n)
				ended, call := false, 0
				n.Tools.Before = func(string) error {
					if call++; call == calls+1 || call > calls && !goesOn {
						ended = true
						return errors.New("ended")
					}
					return nil
				}
				_ = n.Sync(t.Context())
				n.Tools.Before = nil
				if !goesOn {
					n.restart()
					change.after(n)
				}
				n.MustSync()
				for _, f := range []proxier.Family{proxier.IPv4, proxier.IPv6} {
					if diff := cmp.Diff(saved(t, want.Tools, f), saved(t, n.Tools, f)); diff != "" {
						t.Fatalf("after %d calls (-want +got):\n%.3000s", calls, diff)
					}
				}
				if !ended {
					break
				}
			}
		})
	}
}
