// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// tables are the maps that hold the decisions. The arrays are the maps' own
// memory: a store is what a program reads next.
type tables struct {
	frontends    frontendMap
	ranges       smallMap[rangeKey, uint8]
	locals       smallMap[[4]uint32, uint32]
	vips         smallMap[[4]uint32, uint8]
	meta         *metaEntry
	nodes        []nodeEntry
	sets         []uint64
	slots        []uint64
	backends     []backendEntry
	services     []serviceEntry
	serviceStats []serviceStats
	backendStats []uint64

	mapped [][]byte
}

// unmap gives the memory back; the maps themselves live on in the kernel. Any
// later access is a crash.
func (t *tables) unmap() {
	for _, b := range t.mapped {
		_ = unix.Munmap(b) // fails only for what was never mapped
	}
	*t = tables{}
}

// mapping views the memory of an mmap-able array as Go values. The bytes are
// for unmapping it.
func mapping[T any](m *ciliumebpf.Map) ([]T, []byte, error) {
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

// view appends the mapping of from to those of t.
func view[T any](t *tables, to *[]T, from *ciliumebpf.Map) error {
	list, b, err := mapping[T](from)
	if err != nil {
		return err
	}
	*to = list
	t.mapped = append(t.mapped, b)
	return nil
}

// openTables maps the maps of the programs.
func openTables(m Maps) (*tables, error) {
	t := &tables{
		frontends: newKernelFrontends(m["tdm_frontend"]),
		ranges:    kernelMap[rangeKey, uint8]{m["tdm_range"]},
		locals:    kernelMap[[4]uint32, uint32]{m["tdm_local"]},
		vips:      kernelMap[[4]uint32, uint8]{m["tdm_vip"]},
	}
	var meta []metaEntry
	err := errors.Join(
		view(t, &meta, m["tdm_meta"]),
		view(t, &t.nodes, m["tdm_node"]),
		view(t, &t.sets, m["tdm_set"]),
		view(t, &t.slots, m["tdm_slot"]),
		view(t, &t.backends, m["tdm_backend"]),
		view(t, &t.services, m["tdm_service"]),
		view(t, &t.serviceStats, m["tdm_svc_stats"]),
		view(t, &t.backendStats, m["tdm_be_stats"]),
	)
	if err != nil {
		t.unmap()
		return nil, err
	}
	t.meta = &meta[0]
	return t, nil
}
