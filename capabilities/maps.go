// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"context"
	"fmt"
	"os"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// newMap creates spec; the caller closes what it gets.
func newMap(spec *ciliumebpf.MapSpec) (*ciliumebpf.Map, error) {
	spec.Name = probeName
	return ciliumebpf.NewMap(spec)
}

// tryMap creates spec and drops it at once.
func tryMap(spec *ciliumebpf.MapSpec) error {
	m, err := newMap(spec)
	if err != nil {
		return err
	}
	return m.Close()
}

// probeMmapArray goes as far as the mapping: a sandbox may allow the map and
// refuse that.
func probeMmapArray(context.Context, *host, string) outcome {
	m, err := newMap(&ciliumebpf.MapSpec{Type: ciliumebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE})
	if err != nil {
		return fromKernel(err, capBPF)
	}
	defer m.Close()
	memory, err := unix.Mmap(m.FD(), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fromKernel(fmt.Errorf("map the array into memory: %w", err), capBPF)
	}
	if err := unix.Munmap(memory); err != nil {
		return inconclusive(fmt.Errorf("unmap the array: %w", err))
	}
	return yes("")
}

func probeBatch(context.Context, *host, string) outcome {
	m, err := newMap(&ciliumebpf.MapSpec{Type: ciliumebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 2})
	if err != nil {
		// Not about batches: without a map the question cannot be asked.
		o := fromKernel(err, capBPF)
		o.state = Inconclusive
		return o
	}
	defer m.Close()
	_, err = m.BatchUpdate([]uint32{1, 2}, []uint32{1, 2}, nil)
	return fromKernel(err, capBPF)
}
