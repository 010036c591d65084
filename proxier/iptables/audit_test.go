// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
)

// usedTools simulate tools that tell the uses of chains.
type usedTools struct {
	*iptablestest.Simulated
	uses string
}

func (t *usedTools) Uses(proxier.Family, ...xtables.ChainName) (string, bool, error) {
	return t.uses, true, nil
}

// TestAuditIsDue: rules are compared with the kernel only after others changed some. For a while
// after the last time they are not, unless chains are certain to lack rules; and not any more
// after many repairs.
func TestAuditIsDue(t *testing.T) {
	tools := &usedTools{newSimulated(), "as written"}
	tools.HasGeneration = true
	n := unstartedNode(t, tools)
	tier := newSimulatedTier(n.options())
	n.Start(tier, iptablestest.Facts, proxier.Policy{})
	n.Serve(0, 2, 2)
	n.MustSync()
	n.MustFullSync()
	f, now := tier.families[proxier.IPv4], time.Now()
	expect := func(when string, want bool) {
		t.Helper()
		if got := f.isDue(now); got != want {
			t.Errorf("%s: %v, want %v", when, got, want)
		}
	}
	expect("nothing changed", false)
	n.Serve(2, 1, 2)
	n.MustSync()
	expect("this process changed something", false)
	n.Restore(proxier.IPv4, "*filter\n-A FORWARD -j ACCEPT\nCOMMIT\n")
	expect("another program changed something", true)
	f.auditAfter = now.Add(time.Hour)
	expect("soon after the last audit", false)
	tools.uses = "one rule less"
	expect("soon after it, but rules are missing", true)
	for range maxRepairs {
		f.repairs = append(f.repairs, now)
	}
	expect("after many repairs", false)
	now = now.Add(repairsMemory)
	expect("long after them", true)
}
