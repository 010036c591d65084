// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"math"
	"testing"
)

func TestGenerationAfter(t *testing.T) {
	for _, test := range []struct {
		name             string
		backends         []uint32
		generation, want uint32
	}{
		{"no backends", nil, 100, 100},
		{"ids that were never used", []uint32{0, 0}, math.MaxInt32 + 10, math.MaxInt32 + 10},
		{"earlier ones", []uint32{1, 0, 99}, 100, 100},
		{"the same second", []uint32{0, 100}, 100, 101},
		{"ids used more often than once a second", []uint32{0, 250, 7, 180}, 100, 251},
		{"past the last number", []uint32{math.MaxUint32}, math.MaxUint32 - 2, 1},
		{"before the last number", []uint32{math.MaxUint32 - 5}, 3, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			var list []Backend
			for _, g := range test.backends {
				list = append(list, Backend{Generation: g})
			}
			if got := generationAfter(list, test.generation); got != test.want {
				t.Errorf("generation %d, want %d", got, test.want)
			}
		})
	}
}
