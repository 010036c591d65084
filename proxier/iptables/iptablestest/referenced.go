// SPDX-License-Identifier: Apache-2.0

package iptablestest

import (
	"slices"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
)

// ReferencedChains checks chains that foreign rules reference, and that therefore cannot be deleted:
// they are empty while these rules exist, and are deleted afterwards. Neither such chains nor a
// restart block other deletions or writes. start starts a process; with restart, another process
// continues halfway. hidden means that the tools do not show the foreign rules, so that each full
// sync tries to delete the chains again.
func ReferencedChains(t *testing.T, n *Node, start func(), restart, hidden bool) {
	t.Helper()
	name := proxier.ServicePortName{Port: "p", Protocol: proxier.TCP}
	name.Namespace, name.Name = "shop", "s3"
	set, external := ChainName("KUBE-SVC-", name, ""), ChainName("KUBE-EXT-", name, "")
	endpoint := ChainName("KUBE-SEP-", name, Pod(6)+":8080")
	expect := func(when string, referenced ...string) {
		t.Helper()
		for at, rules := range Contents(t, n.Tools, proxier.IPv4) {
			_, chain, _ := strings.Cut(at, " ")
			if slices.Contains(referenced, chain) {
				if len(rules) > 0 {
					t.Errorf("%s: %s has rules %q", when, at, rules)
				}
			} else if OfServicePort(chain) || strings.HasPrefix(chain, "KUBE-XLB-") {
				t.Errorf("%s: %s exists", when, at)
			}
		}
		if list, wrong := Entries(t, n.Tools, proxier.IPv4); len(list) != 3 || len(wrong) > 0 { // for NodePorts, and to external addresses
			t.Errorf("%s: entries %q, wrong %q", when, list, wrong)
		}
		n.Tools.Take()
		n.MustFullSync()
		if wrote := n.Tools.Take(); len(wrote) > 0 && !hidden {
			t.Errorf("%s: written again:\n%s", when, wrote[0])
		}
		if len(n.Problems) > 0 {
			t.Errorf("%s: reported %+v", when, n.Problems)
		}
	}
	start()
	n.Serve(0, 20, 2)
	n.MustSync()
	n.Restore(proxier.IPv4, "*nat\n:ADMIN - [0:0]\n:KUBE-XLB-AAAAAAAAAAAAAAAA - [0:0]\n-A ADMIN -j "+set+"\n-A ADMIN -p tcp -j "+external+"\n"+
		"-A KUBE-XLB-AAAAAAAAAAAAAAAA -j "+endpoint+"\nCOMMIT\n")
	if restart {
		start()
	}
	for i := range 20 {
		n.OnServiceDelete(Service(i))
	}
	n.MustSync()
	n.MustFullSync() // finds the leftover chain of upstream
	expect("two chains referenced", set, external)
	n.Restore(proxier.IPv4, "*nat\n-F ADMIN\n-A ADMIN -j "+set+"\nCOMMIT\n")
	n.MustFullSync()
	expect("one chain referenced", set)
	n.Restore(proxier.IPv4, "*nat\n-F ADMIN\nCOMMIT\n")
	n.MustFullSync()
	expect("no chain referenced")
}
