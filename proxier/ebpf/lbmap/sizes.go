// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"cmp"
	"fmt"
)

// Sizes are the capacities of the maps; zero is the default.
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
// 150,000 pods) with room to spare, in 139 MiB of kernel memory; 82 MiB of that are flows.
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

// Size is one of the capacities.
type Size struct {
	Name string // as in the flag --ebpf-max-NAME
	At   *uint32
}

// All are all capacities, for reading and writing.
func (s *Sizes) All() [12]Size {
	return [...]Size{
		{"frontends", &s.Frontends}, {"services", &s.Services}, {"backends", &s.Backends}, {"slots", &s.Slots},
		{"ranges", &s.Ranges}, {"locals", &s.Locals}, {"affinity", &s.Affinity}, {"udp-peers", &s.UDPPeers},
		{"tcp-flows", &s.TCPFlows}, {"udp-flows", &s.UDPFlows}, {"young-flows", &s.YoungFlows}, {"opt-outs", &s.OptOuts},
	}
}

// WithDefaults fills in what was left out.
func (s Sizes) WithDefaults() Sizes { return s.Or(DefaultSizes()) }

// Or fills in what was left out from others.
func (s Sizes) Or(others Sizes) Sizes {
	from := others.All()
	for i, size := range s.All() {
		*size.At = cmp.Or(*size.At, *from[i].At)
	}
	s.Slots += s.Slots % SlotsPerElement
	return s
}

// Validate names the first size that is out of range.
func (s Sizes) Validate() error {
	// The kernel refuses arrays of 4 GiB and more; the mapping's length is 32 bit,
	// and ids in slots are 24.
	const most = 1 << 24
	for _, size := range s.All() {
		if *size.At < 2 || *size.At > most {
			return fmt.Errorf("map size %s: %d is outside 2–%d", size.Name, *size.At, most)
		}
	}
	return nil
}

// Usage is how full a table is.
type Usage struct {
	Used int `json:"used"`
	Max  int `json:"max"`
}

// Capacity is how full a table is that may grow.
type Capacity struct {
	Usage
	Limit int // that Max may become
}

// TableSizes are the numbers of elements of those maps that are not of flows, by name.
func TableSizes(s Sizes) map[string]uint32 {
	return map[string]uint32{
		"tdm_frontend": s.Frontends, "tdm_set": s.Services * SetsPerService, "tdm_slot": s.Slots / SlotsPerElement,
		"tdm_backend": s.Backends, "tdm_service": s.Services, "tdm_svc_stats": s.Services, "tdm_be_stats": s.Backends,
		"tdm_range": s.Ranges, "tdm_local": s.Locals, "tdm_affinity": s.Affinity, "tdm_udp_peer": s.UDPPeers, "tdm_optout": s.OptOuts,
	}
}

// SizesOf are the sizes of these maps; zero where one is missing. Those of flows are left out.
func SizesOf(maps Maps) (s Sizes) {
	for name, size := range map[string]*uint32{
		"tdm_frontend": &s.Frontends, "tdm_slot": &s.Slots, "tdm_backend": &s.Backends, "tdm_service": &s.Services,
		"tdm_range": &s.Ranges, "tdm_local": &s.Locals, "tdm_affinity": &s.Affinity, "tdm_udp_peer": &s.UDPPeers, "tdm_optout": &s.OptOuts,
	} {
		if m := maps[name]; m != nil {
			*size = m.MaxEntries()
		}
	}
	s.Slots *= SlotsPerElement
	return s
}
