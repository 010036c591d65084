// SPDX-License-Identifier: Apache-2.0

package ebpf

import "github.com/tandem-proxy/tandem/proxier"

// setWord is what the set map holds of one set.
func setWord(base uint32, size int) uint64 { return uint64(base) | uint64(size)<<32 }

func splitSetWord(w uint64) (base uint32, size int) { return uint32(w), int(w >> 32) }

// unusedSet is the word of a set that no frontend leads to: a program that comes
// there was led by one that was changed meanwhile, and looks again.
const unusedSet = 0

// emptySet is the word of a set in use that has no backends.
func emptySet(v proxier.Verdict) uint64 { return uint64(v) + 1 }

// verdictOf is what emptySet was given.
func verdictOf(base uint32) (v proxier.Verdict, ok bool) {
	return proxier.Verdict(base - 1), base != unusedSet
}

func slotWord(id, generation uint32) uint64 { return uint64(id) | uint64(generation)<<32 }
