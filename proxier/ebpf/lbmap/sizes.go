// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"cmp"
	"fmt"
)

// Sizes are the capacities of the maps; zero is the default. A change takes
// effect with the next start, which moves to new maps without a gap.
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
	// Ranges: source ranges of load balancer IPs.
	Ranges uint32
	// Locals: addresses of this node's devices.
	Locals uint32
	// Affinity: remembered clients; LRU-evicted.
	Affinity uint32
	// UDPPeers: further service addresses of unconnected UDP sockets.
	UDPPeers uint32
	// TCPFlows and UDPFlows: established connections from outside. These are never
	// evicted.
	TCPFlows, UDPFlows uint32
	// YoungFlows: connections that are not established yet, or are closed; new
	// ones evict the oldest.
	YoungFlows uint32
	// OptOuts: network namespaces whose sockets are left alone.
	OptOuts uint32
}

// DefaultSizes fit the largest clusters that upstream is tested with (10,000 Services,
// 150,000 pods) with room to spare, in 141 MiB of kernel memory; 82 MiB of that are flows.
func DefaultSizes() Sizes {
	return Sizes{
		Frontends:  1 << 17,
		Services:   1 << 16,
		Backends:   1 << 18,
		Slots:      1 << 19,
		Ranges:     1 << 16,
		Locals:     1 << 12,
		Affinity:   1 << 16,
		UDPPeers:   1 << 16,
		TCPFlows:   1 << 16,
		UDPFlows:   1 << 15,
		YoungFlows: 1 << 15,
		OptOuts:    1 << 12,
	}
}

// WithDefaults fills in what was left out.
func (s Sizes) WithDefaults() Sizes {
	d := DefaultSizes()
	return Sizes{
		Frontends: cmp.Or(s.Frontends, d.Frontends), Services: cmp.Or(s.Services, d.Services),
		Backends: cmp.Or(s.Backends, d.Backends), Slots: cmp.Or(s.Slots, d.Slots),
		Ranges: cmp.Or(s.Ranges, d.Ranges), Locals: cmp.Or(s.Locals, d.Locals),
		Affinity: cmp.Or(s.Affinity, d.Affinity), UDPPeers: cmp.Or(s.UDPPeers, d.UDPPeers),
		TCPFlows: cmp.Or(s.TCPFlows, d.TCPFlows), UDPFlows: cmp.Or(s.UDPFlows, d.UDPFlows), YoungFlows: cmp.Or(s.YoungFlows, d.YoungFlows),
		OptOuts: cmp.Or(s.OptOuts, d.OptOuts),
	}
}

// Validate names the first size that is out of range.
func (s Sizes) Validate() error {
	// The kernel refuses arrays of 4 GiB and more; the mapping's length and
	// the ids are 32 bit.
	const most = 1 << 24
	for _, f := range []struct {
		name  string
		value uint32
	}{
		{"frontends", s.Frontends}, {"services", s.Services}, {"backends", s.Backends}, {"slots", s.Slots},
		{"ranges", s.Ranges}, {"locals", s.Locals},
		{"affinity", s.Affinity}, {"udp-peers", s.UDPPeers},
		{"tcp-flows", s.TCPFlows}, {"udp-flows", s.UDPFlows}, {"young-flows", s.YoungFlows}, {"opt-outs", s.OptOuts},
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
