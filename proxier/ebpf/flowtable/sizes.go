// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"math/bits"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// flowRecords is the length of the map of flows: those of all kinds. Id 0 is
// none.
func flowRecords(s lbmap.Sizes) uint32 {
	return s.TCPFlows + s.UDPFlows + PowerOfTwo(s.YoungFlows) + lbmap.MaxClosed + 1
}

// Limit is how many flows fit into maps of these sizes.
func Limit(s lbmap.Sizes) int { return int(flowRecords(s)) - 1 }

// homesPerEntry keeps the places near a home from being all in use: if all flows exist, that is
// so for one home in 50,000.
const homesPerEntry = 2

// flowLists is the number of lists of free ids: one for each CPU that the kernel may have, as far as
// there are so many.
func flowLists() uint32 {
	cpus, err := ciliumebpf.PossibleCPU()
	if err != nil {
		cpus = 1 // all CPUs share a list
	}
	return min(PowerOfTwo(uint32(cpus)), lbmap.MaxFlowLists)
}

// MapSizes are the sizes of the maps of flows, by name.
func MapSizes(s lbmap.Sizes) map[string]uint32 {
	homes := homesPerEntry * 2 * flowRecords(s)
	return map[string]uint32{
		"tdm_flow": flowRecords(s), "tdm_flow_entry": homes + lbmap.FlowNear - 1, "tdm_flow_filter": homes/64 + 1,
		"tdm_flow_young": PowerOfTwo(s.YoungFlows) + lbmap.MaxClosed,
		"tdm_flow_free":  flowLists(),
	}
}

// Memory is what the maps of flows take, in bytes.
func Memory(s lbmap.Sizes) uint64 {
	return uint64(flowRecords(s)) * uint64(unsafe.Sizeof(lbmap.Flow{})+2*homesPerEntry*unsafe.Sizeof(lbmap.FlowEntry{}))
}

// PowerOfTwo is the smallest one that is not less.
func PowerOfTwo(n uint32) uint32 {
	if n <= 1 {
		return 1
	}
	return 1 << bits.Len32(n-1)
}

// MapNames are the maps that hold flows.
var MapNames = []string{"tdm_flow", "tdm_flow_entry", "tdm_flow_filter", "tdm_flow_young", "tdm_flow_count", "tdm_flow_free"}
