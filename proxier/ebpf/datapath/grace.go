// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"time"

	"golang.org/x/sys/unix"
)

// WaitForPrograms returns when every BPF program that was running at the call
// has ended: an RCU grace period. With a single CPU the kernel does not wait: no packet
// program runs there while user space does, and what socket programs may read is not reused
// for a second (package writer).
func WaitForPrograms() {
	// nohz_full machines have no such membarrier. Programs run
	// for microseconds.
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		time.Sleep(50 * time.Millisecond)
	}
}

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1
