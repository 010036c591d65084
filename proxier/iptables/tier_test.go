// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
)

var variants = []xtables.Variant{xtables.NFT, xtables.Legacy}

// labTools run in the network namespace of a node.
type labTools struct {
	reads int // of all tables
	*xtables.Tools
	at *lab.Node
}

func newLabTools(t *testing.T, v xtables.Variant) *labTools {
	t.Helper()
	tools, err := xtables.New(v)
	if err != nil {
		lab.SkipOrFail(t, err)
	}
	return &labTools{Tools: tools, at: lab.NewT(t).Node("node1")}
}

func (l *labTools) Restore(ctx context.Context, f proxier.Family, input []byte) error {
	return l.at.Do(func() error { return l.Tools.Restore(ctx, f, input) })
}

func (l *labTools) Save(ctx context.Context, f proxier.Family, table string) (saved *xtables.Table, err error) {
	err = l.at.Do(func() error {
		saved, err = l.Tools.Save(ctx, f, table)
		return err
	})
	return saved, err
}

func (l *labTools) SaveAll(ctx context.Context, f proxier.Family, tables ...string) (saved map[string]*xtables.Table, err error) {
	l.reads++
	err = l.at.Do(func() error {
		saved, err = l.Tools.SaveAll(ctx, f, tables...)
		return err
	})
	return saved, err
}

func (l *labTools) Usable(ctx context.Context, f proxier.Family) error {
	return l.at.Do(func() error { return l.Tools.Usable(ctx, f) })
}

// Ensure, Packets and Delete have labTools be Counters.
func (l *labTools) Ensure(name string) error {
	return l.at.Do(func() error { return nfacct.Kernel{}.Ensure(name) })
}

func (l *labTools) Packets(name string) (n uint64, err error) {
	err = l.at.Do(func() error {
		n, err = nfacct.Kernel{}.Packets(name)
		return err
	})
	return n, err
}

func (l *labTools) Delete(name string) error {
	return l.at.Do(func() error { return nfacct.Kernel{}.Delete(name) })
}

// open has a Tier begin on a node of the lab.
func (n *node) open(facts proxier.Facts, policy proxier.Policy) {
	n.t.Helper()
	var tier *Tier
	err := n.tools.Tools.(*labTools).at.Do(func() (err error) {
		tier, err = Open(n.t.Context(), n.options())
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = tier.Close() })
	n.tools.take() // with which it found out what can be written
	n.start(tier, facts, policy)
}

func newLabNode(t *testing.T, v xtables.Variant) *node {
	t.Helper()
	n := &node{t: t, tools: &watchedTools{Tools: newLabTools(t, v)}}
	return n
}

// restore is what somebody else does to the rules.
func (n *node) restore(f proxier.Family, input string) {
	n.t.Helper()
	if err := n.tools.Tools.Restore(n.t.Context(), f, []byte(input)); err != nil {
		n.t.Fatalf("%v\n%s", err, input)
	}
}

// foreign are rules and chains of others, some with names much like ours.
const foreign = `*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:CNI-XYZ - [0:0]
-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A FORWARD -j CNI-XYZ
-A KUBE-FIREWALL -m comment --comment "kubelet's -j KUBE-SERVICES" -m mark --mark 0x8000/0x8000 -j DROP
COMMIT
*nat
:CNI-XYZ - [0:0]
:CNI-LOOSE - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
-A CNI-LOOSE -j CNI-XYZ
-A CNI-XYZ -p tcp -m tcp --dport 8443 -j REDIRECT --to-ports 443
-A PREROUTING -j CNI-XYZ
COMMIT
`

// branch is the rule of KUBE-SERVICES that leads to a slot.
func branch(f proxier.Family, s slot) string {
	h := newHub(servicesNAT, f)
	h.split = true
	return h.branch(s)
}

