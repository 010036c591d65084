// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"math/bits"
	"sync/atomic"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// usedPorts tells packet programs which ports have frontends, whatever the address. The bit of a port is set before
// its first frontend is written, and cleared after its last one is deleted.
type usedPorts struct {
	table []uint64       // a bit for each port; nil if no packet programs are loaded
	users map[uint32]int // frontends, by port as in lbmap.PortBit
	free  []uint32       // ports that lost their last frontend since the last call of write
}

func newUsedPorts(table []uint64) usedPorts { return usedPorts{table: table, users: map[uint32]int{}} }

// load is called with all frontends that a previous process left.
func (u *usedPorts) load(there []lbmap.FrontendKey) {
	for word, set := range u.table {
		for ; set != 0; set &= set - 1 {
			u.free = append(u.free, uint32(word*64+bits.TrailingZeros64(set)))
		}
	}
	for i := range there {
		u.set(lbmap.PortBit(&there[i]))
	}
}

func (u *usedPorts) set(port uint32) {
	if u.table == nil {
		return
	}
	if word, bit := &u.table[port/64], uint64(1)<<(port%64); atomic.LoadUint64(word)&bit == 0 {
		atomic.OrUint64(word, bit)
		u.free = append(u.free, port) // unless it has users by the next call of write
	}
}

// replace updates the number of frontends per port, after those of a service port changed.
func (u *usedPorts) replace(before, after []lbmap.FrontendEntry) {
	for i := range after {
		port := lbmap.PortBit(&after[i].Key)
		if u.users[port]++; u.users[port] == 1 {
			u.set(port)
		}
	}
	for i := range before {
		port := lbmap.PortBit(&before[i].Key)
		if u.users[port]--; u.users[port] == 0 {
			delete(u.users, port)
			u.free = append(u.free, port)
		}
	}
}

// write clears the bits of ports without frontends, and returns how many.
func (u *usedPorts) write() (cleared int) {
	for _, port := range u.free {
		if u.table == nil || u.users[port] > 0 {
			continue
		}
		if word, bit := &u.table[port/64], uint64(1)<<(port%64); atomic.LoadUint64(word)&bit != 0 {
			atomic.AndUint64(word, ^bit)
			cleared++
		}
	}
	u.free = u.free[:0]
	return cleared
}
