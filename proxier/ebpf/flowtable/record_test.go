// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// TestAge: a record has 24 bits of the second of its first packet, and the age is right for half a year of seconds.
func TestAge(t *testing.T) {
	for _, test := range []struct {
		name               string
		created, seen, now uint32
		want               time.Duration
	}{
		{"at once", 1000, 1000, 1000, 0},
		{"after now was read", 1001, 1001, 1000, 0},
		{"idle", 1000, 1000, 1090, 90 * time.Second},
		{"in use", 1000, 1080, 1090, 90 * time.Second},
		{"above 24 bits", 1<<24 + 5, 1<<24 + 7, 1<<24 + 9, 4 * time.Second},
		{"across 24 bits", 1<<24 - 10, 1<<24 + 10, 1<<24 + 15, 25 * time.Second},
		{"half a year", 1000, 1000 + 1<<24 - 1, 1000 + 1<<24, 1 << 24 * time.Second},
	} {
		f := &lbmap.Flow{Seen: test.seen, Created: [3]uint8{uint8(test.created), uint8(test.created >> 8), uint8(test.created >> 16)}}
		if got := ageOf(f, test.now); got == nil || *got != test.want {
			t.Errorf("%s: got %v, want %v", test.name, got, test.want)
		}
	}
	if got := ageOf(&lbmap.Flow{Seen: 1000}, 1000); got != nil {
		t.Errorf("got %v for a flow whose beginning was not noted", got)
	}
}
