// SPDX-License-Identifier: Apache-2.0

package lbmap

import "unsafe"

// keyWords are a frontend's key as the programs load it.
const keyWords = unsafe.Sizeof(FrontendKey{}) / 4

// CheckOf is check_of() of bpf/check.h: the checksum by which programs
// know that a value is complete, and belongs to its key.
func CheckOf(words []uint32) uint32 {
	sum := uint64(0)
	for _, word := range words {
		sum = (sum + uint64(word)) * CheckFactor
	}
	return max(uint32(sum>>32), 1)
}

// frontendCheck is frontend_check() of bpf/frontend.h.
func frontendCheck(key *FrontendKey, value *FrontendValue) uint32 {
	var words [keyWords + 3]uint32
	*(*[keyWords]uint32)(words[:]) = *(*[keyWords]uint32)(unsafe.Pointer(key))
	words[keyWords], words[keyWords+1], words[keyWords+2] = value.Service, value.Flags, value.Affinity
	return CheckOf(words[:])
}

// NewFrontendEntry completes the value.
func NewFrontendEntry(key FrontendKey, value FrontendValue) FrontendEntry {
	value.Check = frontendCheck(&key, &value)
	return FrontendEntry{Key: key, Value: value}
}

// IsWhole says that the programs believe the entry.
func (f *FrontendEntry) IsWhole() bool { return f.Value.Check == frontendCheck(&f.Key, &f.Value) }
