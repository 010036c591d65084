// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
)

// sizes are clusters: with shared chains that are not split; that are split; with rules without
// comments.
var sizes = []struct {
	name            string
	services, each  int
	split, comments bool
}{
	{"small", 20, 3, false, true},
	{"split", 200, 2, true, true},
	{"endpoints", 150, 8, true, false},
}

// TestNothingToDo: a full sync writes nothing if nothing changed, and neither does the first sync of
// another process.
func TestNothingToDo(t *testing.T) {
	for _, size := range sizes {
		t.Run(size.name, func(t *testing.T) {
			n := newNode(t, newSimulated())
			n.Serve(0, size.services, size.each)
			n.MustSync()
			n.MustFullSync() // knows the number of endpoints
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
				t.Errorf("%d restores, first:\n%.2000s", len(wrote), wrote[0])
			}
		})
	}
}

// TestSlotEmpties: a slot is deleted when a full sync deletes its last rule.
func TestSlotEmpties(t *testing.T) {
	n := newNode(t, newSimulated())
	n.Serve(0, 200, 1)
	n.MustSync()
	n.MustFullSync()
	const slot = "KUBE-SVC-SLOT-65" // has only the rule of s100
	rest := slices.DeleteFunc(n.Table().All(), func(c proxier.PortChange) bool { return c.New.Name.Name == "s100" })
	if len(contents(t, n.Tools, proxier.IPv4)["nat "+slot]) != 1 {
		t.Fatalf("%s does not have one rule", slot)
	}
	if err := n.Tier.Sync(t.Context(), proxier.Update{Full: true, Changes: rest}); err != nil {
		t.Error(err)
	}
	if strings.Contains(saved(t, n.Tools, proxier.IPv4), slot) {
		t.Errorf("%s is left", slot)
	}
}

// TestSlots: slots of a split chain are created and deleted with the Services in them, whatever fails
// in between, and all slots with rules are referenced.
func TestSlots(t *testing.T) {
	lone := service(1) // the only Service of its slot
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

// TestFamiliesApart: a family whose rules cannot be written is read again with each sync. The other
// family is not.
func TestFamiliesApart(t *testing.T) {
	for _, tells := range []bool{false, true} {
		for family := range proxier.Families {
			t.Run(fmt.Sprintf("%s/generation=%v", family, tells), func(t *testing.T) {
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
				reads("another program changed something", 1)
			})
		}
	}
}

// TestNodeRules: a change of node facts causes rules to be read only if it changes some.
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

// TestShapeIsSettled: whether to split shared chains is decided when all rules are read. Events do not
// cause this again and again, even if service ports share rules, or many were refused.
func TestShapeIsSettled(t *testing.T) {
	four := func(i int) *v1.Service { // service ports whose load balancer IP answers echo requests
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
