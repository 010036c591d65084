// SPDX-License-Identifier: Apache-2.0

package maglev

import (
	"encoding/binary"
	"net/netip"
)

// HashFactor is CHECK_FACTOR of bpf/check.h: odd, 2^64 / golden ratio.
const HashFactor = 0x9e3779b97f4a7c15

// Hash is check_of() of bpf/check.h, which the programs use: of words as they are in memory, so in host byte order. It is never 0.
func Hash(words []uint32) uint32 {
	sum := uint64(0)
	for _, word := range words {
		sum = (sum + uint64(word)) * HashFactor
	}
	return max(uint32(sum>>32), 1)
}

// Slot is the slot of a connection in a table of that size.
func Slot(hash uint32, size int) int { return int(uint64(hash) * uint64(size) >> 32) }

// HashClient is the hash of a client with session affinity: of its address alone.
func HashClient(a netip.Addr) uint32 {
	var words [4]uint32
	putAddr(words[:], a)
	return Hash(words[:])
}

// HashConnection is the hash of any other connection: of struct flow_key of bpf/flow_types.h.
func HashConnection(from, to netip.AddrPort, protocol uint8) uint32 {
	var words [10]uint32
	putAddr(words[0:4], from.Addr())
	putAddr(words[4:8], to.Addr())
	var tail [4]byte
	binary.BigEndian.PutUint16(tail[:2], from.Port())
	binary.BigEndian.PutUint16(tail[2:], to.Port())
	words[8] = binary.NativeEndian.Uint32(tail[:])
	words[9] = binary.NativeEndian.Uint32([]byte{protocol, 0, 0, 0})
	return Hash(words[:])
}

func putAddr(words []uint32, a netip.Addr) {
	bytes := a.As16()
	for i := range words {
		words[i] = binary.NativeEndian.Uint32(bytes[4*i:])
	}
}
