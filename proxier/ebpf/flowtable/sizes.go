// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"math/bits"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// flowRecords is the length of the map of flows: those of all kinds. Id 0 is
// none.
func flowRecords(s lbmap.Sizes) uint32 {
	return s.TCPFlows + s.UDPFlows + PowerOfTwo(s.YoungFlows) + lbmap.MaxClosed + 1
}

// MapSizes are the sizes of the maps of flows, by name.
func MapSizes(s lbmap.Sizes) map[string]uint32 {
	return map[string]uint32{
		"tdm_flow": flowRecords(s), "tdm_flow_key": 2 * flowRecords(s),
		"tdm_flow_young": PowerOfTwo(s.YoungFlows) + lbmap.MaxClosed,
	}
}

// PowerOfTwo is the smallest one that is not less.
func PowerOfTwo(n uint32) uint32 {
	if n <= 1 {
		return 1
	}
	return 1 << bits.Len32(n-1)
}

// MapNames are the maps that hold flows.
var MapNames = []string{"tdm_flow", "tdm_flow_key", "tdm_flow_young", "tdm_flow_count"}
