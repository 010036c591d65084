// SPDX-License-Identifier: Apache-2.0

package ebpf

import "math/bits"

// flowRecords is the length of the map of flows: those of all kinds. Id 0 is
// none.
func flowRecords(s Sizes) uint32 {
	return s.TCPFlows + s.UDPFlows + powerOfTwo(s.YoungFlows) + MaxClosed + 1
}

// flowMaps are the sizes of the maps of flows, by name.
func flowMaps(s Sizes) map[string]uint32 {
	return map[string]uint32{
		"tdm_flow": flowRecords(s), "tdm_flow_key": 2 * flowRecords(s),
		"tdm_flow_young": powerOfTwo(s.YoungFlows) + MaxClosed,
	}
}

// powerOfTwo is the smallest one that is not less.
func powerOfTwo(n uint32) uint32 {
	if n <= 1 {
		return 1
	}
	return 1 << bits.Len32(n-1)
}

// flowMapNames are the maps that hold flows.
var flowMapNames = []string{"tdm_flow", "tdm_flow_key", "tdm_flow_young", "tdm_flow_count"}
