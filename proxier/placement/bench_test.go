// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/synthetic"
)

// quick is a tier that costs nothing.
type quick struct{}

func (quick) Sync(context.Context, proxier.Update) error          { return nil }
func (quick) Cleanup(context.Context) error                       { return nil }
func (quick) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }
func (quick) Unplaced() map[uint32]error                          { return nil }

// BenchmarkSync is what the placement adds to a full sync, and to one change.
func BenchmarkSync(b *testing.B) {
	for _, services := range []int{100, 10000} {
		tracker, table := proxier.NewChangeTracker("node1", time.Time{}, nil), proxier.NewTable(proxier.Facts{}, proxier.Policy{})
		for i := range services {
			tracker.UpdateService(synthetic.Service(i))
		}
		table.Apply(tracker.Take())
		all := proxier.Update{Full: true, NodeRules: &proxier.NodeRules{}, Changes: table.All()}
		tier := New(quick{}, quick{}, false)
		if err := tier.Sync(b.Context(), all); err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("full/services=%d", services), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				_ = tier.Sync(b.Context(), all)
			}
		})
		b.Run(fmt.Sprintf("change/services=%d", services), func(b *testing.B) {
			b.ReportAllocs()
			one := [2]proxier.Decision{*all.Changes[0].New, *all.Changes[0].New}
			for n := 0; b.Loop(); n++ {
				_ = tier.Sync(b.Context(), proxier.Update{Changes: []proxier.PortChange{{New: &one[n%2]}}})
			}
		})
		tier.Wait()
	}
}
