// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
)

// foreign are rules and chains of other programs, some with names similar to the proxy's.
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

// branch returns the rule of KUBE-SERVICES that jumps to a slot of its tree.
func branch(f proxier.Family, slot byte) string {
	match := [proxier.Families]string{"0.0.0.%d/0.0.0.127", "::%x/::7f"}[f]
	return fmt.Sprintf("-d "+match+" -j KUBE-SVC-SLOT-%02X", slot, slot)
}

// TestUnread: rules are not read again unless another program changed some. Only the nft variant
// can tell.
func TestUnread(t *testing.T) {
	n, tools := newNode(t, xtables.NFT)
	n.open(iptablestest.Facts, proxier.Policy{})
	n.Serve(0, 3, 2)
	reads := func(want int, when string) {
		t.Helper()
		tools.reads = 0
		n.MustFullSync()
		if tools.reads != want {
			t.Errorf("%s: rules were read %d times, want %d", when, tools.reads, want)
		}
	}
	n.MustSync()
	reads(0, "nothing changed")
	n.Serve(3, 1, 2)
	n.MustSync()
	reads(0, "we changed something")
	n.Serve(4, 1, 2)
	reads(0, "we change something with the full sync")
	n.Restore(proxier.IPv6, "*filter\n-A FORWARD -j ACCEPT\nCOMMIT\n")
	reads(2, "another program changed something")
	reads(0, "that was read")
	n.Restore(proxier.IPv4, "*nat\n-F KUBE-SERVICES\nCOMMIT\n")
	n.Serve(5, 1, 2)
	n.MustSync()
	reads(2, "another program changed something before we did")
	if c, err := tools.Save(t.Context(), proxier.IPv4, "nat"); err != nil || len(c.Chain("KUBE-SERVICES").Rules) < 6 {
		t.Errorf("the rules were not restored: %v", err)
	}
	reads(0, "in the end")
}

// TestKernelNothingToDo: rules are written exactly as the tools print them. So a full sync writes
// nothing if nothing changed, and neither does another process.
func TestKernelNothingToDo(t *testing.T) {
	for _, v := range variants {
		for _, size := range []struct {
			name           string
			services, each int
		}{
			{"small", 20, 3},
			{"split", 200, 2},
			{"without comments", 150, 8},
		} {
			t.Run(fmt.Sprintf("%s/%s", v, size.name), func(t *testing.T) {
				n, _ := newNode(t, v)
				facts := iptablestest.Facts
				policy := proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}}
				facts.ServiceCIDRs = iptablestest.ServiceCIDRs
				n.open(facts, policy)
				n.Serve(0, size.services, size.each)
				n.MustSync()
				n.MustFullSync()
				n.Tools.Take()
				n.MustFullSync()
				n.open(facts, policy)
				n.Serve(0, size.services, size.each)
				n.MustSync()
				n.MustFullSync()
				if wrote := n.Tools.Take(); len(wrote) > 0 || len(n.Problems) > 0 {
					t.Errorf("reported %+v, and %d restores, first:\n%.2000s", n.Problems, len(wrote), append(wrote, "nothing")[0])
				}
			})
		}
	}
}

