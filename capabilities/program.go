// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"context"
	"errors"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"
)

// probeName is on every program and map of this package, so that one left
// behind by a mistake can be found.
const probeName = "tandem_probe"

// sockAddrSK is the offset of sk in struct bpf_sock_addr.
const sockAddrSK = 64

// loadProgram loads spec; the caller closes what it gets.
func loadProgram(spec *ciliumebpf.ProgramSpec) (*ciliumebpf.Program, error) {
	spec.Name = probeName
	if spec.License == "" {
		spec.License = "GPL"
	}
	return ciliumebpf.NewProgram(spec)
}

// tryProgram answers by loading spec and dropping it at once.
func tryProgram(spec *ciliumebpf.ProgramSpec) outcome {
	prog, err := loadProgram(spec)
	if err == nil {
		err = prog.Close()
	}
	// The verifier's objection to a program that newer kernels accept is an
	// answer. EACCES without a log comes from a security module instead, and
	// says nothing about the kernel.
	var verifierErr *ciliumebpf.VerifierError
	if errors.Is(err, unix.EACCES) && errors.As(err, &verifierErr) && len(verifierErr.Log) > 0 {
		return no(err)
	}
	return fromKernel(err, capBPFNet)
}

func sockAddrProgram(attach ciliumebpf.AttachType, insns asm.Instructions) *ciliumebpf.ProgramSpec {
	return &ciliumebpf.ProgramSpec{Type: ciliumebpf.CGroupSockAddr, AttachType: attach, Instructions: insns}
}

// probeSockAddr loads a program for one attach type. The verifier checks the
// type at load time, so that there is no need to attach.
func probeSockAddr(attach ciliumebpf.AttachType) probeFunc {
	return func(context.Context, *host, string) outcome {
		return tryProgram(sockAddrProgram(attach, returning(1)))
	}
}

func probePostBind(attach ciliumebpf.AttachType) probeFunc {
	return func(context.Context, *host, string) outcome {
		return tryProgram(&ciliumebpf.ProgramSpec{Type: ciliumebpf.CGroupSock, AttachType: attach, Instructions: returning(1)})
	}
}

// probeHelper loads a connect4 program whose first instructions end in a call.
func probeHelper(call ...asm.Instruction) outcome {
	return tryProgram(sockAddrProgram(ciliumebpf.AttachCGroupInet4Connect, append(call, returning(1)...)))
}

func probeNetnsCookie(context.Context, *host, string) outcome {
	// R1 is the context on entry, which is the helper's only argument.
	return probeHelper(asm.FnGetNetnsCookie.Call())
}

func probeSetRetval(context.Context, *host, string) outcome {
	return probeHelper(asm.Mov.Imm(asm.R1, -int32(unix.ECONNREFUSED)), asm.FnSetRetval.Call())
}

func probeKtimeCoarse(context.Context, *host, string) outcome {
	return probeHelper(asm.FnKtimeGetCoarseNs.Call())
}

func probeLoop(context.Context, *host, string) outcome {
	return fromKernel(features.HaveProgramHelper(ciliumebpf.SchedCLS, asm.FnLoop), capBPFNet)
}

func probeNetfilterHook(context.Context, *host, string) outcome {
	return fromKernel(features.HaveProgramType(ciliumebpf.Netfilter), capBPFNet)
}

// probeGlobalPointers has a function that is verified by itself look at what it is handed
// by its caller, which such functions could not be handed before.
func probeGlobalPointers(context.Context, *host, string) outcome {
	integer := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	entry := &btf.Func{Name: "entry", Type: &btf.FuncProto{Return: integer}, Linkage: btf.GlobalFunc}
	callee := &btf.Func{Name: "callee", Linkage: btf.GlobalFunc, Type: &btf.FuncProto{
		Return: integer, Params: []btf.FuncParam{{Name: "p", Type: &btf.Pointer{Target: integer}}},
	}}
	return tryProgram(sockAddrProgram(ciliumebpf.AttachCGroupInet4Connect, asm.Instructions{
		btf.WithFuncMetadata(asm.StoreImm(asm.RFP, -4, 1, asm.Word), entry).WithSymbol(entry.Name),
		asm.Mov.Reg(asm.R1, asm.RFP),
		asm.Add.Imm(asm.R1, -4),
		asm.Call.Label(callee.Name),
		asm.Mov.Imm(asm.R0, 1),
		asm.Return(),
		btf.WithFuncMetadata(asm.Mov.Imm(asm.R0, 0), callee).WithSymbol(callee.Name),
		asm.JEq.Imm(asm.R1, 0, "return"),
		asm.LoadMem(asm.R0, asm.R1, 0, asm.Word),
		asm.Return().WithSymbol("return"),
	}))
}

// probeSocketStorage does what the socket LB does: find the storage of the
// context's socket, making it if need be.
func probeSocketStorage(context.Context, *host, string) outcome {
	integer := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	storage, err := newMap(&ciliumebpf.MapSpec{
		Type:      ciliumebpf.SkStorage,
		KeySize:   4,
		ValueSize: 4,
		Flags:     unix.BPF_F_NO_PREALLOC,
		// The kernel refuses socket storage without types.
		Key:   integer,
		Value: integer,
	})
	if err != nil {
		return fromKernel(err, capBPF)
	}
	defer storage.Close()
	const create = 1 // BPF_SK_STORAGE_GET_F_CREATE
	return probeHelper(
		asm.LoadMem(asm.R2, asm.R1, sockAddrSK, asm.DWord),
		asm.LoadMapPtr(asm.R1, storage.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.Mov.Imm(asm.R4, create),
		asm.FnSkStorageGet.Call(),
	)
}
