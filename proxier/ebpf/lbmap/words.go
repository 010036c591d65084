// SPDX-License-Identifier: Apache-2.0

package lbmap

import "github.com/tandem-proxy/tandem/proxier"

// SetWord is what the set map holds of one set.
func SetWord(base uint32, size int) uint64 { return uint64(base) | uint64(size)<<32 }

func SplitSetWord(w uint64) (base uint32, size int) { return uint32(w), int(w >> 32) }

// UnusedSet is the word of a set that no frontend leads to: a program that comes
// there was led by one that was changed meanwhile, and looks again.
const UnusedSet = 0

// EmptySet is the word of a set in use that has no backends.
func EmptySet(v proxier.Verdict) uint64 { return uint64(v) + 1 }

// VerdictOf is what EmptySet was given.
func VerdictOf(base uint32) (v proxier.Verdict, ok bool) {
	return proxier.Verdict(base - 1), base != UnusedSet
}

func SlotWord(id, generation uint32) uint64 { return uint64(id) | uint64(generation)<<32 }
