// SPDX-License-Identifier: Apache-2.0

package ebpf

import "unsafe"

// keyWords are a frontend's key as the programs load it.
const keyWords = unsafe.Sizeof(frontendKey{}) / 4

// checkOf is check_of() of bpf/check.h: what a value has to carry for the
// programs to believe that it is whole, and its key's own.
func checkOf(words []uint32) uint32 {
	sum := uint64(0)
	for _, word := range words {
		sum = (sum + uint64(word)) * CheckFactor
	}
	return max(uint32(sum>>32), 1)
}

// frontendCheck is frontend_check() of bpf/frontend.h.
func frontendCheck(key *frontendKey, value *frontendValue) uint32 {
	var words [keyWords + 3]uint32
	*(*[keyWords]uint32)(words[:]) = *(*[keyWords]uint32)(unsafe.Pointer(key))
	words[keyWords], words[keyWords+1], words[keyWords+2] = value.Service, value.Flags, value.Affinity
	return checkOf(words[:])
}

// makeFrontend completes the value.
func makeFrontend(key frontendKey, value frontendValue) frontendEntry {
	value.Check = frontendCheck(&key, &value)
	return frontendEntry{key: key, value: value}
}

// whole says that the programs believe the entry.
func (f *frontendEntry) whole() bool { return f.value.Check == frontendCheck(&f.key, &f.value) }