// TestUnread: what nobody else has changed is not read again. Only the nft variant can
// tell.
func TestUnread(t *testing.T) {
	n := newLabNode(t, xtables.NFT)
	tools := n.tools.Tools.(*labTools)
	n.open(testFacts, proxier.Policy{})
	n.serve(0, 3, 2)
	reads := func(want int, when string) {
		t.Helper()
		tools.reads = 0
		n.syncAll()
		if tools.reads != want {
			t.Errorf("%s: rules were read %d times, want %d", when, tools.reads, want)
		}
	}
	n.sync()
	reads(0, "nothing changed")
	n.serve(3, 1, 2)
	n.sync()
	reads(0, "we changed something")
	n.serve(4, 1, 2)
	reads(0, "we change something with the full sync")
	n.restore(proxier.IPv6, "*filter\n-A FORWARD -j ACCEPT\nCOMMIT\n")
	reads(2, "somebody else changed something")
	reads(0, "that was read")
	n.restore(proxier.IPv4, "*nat\n-F KUBE-SERVICES\nCOMMIT\n")
	n.serve(5, 1, 2)
	n.sync()
	reads(2, "somebody else changed something before we did")
	if c, err := tools.Save(t.Context(), proxier.IPv4, "nat"); err != nil || len(c.Chain(servicesChain).Rules) < 6 {
		t.Errorf("the rules were not restored: %v", err)
	}
	reads(0, "in the end")
}

// TestKernelNothingToDo: rules are in the very words of the tools. A sync that compares
// everything writes nothing if nothing changed, and neither does another process.
func TestKernelNothingToDo(t *testing.T) {
	for _, v := range variants {
		for _, size := range sizes {
			t.Run(fmt.Sprintf("%s/%s", v, size.name), func(t *testing.T) {
				n := newLabNode(t, v)
				facts := testFacts
				policy := proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}}
				facts.ServiceCIDRs = unservedRanges
				n.open(facts, policy)
				n.serve(0, size.services, size.each)
				n.sync()
				n.syncAll()
				n.tools.take()
				n.syncAll()
				n.open(facts, policy)
				n.serve(0, size.services, size.each)
				n.sync()
				n.syncAll()
				if wrote := n.tools.take(); len(wrote) > 0 || len(n.told) > 0 {
					t.Errorf("told %+v, and %d times written, first:\n%.2000s", n.told, len(wrote), append(wrote, "nothing")[0])
				}
			})
		}
	}
}

