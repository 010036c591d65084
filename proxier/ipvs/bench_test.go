// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"fmt"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
)

// BenchmarkChange is one endpoint that comes and goes, without what the kernel does.
func BenchmarkChange(b *testing.B) {
	for _, services := range []int{100, 10_000} {
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) {
			k := newFakeKernel()
			tier := process(k, Options{}, newFakeRules(k))
			all := proxier.Update{Full: true, NodeRules: nodeRules}
			for i := range services {
				all.Changes = append(all.Changes, proxier.PortChange{New: clusterIPOf(i, 2)})
			}
			if err := tier.Sync(b.Context(), all); err != nil {
				b.Fatal(err)
			}
			changes := [2]proxier.PortChange{{New: clusterIPOf(1, 3)}, {New: clusterIPOf(1, 2)}}
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				if err := tier.Sync(b.Context(), proxier.Update{Changes: changes[n%2 : n%2+1]}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
