// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"context"
	"errors"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
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