// TestRepair: whatever somebody does to the rules, the next sync that compares
// everything restores them exactly, and leaves those of others alone. If it fails, the
// next one does it.
func TestRepair(t *testing.T) {
	name := proxier.ServicePortName{Port: "p", Protocol: proxier.TCP}
	name.Namespace, name.Name = "shop", "s3"
	set, external := chainName(clusterPrefix, &name, ""), chainName(externalPrefix, &name, "")
	endpoint := func(f proxier.Family) string {
		return chainName(endpointPrefix, &name, []string{pod(3) + ":8080", "[fd00:10:244:1::4]:8080"}[f])
	}
	damages := []struct {
		name string
		do   func(f proxier.Family) string
	}{
		{"table flushed", func(proxier.Family) string {
			_, nat, _ := strings.Cut(foreign, "*nat\n")
			return "*nat\n-F\n" + nat // whose owners write theirs again
		}},
		{"jump gone", func(proxier.Family) string {
			return "*nat\n-D PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\nCOMMIT\n"
		}},
		{"rule changed", func(proxier.Family) string { return "*nat\n:" + set + " - [0:0]\n-A " + set + " -j RETURN\nCOMMIT\n" }},
		{"endpoint gone", func(f proxier.Family) string {
			return "*nat\n:" + set + " - [0:0]\n:" + endpoint(f) + " - [0:0]\n-X " + endpoint(f) + "\nCOMMIT\n"
		}},
		{"chain of the tree emptied", func(f proxier.Family) string {
			return "*nat\n:KUBE-SVC-SLOT-04 - [0:0]\nCOMMIT\n"
		}},
		{"tree without a branch", func(f proxier.Family) string {
			return fmt.Sprintf("*nat\n-D KUBE-SERVICES %s\nCOMMIT\n", branch(f, 4))
		}},
		{"rule added to the tree", func(f proxier.Family) string {
			return "*nat\n-I KUBE-SVC-SLOT-04 1 -j " + external + "\nCOMMIT\n"
		}},
		{"order of jumps", func(proxier.Family) string {
			const jump = "FORWARD -m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD\n"
			return "*filter\n-D " + jump + "-I " + jump + "COMMIT\n"
		}},
		{"canary gone", func(proxier.Family) string {
			return "*nat\n-X KUBE-PROXY-CANARY\nCOMMIT\n*mangle\n-X KUBE-PROXY-CANARY\nCOMMIT\n"
		}},
		{"shared rules gone", func(proxier.Family) string {
			return "*nat\n-F KUBE-POSTROUTING\n-F KUBE-MARK-MASQ\n-A KUBE-MARK-MASQ -j RETURN\nCOMMIT\n*filter\n-F KUBE-FORWARD\n-F KUBE-PROXY-FIREWALL\nCOMMIT\n"
		}},
		{"chains of old", func(proxier.Family) string {
			return "*nat\n:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]\n:KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]\n:KUBE-SVC-SLOT-7A - [0:0]\n" +
				"-A KUBE-SVC-AAAAAAAAAAAAAAAA -j KUBE-SEP-AAAAAAAAAAAAAAAA\n-A KUBE-SVC-SLOT-7A -j KUBE-SVC-AAAAAAAAAAAAAAAA\nCOMMIT\n"
		}},
	}
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			n := newLabNode(t, v)
			for f := range proxier.Families {
				n.restore(f, foreign)
			}
			n.open(testFacts, proxier.Policy{})
			for i := range 130 { // hubs are trees in both families
				change := []func(*v1.Service){dualStack(i)}
				if i < 10 {
					change = append(change, kindOf(i)...)
				}
				n.OnServiceAdd(service(i, change...))
				n.OnEndpointSliceAdd(endpoints(i, pod(i)))
				n.OnEndpointSliceAdd(endpoints(i, fmt.Sprintf("fd00:10:244:1::%x", 1+i)))
			}
			n.sync()
			n.syncAll()
			var before [proxier.Families]string
			for f := range proxier.Families {
				before[f] = saved(t, n.tools, f)
			}
			for i, damage := range damages {
				for f := range proxier.Families {
					n.restore(f, damage.do(f))
				}
				if i%2 == 1 { // it does not succeed at once
					n.tools.before = func(string) error { return errors.New("out of order") }
					if err := n.compare(); err == nil {
						t.Errorf("%s: it was not repaired", damage.name)
					}
					n.tools.before = nil
					n.sync()
				} else {
					n.syncAll()
				}
				for f := range proxier.Families {
					if diff := cmp.Diff(before[f], saved(t, n.tools, f)); diff != "" {
						t.Fatalf("%s, %s (-want +got):\n%s", damage.name, f, diff)
					}
				}
				n.tools.take()
				n.syncAll()
				if wrote := n.tools.take(); len(wrote) > 0 {
					t.Errorf("%s: written once more:\n%s", damage.name, wrote[0])
				}
			}
		})
	}
}

// hidingTools do not show a chain of others, as those of iptables do not show what was
// written by nft.
type hidingTools struct {
	Tools
	chain string
}

func (t *hidingTools) SaveAll(ctx context.Context, f proxier.Family, names ...string) (map[string]*xtables.Table, error) {
	tables, err := t.Tools.SaveAll(ctx, f, names...)
	for _, table := range tables {
		shown := &xtables.Table{Name: table.Name}
		for _, c := range table.Chains {
			if c.Name != t.chain {
				shown.Chains = append(shown.Chains, c)
			}
		}
		tables[table.Name] = shown
	}
	return tables, err
}

