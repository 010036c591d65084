// SPDX-License-Identifier: Apache-2.0

package writer

import "testing"

// TestLists: slices that share memory do not overlap, nor grow into each other.
func TestLists(t *testing.T) {
	var l lists[int]
	var all [][]int
	for i := range 100 {
		list := l.take(i % 11)
		if len(list) != i%11 || cap(list) != len(list) {
			t.Fatalf("take(%d): length %d, capacity %d", i%11, len(list), cap(list))
		}
		for j := range list {
			if list[j] != 0 {
				t.Fatalf("take(%d) has elements that are in use", i%11)
			}
			list[j] = i + 1
		}
		all = append(all, list)
	}
	for i, list := range all {
		for _, v := range list {
			if v != i+1 {
				t.Fatalf("list %d has an element of list %d", i, v-1)
			}
		}
	}
}
