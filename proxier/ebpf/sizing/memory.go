// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"fmt"
	"os"
	"sync"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// What the kernel needs for an entry of a hash map besides key and value, and for a bucket (struct htab_elem and struct bucket of
// kernel/bpf/hashtab.c).
const (
	hashEntry  = 48
	hashBucket = 16
)

// mapSpec is what the memory of a map depends on, besides its size. The specification itself would keep the types and instructions
// of all programs in memory.
type mapSpec struct {
	kind              ciliumebpf.MapType
	key, value, flags uint32
	entries           uint32
}

// maps are those of all programs that have a size, by name.
var maps = sync.OnceValue(func() map[string]mapSpec {
	all := map[string]mapSpec{}
	for _, load := range []func() (*ciliumebpf.CollectionSpec, error){lbmap.SocketSpec, lbmap.PacketSpec} {
		spec, err := load()
		if err != nil {
			panic(fmt.Sprintf("programs in this binary: %v", err)) // a test loads them
		}
		for name, m := range spec.Maps {
			if lbmap.HasOwnName(name) {
				all[name] = mapSpec{m.Type, m.KeySize, m.ValueSize, m.Flags, m.MaxEntries}
			}
		}
	}
	return all
})

// Memory estimates how much memory all maps of these sizes take, in bytes, without the entries of those that take memory as they
// are used.
func Memory(s lbmap.Sizes) (sum uint64) {
	sizes := lbmap.TableSizes(s)
	for name, size := range flowtable.MapSizes(s) {
		sizes[name] = size
	}
	cpus, err := ciliumebpf.PossibleCPU()
	if err != nil {
		cpus = 1
	}
	for name, spec := range maps() {
		n := uint64(spec.entries)
		if size, ok := sizes[name]; ok {
			n = uint64(size)
		}
		sum += memory(spec, n, uint64(cpus))
	}
	return sum
}

func memory(spec mapSpec, n, cpus uint64) uint64 {
	key, value := (uint64(spec.key)+7)&^7, (uint64(spec.value)+7)&^7
	const noPrealloc = 1 << 0 // BPF_F_NO_PREALLOC
	switch spec.kind {
	case ciliumebpf.Array:
		page := uint64(os.Getpagesize())
		return (n*value + page - 1) &^ (page - 1)
	case ciliumebpf.PerCPUArray:
		return n * value * cpus
	case ciliumebpf.Hash, ciliumebpf.LRUHash:
		buckets := uint64(flowtable.PowerOfTwo(uint32(n))) * hashBucket
		if spec.flags&noPrealloc != 0 {
			return buckets
		}
		return n*(hashEntry+key+value) + buckets
	}
	return 0 // as used
}
