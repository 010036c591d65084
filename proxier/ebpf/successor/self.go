// SPDX-License-Identifier: Apache-2.0

package successor

import (
	"fmt"
	"runtime"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// Self is the number of this process in the initial pid namespace, as BPF programs see it. A
// container does not learn it from /proc. It needs Linux 5.10 and CAP_PERFMON, or CAP_SYS_ADMIN.
func Self() (uint32, error) {
	program, err := ciliumebpf.NewProgram(&ciliumebpf.ProgramSpec{
		Name: "tdm_self", Type: ciliumebpf.RawTracepoint, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.FnGetCurrentPidTgid.Call(),
			asm.RSh.Imm(asm.R0, 32),
			asm.Return(),
		},
	})
	if err != nil {
		return 0, fmt.Errorf("load the program that reads this process's number: %w", err)
	}
	defer program.Close()
	// The kernel runs it in this thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	self, err := program.Run(&ciliumebpf.RunOptions{})
	if err != nil {
		return 0, fmt.Errorf("read this process's number: %w", err)
	}
	return self, nil
}
