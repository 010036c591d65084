// SPDX-License-Identifier: Apache-2.0

package flowtable

import "sync/atomic"

// filter has a bit for each home: whether an entry may have its home there. It is changed as in
// bpf/flow_filter.h.
type filter []uint64

func (f filter) has(home uint32) bool {
	return atomic.LoadUint64(&f[home/64])>>(home%64)&1 == 1
}

// set is called after the bit of an entry is set in near.
func (f filter) set(home uint32) { atomic.OrUint64(&f[home/64], 1<<(home%64)) }

// clear is called after the last bit in near was cleared.
func (f filter) clear(home uint32, near *uint32) {
	atomic.AndUint64(&f[home/64], ^(uint64(1) << (home % 64)))
	if atomic.LoadUint32(near) != 0 {
		f.set(home)
	}
}
