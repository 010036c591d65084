// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"slices"
	"testing"
)

// TestSNATPool: source ports start at 1024, and exclude NodePorts. Ephemeral ports come last.
func TestSNATPool(t *testing.T) {
	nodePorts := PortRange{30000, 32767}
	for _, test := range []struct {
		name                 string
		nodePorts, ephemeral PortRange
		want                 []PortRange
		usual                int // number of ports that are not ephemeral
	}{
		{"defaults", nodePorts, PortRange{32768, 60999}, []PortRange{{1024, 29999}, {61000, 65535}, {32768, 60999}}, 28976 + 4536},
		{"ephemeral ports around NodePorts", nodePorts, PortRange{20000, 40000}, []PortRange{{1024, 19999}, {40001, 65535}, {20000, 29999}, {32768, 40000}}, 18976 + 25535},
		{"all ports are ephemeral", nodePorts, PortRange{1024, 65535}, []PortRange{{1024, 29999}, {32768, 65535}}, 28976 + 32768},
		{"privileged ports are ephemeral", nodePorts, PortRange{512, 2047}, []PortRange{{2048, 29999}, {32768, 65535}, {1024, 2047}}, 27952 + 32768},
		{"neither is known", PortRange{}, PortRange{}, []PortRange{{1024, 65535}}, 64512},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := NewSNATPool(test.nodePorts, test.ephemeral)
			got := slices.DeleteFunc(slices.Clone(p.ranges[:]), PortRange.none)
			all := 0
			for _, r := range test.want {
				all += r.count()
			}
			if !slices.Equal(got, test.want) || p.usual != test.usual || p.all != all {
				t.Errorf("got %v, %d usual of %d; want %v, %d of %d", got, p.usual, p.all, test.want, test.usual, all)
			}
		})
	}
}
