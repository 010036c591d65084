// SPDX-License-Identifier: Apache-2.0

package lbmap

import "github.com/tandem-proxy/tandem/proxier"

// SetWord is what the set map holds of one set.
func SetWord(base uint32, size int) uint64 { return uint64(base) | uint64(size)<<32 }

// SplitSetWord is the inverse of SetWord; the size of a set without backends is 0.
func SplitSetWord(w uint64) (base uint32, size int) { return uint32(w), int(w >> 32) }

// UnusedSet is the word of a set that no frontend refers to. A program that reads it had
// looked up a frontend that was changed meanwhile, and looks it up again.
const UnusedSet = 0

// EmptySet is the word of a set in use that has no backends.
func EmptySet(v proxier.Verdict) uint64 { return uint64(v) + 1 }

// VerdictOf is the inverse of EmptySet; ok is false for an unused set.
func VerdictOf(base uint32) (v proxier.Verdict, ok bool) {
	return proxier.Verdict(base - 1), base != UnusedSet
}

// SlotWord is a slot: a backend, and the low bits of the generation that it has to have. Those are enough: an id is not used
// again within a grace period, so a program that has read a slot cannot see the next backend with the same bits.
func SlotWord(id, generation uint32) uint32 { return id | generation<<SlotGeneration }

// SlotBackend is the backend of a slot.
func SlotBackend(w uint32) (id uint32) { return w & (1<<SlotGeneration - 1) }

// TargetWord is what the map of targets holds of a backend.
func TargetWord(id, generation uint32) uint64 { return uint64(id) | uint64(generation)<<32 }

// SplitTargetWord is the inverse of TargetWord.
func SplitTargetWord(w uint64) (id, generation uint32) { return uint32(w), uint32(w >> 32) }
