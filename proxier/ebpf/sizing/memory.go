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

// maps are those of all programs that have a size, by name.
var maps = sync.OnceValue(func() map[string]*ciliumebpf.MapSpec {
	all := map[string]*ciliumebpf.MapSpec{}
	for _, load := range []func() (*ciliumebpf.CollectionSpec, error){lbmap.SocketSpec, lbmap.PacketSpec} {
		spec, err := load()
		if err != nil {
			panic(fmt.Sprintf("programs in this binary: %v", err)) // a test loads them
		}
		for name, m := range spec.Maps {
			if lbmap.HasOwnName(name) {
				all[name] = m
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
		n := uint64(spec.MaxEntries)
		if size, ok := sizes[name]; ok {
			n = uint64(size)
		}
		sum += memory(spec, n, uint64(cpus))
	}
	return sum
}

func memory(spec *ciliumebpf.MapSpec, n, cpus uint64) uint64 {
	key, value := (uint64(spec.KeySize)+7)&^7, (uint64(spec.ValueSize)+7)&^7
	const noPrealloc = 1 << 0 // BPF_F_NO_PREALLOC
	switch spec.Type {
	case ciliumebpf.Array:
		page := uint64(os.Getpagesize())
		return (n*value + page - 1) &^ (page - 1)
	case ciliumebpf.PerCPUArray:
		return n * value * cpus
	case ciliumebpf.Hash, ciliumebpf.LRUHash:
		buckets := uint64(flowtable.PowerOfTwo(uint32(n))) * hashBucket
		if spec.Flags&noPrealloc != 0 {
			return buckets
		}
		return n*(hashEntry+key+value) + buckets
	}
	return 0 // as used
}