// TestBound: chains that rules of somebody else lead to cannot be deleted. Neither that nor
// a restart keeps what is gone from going, nor anything else from being written; the chains
// are empty, and go when they can.
func TestBound(t *testing.T) {
	name := proxier.ServicePortName{Port: "p", Protocol: proxier.TCP}
	name.Namespace, name.Name = "shop", "s3"
	set, external := chainName(clusterPrefix, &name, ""), chainName(externalPrefix, &name, "")
	endpoint := chainName(endpointPrefix, &name, pod(6)+":8080")
	for tools, begin := range map[string]func(t *testing.T) *node{
		"fake":   func(t *testing.T) *node { return newNode(t, newFakeTools()) },
		"hidden": func(t *testing.T) *node { return newNode(t, &hidingTools{newFakeTools(), "ADMIN"}) },
		"nft":    func(t *testing.T) *node { return newLabNode(t, xtables.NFT) },
		"legacy": func(t *testing.T) *node { return newLabNode(t, xtables.Legacy) },
	} {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/restart=%v", tools, restart), func(t *testing.T) {
				n := begin(t)
				start := func() {
					if n.tier == nil || restart {
						if _, real := n.tools.Tools.(*labTools); real {
							n.open(testFacts, proxier.Policy{})
						} else {
							n.restart()
						}
					}
				}
				expect := func(when string, bound ...string) {
					t.Helper()
					for at, rules := range contents(t, n.tools, proxier.IPv4) {
						_, chain, _ := strings.Cut(at, " ")
						if slices.Contains(bound, chain) {
							if len(rules) > 0 {
								t.Errorf("%s: %s has rules %q", when, at, rules)
							}
						} else if isOwn(chain) || strings.HasPrefix(chain, "KUBE-XLB-") {
							t.Errorf("%s: %s is there", when, at)
						}
					}
					if list, wrong := entries(t, n.tools, proxier.IPv4); len(list) != 2 || len(wrong) > 0 { // to NodePorts
						t.Errorf("%s: entries %q, wrong %q", when, list, wrong)
					}
					n.tools.take()
					n.syncAll()
					if wrote := n.tools.take(); len(wrote) > 0 && tools != "hidden" {
						t.Errorf("%s: written again:\n%s", when, wrote[0])
					}
					if len(n.told) > 0 {
						t.Errorf("%s: told %+v", when, n.told)
					}
				}
				start()
				n.serve(0, 20, 2)
				n.sync()
				n.restore(proxier.IPv4, "*nat\n:ADMIN - [0:0]\n:KUBE-XLB-AAAAAAAAAAAAAAAA - [0:0]\n-A ADMIN -j "+set+"\n-A ADMIN -p tcp -j "+external+"\n"+
					"-A KUBE-XLB-AAAAAAAAAAAAAAAA -j "+endpoint+"\nCOMMIT\n")
				start()
				for i := range 20 {
					n.OnServiceDelete(service(i))
				}
				n.sync()
				n.syncAll() // finds the chain of upstream's
				expect("led to", set, external)
				n.restore(proxier.IPv4, "*nat\n-F ADMIN\n-A ADMIN -j "+set+"\nCOMMIT\n")
				n.syncAll()
				expect("one led to", set)
				n.restore(proxier.IPv4, "*nat\n-F ADMIN\nCOMMIT\n")
				n.syncAll()
				expect("no longer led to")
			})
		}
	}
}

// TestCleanup: nothing of ours stays, neither a chain nor a jump, and everything of
// others; twice does no harm, and neither does it where nothing was.
func TestCleanup(t *testing.T) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			n := newLabNode(t, v)
			n.open(testFacts, proxier.Policy{NodePorts: proxier.NodePortSelector{}})
			var before [proxier.Families]string
			for f := range proxier.Families {
				n.restore(f, foreign)
				before[f] = saved(t, n.tools, f)
			}
			clean := func(left string) {
				t.Helper()
				if err := n.tier.Cleanup(t.Context()); err != nil {
					t.Fatal(err)
				}
				for f := range proxier.Families {
					text := saved(t, n.tools, f)
					if !strings.Contains(text, left) {
						t.Errorf("%s: not left behind:\n%s", f, left)
					}
					if diff := cmp.Diff(before[f], strings.Replace(text, left, "", 1)); diff != "" {
						t.Errorf("%s (-want +got):\n%s", f, diff)
					}
				}
			}
			clean("")
			n.serve(0, 160, 1)
			n.sync()
			n.syncAll()
			if text := saved(t, n.tools, proxier.IPv4); !strings.Contains(text, "KUBE-SVC-SLOT-05") {
				t.Error("hubs are no trees")
			}
			// For connections that may have begun; the next time there are none.
			clean("filter " + drainChain + "\n  " + asksConntrack + "\n")
			clean("")
			n.tools.take()
			clean("")
			if wrote := n.tools.take(); len(wrote) > 0 {
				t.Errorf("written again:\n%s", wrote[0])
			}
		})
	}
}
