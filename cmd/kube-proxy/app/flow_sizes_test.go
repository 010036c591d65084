// SPDX-License-Identifier: Apache-2.0

package app

import (
	"testing"

	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

func TestDeriveFlowSizes(t *testing.T) {
	const gib = 1 << 30
	type flows struct{ tcp, udp, young uint32 }
	for _, test := range []struct {
		name   string
		set    flows
		limit  int
		memory uint64
		want   flows
	}{
		{name: "two CPUs with upstream's defaults", limit: 131072, memory: 8 * gib, want: flows{65536, 32768, 32768}},
		{name: "64 CPUs", limit: 1 << 20, memory: 256 * gib, want: flows{524288, 262144, 262144}},
		{name: "64 CPUs, little memory", limit: 1 << 20, memory: 32 * gib, want: flows{262144, 131072, 131072}},
		{name: "a small machine", limit: 131072, memory: gib / 4, want: flows{4096, 2048, 2048}},
		{name: "a limit that is no power of two", limit: 200000, memory: 16 * gib, want: flows{131072, 65536, 65536}},
		{name: "a tiny limit", limit: 100, memory: 16 * gib, want: flows{4096, 2048, 2048}},
		{name: "as configured", set: flows{tcp: 10, young: 20}, limit: 131072, memory: 8 * gib, want: flows{10, 32768, 20}},
		{name: "all of them as configured", set: flows{1 << 24, 3, 2}, limit: 1, want: flows{1 << 24, 3, 2}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := lbmap.Sizes{TCPFlows: test.set.tcp, UDPFlows: test.set.udp, YoungFlows: test.set.young}
			deriveFlowSizes(&s, test.limit, test.memory)
			if got := (flows{s.TCPFlows, s.UDPFlows, s.YoungFlows}); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
			if memory := flowtable.Memory(s); test.set == (flows{}) && s.TCPFlows > leastFlows && memory > test.memory/memoryShare {
				t.Errorf("%d bytes of %d", memory, test.memory)
			}
		})
	}
}
