// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/sizing"
)

const (
	// startShare is the share of the machine's memory that maps begin with at most, and growShare the one up to which they grow,
	// as divisors; startMemory is what they begin with at most, in bytes.
	startShare, growShare = 64, 8
	startMemory           = 24 << 20
)

// mapGrowth returns the sizes that maps begin with which may become that large, and the memory up to which they grow: as
// configured, or a share of that of the machine, in bytes.
func mapGrowth(most lbmap.Sizes, configured string, memory uint64) (start lbmap.Sizes, limit uint64, err error) {
	if limit, err = config.ParseMemory(configured); err != nil {
		return start, 0, err
	}
	limit = cmp.Or(limit, memory/growShare)
	cpus, err := ciliumebpf.PossibleCPU()
	if err != nil {
		cpus = 1 // LRU maps evict earlier
	}
	return sizing.Start(most, min(startMemory, memory/startShare, limit), cpus, sizing.Memory), limit, nil
}