// TestRepair: whatever another program does to the rules, the next full sync restores them exactly,
// and leaves foreign rules alone. If it fails, the next sync repairs them.
func TestRepair(t *testing.T) {
	name := proxier.ServicePortName{Port: "p", Protocol: proxier.TCP}
	name.Namespace, name.Name = "shop", "s3"
	set, external := chainName("KUBE-SVC-", name, ""), chainName("KUBE-EXT-", name, "")
	endpoint := func(f proxier.Family) string {
		return chainName("KUBE-SEP-", name, []string{pod(3) + ":8080", "[fd00:10:244:1::4]:8080"}[f])
	}
	damages := []struct {
		name string
		do   func(f proxier.Family) string
	}{
		{"table flushed", func(proxier.Family) string {
			_, nat, _ := strings.Cut(foreign, "*nat\n")
			return "*nat\n-F\n" + nat // the owners of foreign rules write them again
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
			n, _ := newNode(t, v)
			for f := range proxier.Families {
				n.Restore(f, foreign)
			}
			n.open(iptablestest.Facts, proxier.Policy{})
			for i := range 130 { // shared chains are split in both families
				change := []func(*v1.Service){dualStack(i)}
				if i < 10 {
					change = append(change, kindOf(i)...)
				}
				n.OnServiceAdd(service(i, change...))
				n.OnEndpointSliceAdd(endpoints(i, pod(i)))
				n.OnEndpointSliceAdd(endpoints(i, fmt.Sprintf("fd00:10:244:1::%x", 1+i)))
			}
			n.MustSync()
			n.MustFullSync()
			var before [proxier.Families]string
			for f := range proxier.Families {
				before[f] = saved(t, n.Tools, f)
			}
			for i, damage := range damages {
				for f := range proxier.Families {
					n.Restore(f, damage.do(f))
				}
				if i%2 == 1 { // the first attempt fails
					n.Tools.Before = func(string) error { return errors.New("out of order") }
					if err := n.FullSync(); err == nil {
						t.Errorf("%s: the sync did not fail", damage.name)
					}
					n.Tools.Before = nil
					n.MustSync()
				} else {
					n.MustFullSync()
				}
				for f := range proxier.Families {
					if diff := cmp.Diff(before[f], saved(t, n.Tools, f)); diff != "" {
						t.Fatalf("%s, %s (-want +got):\n%s", damage.name, f, diff)
					}
				}
				n.Tools.Take()
				n.MustFullSync()
				if wrote := n.Tools.Take(); len(wrote) > 0 {
					t.Errorf("%s: written again:\n%s", damage.name, wrote[0])
				}
			}
		})
	}
}

func TestReferencedChains(t *testing.T) {
	for _, v := range variants {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/restart=%v", v, restart), func(t *testing.T) {
				n, _ := newNode(t, v)
				iptablestest.ReferencedChains(t, n.Node, func() { n.open(iptablestest.Facts, proxier.Policy{}) }, restart, false)
			})
		}
	}
}

// TestCleanup: all chains of the proxy and all jumps to them are removed, and everything foreign
// stays. Cleaning up twice, or an empty node, does no harm.
func TestCleanup(t *testing.T) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			n, _ := newNode(t, v)
			n.open(iptablestest.Facts, proxier.Policy{NodePorts: proxier.NodePortSelector{}})
			var before [proxier.Families]string
			for f := range proxier.Families {
				n.Restore(f, foreign)
				before[f] = saved(t, n.Tools, f)
			}
			clean := func(left string) {
				t.Helper()
				if err := n.Tier.Cleanup(t.Context()); err != nil {
					t.Fatal(err)
				}
				for f := range proxier.Families {
					text := saved(t, n.Tools, f)
					if !strings.Contains(text, left) {
						t.Errorf("%s: missing after the cleanup:\n%s", f, left)
					}
					if diff := cmp.Diff(before[f], strings.Replace(text, left, "", 1)); diff != "" {
						t.Errorf("%s (-want +got):\n%s", f, diff)
					}
				}
			}
			setLoose := func(value string) {
				t.Helper()
				if err := n.at.Do(func() error {
					return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_tcp_loose", []byte(value), 0o644)
				}); err != nil {
					t.Fatal(err)
				}
			}
			clean("")
			n.Serve(0, 160, 1)
			n.MustSync()
			n.MustFullSync()
			if text := saved(t, n.Tools, proxier.IPv4); !strings.Contains(text, "KUBE-SVC-SLOT-05") {
				t.Error("shared chains are not split")
			}
			// A rule stays for connections that may be established. The next cleanup removes it.
			const asksConntrack = "filter KUBE-PROXY-DRAIN\n  -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN\n"
			clean(asksConntrack)
			clean("")
			// It stays where conntrack does not pick up established connections.
			setLoose("0")
			clean(asksConntrack)
			clean(asksConntrack)
			// Rules keep conntrack active themselves.
			n.MustFullSync()
			for f := range proxier.Families {
				if text := saved(t, n.Tools, f); strings.Contains(text, "KUBE-PROXY-DRAIN") || !strings.Contains(text, "KUBE-FORWARD") {
					t.Errorf("%s, with rules again:\n%s", f, text)
				}
			}
			clean(asksConntrack)
			setLoose("1")
			clean("")
			n.Tools.Take()
			clean("")
			if wrote := n.Tools.Take(); len(wrote) > 0 {
				t.Errorf("an empty cleanup wrote:\n%s", wrote[0])
			}
		})
	}
}
