// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestRepairWithoutSync: rules that another program deletes, flushes or changes are written again within
// seconds, without a sync, and it is told which. A firewall that reloads its own rules causes no
// repair.
func TestRepairWithoutSync(t *testing.T) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			n, tools := newNode(t, v)
			repairs := make(chan proxier.Repair, 64)
			n.repaired = func(r proxier.Repair) { repairs <- r }
			tier := n.open(iptablestest.Facts, proxier.Policy{})
			for f := range proxier.Families {
				n.Restore(f, foreign)
			}
			n.Serve(0, 3, 2)
			n.MustSync()
			n.MustFullSync()
			var want [proxier.Families]string
			for f := range proxier.Families {
				want[f] = saved(t, n.Tools, f)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { defer close(done); tier.Run(ctx) }()
			defer func() { cancel(); <-done }()

			for _, step := range []struct {
				name, input, says string
			}{
				{"a flushed built-in chain", "*nat\n-F OUTPUT\nCOMMIT\n", "nat OUTPUT"},
				{"a flushed chain", "*nat\n-F KUBE-SERVICES\nCOMMIT\n", "nat KUBE-SERVICES"},
				{"a deleted table", "*filter\n-F\n-X\nCOMMIT\n", "filter KUBE-FORWARD"},
			} {
				for f := range proxier.Families {
					start := time.Now()
					n.Restore(f, step.input)
					if strings.Contains(step.input, "-X") {
						n.Restore(f, foreign[strings.Index(foreign, "*filter"):strings.Index(foreign, "*nat")])
					}
					select {
					case r := <-repairs:
						if r.State != proxier.RepairedRules || !strings.HasPrefix(r.What, f.String()+" rules") || !strings.Contains(r.What, step.says) {
							t.Errorf("%s: %+v", step.name, r)
						}
						if took := time.Since(start); took > 5*time.Second*lab.Slower() {
							t.Errorf("%s: the repair took %v", step.name, took)
						}
						t.Logf("%s, %s: %s", step.name, f, r.What)
					case <-time.After(20 * time.Second * lab.Slower()):
						t.Fatalf("%s, %s: no repair", step.name, f)
					}
					if diff := cmp.Diff(sortedLines(want[f]), sortedLines(saved(t, n.Tools, f))); diff != "" {
						t.Errorf("%s, %s (-want +got):\n%s", step.name, f, diff)
					}
				}
			}

			// A firewall that reloads is read, and nothing is written.
			tools.reads = 0
			n.Tools.Take()
			n.Restore(proxier.IPv4, "*filter\n-D INPUT -p tcp -m tcp --dport 22 -j ACCEPT\nCOMMIT\n*filter\n-A INPUT -p tcp -m tcp --dport 23 -j ACCEPT\n-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\nCOMMIT\n")
			wrote := len(n.Tools.Take()) // by this test
			for deadline := time.Now().Add(20 * time.Second); tools.readsNow() == 0; time.Sleep(10 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatal("the foreign change is not noticed")
				}
			}
			cancel()
			<-done
			if more := n.Tools.Take(); len(more) > 0 || len(repairs) > 0 {
				t.Errorf("%d restores after %d of the firewall's, %d repairs", len(more), wrote, len(repairs))
			}
		})
	}
}

// sortedLines ignores the order in which foreign rules and the proxy's stand.
func sortedLines(text string) []string {
	lines := strings.Split(text, "\n")
	slices.Sort(lines)
	return lines
}
