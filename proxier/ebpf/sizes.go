// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
)

const setsPerService = uint32(proxier.Sets)

// Sizes are the capacities of the maps. A change of any takes effect with the
// next start, which moves to new maps without a gap.
type Sizes struct {
	// Frontends: one for each address, port and protocol clients can dial.
	Frontends uint32
	// Services: service ports.
	Services uint32
	// Backends: one for each endpoint a service port uses on this node.
	Backends uint32
	// Slots: places in backend sets; a set takes its size rounded up to a
	// power of two, twice while it changes.
	Slots uint32
	// Affinity: clients that are remembered; the longest unseen go first.
	Affinity uint32
	// UDPPeers: further service addresses of unconnected UDP sockets.
	UDPPeers uint32
	// OptOuts: network namespaces whose sockets are left alone.
	OptOuts uint32
}

// DefaultSizes fit what clusters are tested up to upstream (10,000 Services,
// 150,000 Pods) with room to spare, in 54 MiB of kernel memory.
func DefaultSizes() Sizes {
	return Sizes{
		Frontends: 1 << 17,
		Services:  1 << 16,
		Backends:  1 << 18,
		Slots:     1 << 19,
		Affinity:  1 << 16,
		UDPPeers:  1 << 16,
		OptOuts:   1 << 12,
	}
}

// Validate names the first size that cannot be.
func (s Sizes) Validate() error {
	// The kernel refuses arrays of 4 GiB and more; the mapping's length and
	// the ids are 32 bit.
	const most = 1 << 24
	for _, f := range []struct {
		name  string
		value uint32
	}{
		{"frontends", s.Frontends}, {"services", s.Services}, {"backends", s.Backends}, {"slots", s.Slots},
		{"affinity", s.Affinity}, {"udp-peers", s.UDPPeers}, {"opt-outs", s.OptOuts},
	} {
		if f.value < 2 || f.value > most {
			return fmt.Errorf("map size %s: %d is outside 2–%d", f.name, f.value, most)
		}
	}
	return nil
}

// Usage is how full a table is.
type Usage struct {
	Used int `json:"used"`
	Max  int `json:"max"`
}

// CapacityError says that something does not fit into a table.
type CapacityError struct {
	Table string // frontends, services, backends or slots
	Need  int
	Usage
}

func (e *CapacityError) Error() string {
	return fmt.Sprintf("needs %d more %s, and %d of %d are in use; raise --ebpf-max-%s", e.Need, e.Table, e.Used, e.Max, e.Table)
}
