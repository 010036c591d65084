// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"unsafe"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// home is the place where the search for a key begins, as home_of() of bpf/flow_entry.h
// computes it.
func home(key *lbmap.FlowKey, seed uint64, homes uint32) uint32 {
	const words = unsafe.Sizeof(*key) / 8
	// Keys in maps are aligned to 8 bytes, this one may not be.
	var own struct {
		_   [0]uint64
		key lbmap.FlowKey
	}
	own.key = *key
	hash := seed
	for _, word := range (*[words]uint64)(unsafe.Pointer(&own.key)) {
		hash = (hash ^ word) * lbmap.CheckFactor
		hash ^= hash >> 32
	}
	return uint32((hash & 0xffffffff) * uint64(homes) >> 32)
}
