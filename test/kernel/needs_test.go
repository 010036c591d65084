// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernel

import (
	"fmt"
	"testing"
)

// TestDealt: every play is in exactly one part, all parts have the same size, and each has plays
// with even and odd numbers.
func TestDealt(t *testing.T) {
	const plays = 48
	for _, whole := range []string{"", "0/1"} {
		if t.Setenv("TANDEM_PART", whole); !Dealt(0) || !Dealt(7) || IsPart() {
			t.Errorf("without parts (%q), a play is missing", whole)
		}
	}
	for _, parts := range []int{1, 2, 3, 4} {
		times := map[int]int{}
		for part := range parts {
			t.Setenv("TANDEM_PART", fmt.Sprintf("%d/%d", part, parts))
			size, odd := 0, 0
			for play := range plays {
				if Dealt(play) {
					times[play]++
					size, odd = size+1, odd+play%2
				}
			}
			if size != plays/parts || odd == 0 || odd == size {
				t.Errorf("part %d of %d has %d plays, %d of them odd", part, parts, size, odd)
			}
		}
		for play := range plays {
			if times[play] != 1 {
				t.Errorf("play %d is in %d of %d parts", play, times[play], parts)
			}
		}
	}
}
