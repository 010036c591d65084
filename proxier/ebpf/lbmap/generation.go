// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"fmt"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// GenerationAfter returns the first generation at or after this one that is later than those of all backends in a map of an earlier
// process. On error it returns the same one: the map may have another layout.
func GenerationAfter(backends *ciliumebpf.Map, generation uint32) (uint32, error) {
	if backends == nil {
		return generation, nil
	}
	if size := uint32(unsafe.Sizeof(Backend{})); backends.ValueSize() != size {
		return generation, fmt.Errorf("%s: values of %d bytes, not %d", backends, backends.ValueSize(), size)
	}
	list, b, err := Memory[Backend](backends)
	if err != nil {
		return generation, err
	}
	defer func() { _ = unix.Munmap(b) }()
	return generationAfter(list, generation), nil
}

// generationAfter compares as the programs do: of two generations, the later is the one that is less than 2^31 after the other. None
// is 0.
func generationAfter(list []Backend, generation uint32) uint32 {
	for i := range list {
		if g := list[i].Generation; g != 0 && int32(g-generation) >= 0 {
			generation = max(g+1, 1)
		}
	}
	return generation
}
