// SPDX-License-Identifier: Apache-2.0

package maglev

import "testing"

// TestHash: the hash of these words is the same as in the programs, in both byte orders.
func TestHash(t *testing.T) {
	for _, test := range []struct {
		words []uint32
		want  uint32
	}{
		{nil, 1}, // never 0
		{[]uint32{0, 0, 0}, 1},
		{[]uint32{1}, 0x9e3779b9},
		{[]uint32{0, 1}, 0x9e3779b9},
		{[]uint32{1, 0}, 0xdf442d22},
		{[]uint32{0xffffffff}, 0xe113025b},
		{[]uint32{0, 0, 0xffff0000, 0x0a00600a, 0x00065000, 4, 10800}, 0xfce29cf1},
	} {
		if got := Hash(test.words); got != test.want {
			t.Errorf("%#x: %#x, want %#x", test.words, got, test.want)
		}
	}
}
