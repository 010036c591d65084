// SPDX-License-Identifier: Apache-2.0

package datapath

import "slices"

// sum of 16-bit words, in ones' complement.
func sum(parts ...[]byte) uint16 {
	s := uint32(0)
	for _, b := range parts {
		for i, octet := range b {
			if i%2 == 0 {
				s += uint32(octet) << 8
			} else {
				s += uint32(octet)
			}
			s = s>>16 + s&0xffff
		}
	}
	return uint16(s>>16 + s&0xffff)
}

// editor overwrites parts of a frame, and updates checksums incrementally (RFC 1624): wrong
// checksums remain wrong by the same difference.
type editor struct {
	frame []byte
	// checksums are offsets of checksums that allow both representations of zero. UDP's do
	// not: 0 means no checksum.
	checksums []int
	udp       int
}

func edit(frame []byte) *editor { return &editor{frame: slices.Clone(frame)} }

// set overwrites bytes, and updates the checksums at the given offsets, which cover them.
func (e *editor) set(at int, value []byte, checksums ...int) {
	old := slices.Clone(e.frame[at : at+len(value)])
	copy(e.frame[at:], value)
	for _, c := range checksums {
		e.correct(c, old, value)
	}
}

// correct updates a checksum for changed bytes elsewhere.
func (e *editor) correct(at int, old, value []byte) {
	inverse := make([]byte, len(old))
	for i := range old {
		inverse[i] = ^old[i]
	}
	check := []byte{^e.frame[at], ^e.frame[at+1]}
	be.PutUint16(e.frame[at:], ^sum(check, inverse, value))
	if !slices.Contains(e.checksums, at) {
		e.checksums = append(e.checksums, at)
	}
}

// equal compares with a frame, and accepts both representations of zero in checksums.
func (e *editor) equal(frame []byte) bool {
	want, got := slices.Clone(e.frame), slices.Clone(frame)
	if len(want) != len(got) || e.udp > 0 && be.Uint16(got[e.udp:]) == 0 {
		return false
	}
	for _, at := range e.checksums {
		for _, b := range [][]byte{want, got} {
			if be.Uint16(b[at:]) == 0xffff {
				be.PutUint16(b[at:], 0)
			}
		}
	}
	return slices.Equal(want, got)
}
