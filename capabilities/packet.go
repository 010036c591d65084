// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"context"
	"errors"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// loopbackIndex is the interface index of lo in every network namespace.
const loopbackIndex = 1

// fibLookupSrc is a flag of bpf_fib_lookup.
const fibLookupSrc = 1 << 4

// fibParamsSize is the size of struct bpf_fib_lookup, whose first byte is the
// address family.
const fibParamsSize = 64

// probeTCX asks which programs are attached to lo. Kernels without tcx do not
// know the attach type and say EINVAL before they look at the device.
func probeTCX(context.Context, *host, string) outcome {
	_, err := link.QueryPrograms(link.QueryOptions{Target: loopbackIndex, Attach: ciliumebpf.AttachTCXIngress})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		// The type is known; there is merely nothing attached.
		err = nil
	}
	return fromKernel(err, capNet)
}

// probeClsact looks for the code. Adding the qdisc somewhere would be a better
// proof, but makes the kernel load modules.
func probeClsact(_ context.Context, h *host, _ string) outcome {
	return h.fromModules(
		moduleQuery{module: "sch_ingress", symbol: "clsact_init"},
		moduleQuery{module: "cls_bpf", symbol: "cls_bpf_classify"},
	)
}

func tcProgram(insns asm.Instructions) *ciliumebpf.ProgramSpec {
	return &ciliumebpf.ProgramSpec{Type: ciliumebpf.SchedCLS, Instructions: insns}
}

// probeAtomics needs the compiler as well as the verifier: on arm64 it learned
// of these later than the verifier did.
func probeAtomics(context.Context, *host, string) outcome {
	return tryProgram(tcProgram(asm.Instructions{
		asm.Mov.Imm(asm.R0, 0),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreMem(asm.RFP, -8, asm.R0, asm.DWord),
		asm.CmpXchg.Mem(asm.RFP, asm.R1, asm.DWord, -8),
		asm.Mov.Imm(asm.R0, 0),
		asm.Return(),
	}))
}

func probeRedirectNeigh(context.Context, *host, string) outcome {
	return tryProgram(tcProgram(asm.Instructions{
		asm.Mov.Imm(asm.R1, loopbackIndex),
		asm.Mov.Imm(asm.R2, 0),
		asm.Mov.Imm(asm.R3, 0),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnRedirectNeigh.Call(),
		asm.Return(),
	}))
}

// probeFIB runs a lookup with one flag on a made-up packet. Flags are checked
// at run time, so that loading proves nothing; and they are checked before the
// device, so that device 0 tells "unknown flag" (EINVAL) from "flag is fine"
// (ENODEV) whatever the routes of this host.
func probeFIB(flag int32) probeFunc {
	return func(context.Context, *host, string) outcome {
		spec := tcProgram(fibLookupCall(flag))
		prog, err := loadProgram(spec)
		if err != nil {
			return tryProgram(spec)
		}
		defer prog.Close()
		packet := make([]byte, 64)
		ret, err := prog.Run(&ciliumebpf.RunOptions{Data: packet})
		if err != nil {
			o := fromKernel(fmt.Errorf("run a lookup: %w", err), capBPFNet)
			o.state = Inconclusive
			return o
		}
		return fromFIBReturn(int32(ret))
	}
}

func fromFIBReturn(ret int32) outcome {
	switch {
	case ret >= 0 || ret == -int32(unix.ENODEV):
		return yes("")
	case ret == -int32(unix.EINVAL):
		return no(fmt.Errorf("bpf_fib_lookup: %w", unix.EINVAL))
	}
	return inconclusive(fmt.Errorf("bpf_fib_lookup: %w", unix.Errno(-ret)))
}

func fibLookupCall(flag int32) asm.Instructions {
	const params = -fibParamsSize
	var insns asm.Instructions
	insns = append(insns, asm.Mov.Reg(asm.R6, asm.R1), asm.Mov.Imm(asm.R7, 0))
	for offset := int16(params); offset < 0; offset += 8 {
		insns = append(insns, asm.StoreMem(asm.RFP, offset, asm.R7, asm.DWord))
	}
	return append(insns,
		asm.StoreImm(asm.RFP, params, unix.AF_INET, asm.Byte),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, params),
		asm.Mov.Imm(asm.R3, fibParamsSize),
		asm.Mov.Imm(asm.R4, flag),
		asm.FnFibLookup.Call(),
		asm.Return(),
	)
}
