// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"time"

	"golang.org/x/sys/unix"
)

// WaitForPrograms returns when every BPF program that was running at the call
// has come to its end: an RCU grace period. Where one CPU is all there is, the kernel
// does not wait: no program of packets is under way there while user space runs, and
// what programs of sockets may read rests for longer (ripeAfter).
func WaitForPrograms() {
	// The kernel has no membarrier for us on nohz_full machines. Programs run
	// for microseconds.
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		time.Sleep(50 * time.Millisecond)
	}
}

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1
