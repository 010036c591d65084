// SPDX-License-Identifier: Apache-2.0

package datapath

import "fmt"

// PortRange is a range of ports, its ends included. The zero value is none.
type PortRange struct{ First, Last uint16 }

func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

func (r PortRange) none() bool { return r.First == 0 }

func (r PortRange) count() int {
	if r.none() {
		return 0
	}
	return int(r.Last) - int(r.First) + 1
}

// Overlaps says whether the ranges have a port in common.
func (r PortRange) Overlaps(o PortRange) bool {
	return !r.none() && !o.none() && r.First <= o.Last && o.First <= r.Last
}
