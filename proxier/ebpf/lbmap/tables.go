// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Tables are the maps that hold the decisions. The arrays are the maps' own
// memory: a store is what a program reads next.
type Tables struct {
	Frontends    FrontendMap
	Ranges       SmallMap[RangeKey, uint8]
	Locals       SmallMap[[4]uint32, uint32]
	VIPs         SmallMap[[4]uint32, uint8]
	Targets      SmallMap[TargetKey, uint64]
	Ports        []uint64 // see PortBit; nil without packet programs
	Meta         *Meta
	Nodes        []Node
	Sets         []uint64
	Slots        []uint32
	Backends     []Backend
	Services     []Service
	ServiceStats []ServiceStats
	BackendStats []uint64

	mapped [][]byte
}

// FlatSlots are the slots of the map's elements.
func FlatSlots(elements []Slots) []uint32 {
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(elements))), SlotsPerElement*len(elements))
}

// Unmap unmaps the memory; the maps stay in the kernel. Any later access crashes.
func (t *Tables) Unmap() {
	for _, b := range t.mapped {
		_ = unix.Munmap(b) // fails only for what was never mapped
	}
	*t = Tables{}
}

// Memory views the memory of an mmap-able array as Go values. The bytes are
// for unmapping it.
func Memory[T any](m *ciliumebpf.Map) ([]T, []byte, error) {
	var element T
	size := unsafe.Sizeof(element)
	if size%8 != 0 {
		return nil, nil, fmt.Errorf("elements of %d bytes: the kernel rounds them up to 8", size)
	}
	length := int(m.MaxEntries()) * int(size)
	page := os.Getpagesize()
	b, err := unix.Mmap(m.FD(), 0, (length+page-1)&^(page-1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("map the memory of %s: %w", m, err)
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), m.MaxEntries()), b, nil
}

// view maps the memory of a map until Unmap.
func view[T any](t *Tables, to *[]T, from *ciliumebpf.Map) error {
	list, b, err := Memory[T](from)
	if err != nil {
		return err
	}
	*to = list
	t.mapped = append(t.mapped, b)
	return nil
}

// OpenTables maps the maps of the programs.
func OpenTables(m Maps) (*Tables, error) {
	t := &Tables{
		Frontends: NewFrontendMap(m["tdm_frontend"]),
		Ranges:    KernelMap[RangeKey, uint8]{m["tdm_range"]},
		Locals:    KernelMap[[4]uint32, uint32]{m["tdm_local"]},
		VIPs:      KernelMap[[4]uint32, uint8]{m["tdm_vip"]},
		Targets:   KernelMap[TargetKey, uint64]{m["tdm_target"]},
	}
	var meta []Meta
	var slots []Slots
	err := errors.Join(
		view(t, &meta, m["tdm_meta"]),
		view(t, &t.Nodes, m["tdm_node"]),
		view(t, &t.Sets, m["tdm_set"]),
		view(t, &slots, m["tdm_slot"]),
		view(t, &t.Backends, m["tdm_backend"]),
		view(t, &t.Services, m["tdm_service"]),
		view(t, &t.ServiceStats, m["tdm_svc_stats"]),
		view(t, &t.BackendStats, m["tdm_be_stats"]),
	)
	if ports := m["tdm_port"]; ports != nil {
		err = errors.Join(err, view(t, &t.Ports, ports))
	}
	if err != nil {
		t.Unmap()
		return nil, err
	}
	t.Meta, t.Slots = &meta[0], FlatSlots(slots)
	return t, nil
}
