// SPDX-License-Identifier: Apache-2.0

// Package maglev fills lookup tables for consistent hashing, as described in "Maglev: A Fast and Reliable
// Software Network Load Balancer" (NSDI 2016, section 3.4). A table depends on nothing but the backends'
// addresses and weights, its size and the seed, so that every node has the same one.
package maglev

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
)

// sizes are primes, so that every step visits all slots. Each is the largest below a power of two.
var sizes = [...]int{251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521, 131071}

// Sizes returns the sizes that a table can have, in slots, smallest first.
func Sizes() []int { return slices.Clone(sizes[:]) }

// ValidSize reports whether a table can have a size.
func ValidSize(size int) bool { return slices.Contains(sizes[:], size) }

// slotsPerBackend are how many slots a backend has at least, where the largest table allows it. Shares then differ from
// the weights by about 1 %.
const slotsPerBackend = 100

// SizeFor returns the smallest size that has room enough for a number of backends.
func SizeFor(backends int) int {
	for _, size := range sizes {
		if size >= slotsPerBackend*backends {
			return size
		}
	}
	return sizes[len(sizes)-1]
}

// Smaller returns the next smaller size; 0 for the smallest.
func Smaller(size int) int {
	i, _ := slices.BinarySearch(sizes[:], size)
	if i == 0 {
		return 0
	}
	return sizes[i-1]
}

// Backend takes part in a table. Its share of the slots is in proportion to its weight, which is not 0, and one slot at
// least.
type Backend struct {
	Addr   netip.AddrPort
	Weight uint32
}

// Fill fills a table with indexes of backends, which are sorted by address and have each address once. The
// table's length is one of Sizes. It panics if there are no backends, or more than slots.
func Fill(table []uint32, backends []Backend, seed uint64) {
	size := len(table)
	if !ValidSize(size) || len(backends) == 0 || len(backends) > size {
		panic(fmt.Sprintf("maglev: a table of %d slots for %d backends", size, len(backends)))
	}
	const none = ^uint32(0)
	for i := range table {
		table[i] = none
	}
	m := uint32(size)
	// orders are where a backend wants its next slot, and the step to the one after.
	orders := make([]struct{ at, skip uint32 }, len(backends))
	for i, b := range backends {
		h1, h2 := hashes(b.Addr, seed)
		orders[i].at, orders[i].skip = scale(h1, m), 1+scale(h2, m-1)
	}
	for t, left := newTurns(backends), size; ; t.pass() {
		for _, i := range t.current().members {
			if left == 0 {
				return
			}
			left--
			at, skip := orders[i].at, orders[i].skip
			for table[at] != none {
				if at += skip; at >= m {
					at -= m
				}
			}
			table[at] = i
			if at += skip; at >= m {
				at -= m
			}
			orders[i].at = at
		}
	}
}

// scale maps a hash to 0 … n-1.
func scale(hash uint64, n uint32) uint32 {
	high, _ := bits.Mul64(hash, uint64(n))
	return uint32(high)
}

// hashes returns two independent hashes of an address and port.
func hashes(a netip.AddrPort, seed uint64) (h1, h2 uint64) {
	bytes := a.Addr().As16()
	h := mix(seed ^ binary.BigEndian.Uint64(bytes[:8]))
	h = mix(h ^ binary.BigEndian.Uint64(bytes[8:]))
	h = mix(h ^ uint64(a.Port()))
	return h, mix(h ^ 0x9e3779b97f4a7c15)
}

// mix is the finalizer of SplitMix64: every bit of the result depends on every bit of x.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
