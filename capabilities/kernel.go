// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"github.com/tandem-proxy/tandem/kernel/loading"
)

// Before kernel 5.8 the two BPF capabilities were part of CAP_SYS_ADMIN.
const (
	capBPF    = "CAP_BPF (CAP_SYS_ADMIN before 5.8)"
	capBPFNet = "CAP_BPF and CAP_NET_ADMIN (CAP_SYS_ADMIN before 5.8)"
	capNet    = "CAP_NET_ADMIN"
	capByID   = "CAP_SYS_ADMIN (CAP_BPF does not suffice)"
)

func probeBPFSyscall(context.Context, *host, string) outcome {
	return fromKernel(tryMap(&ciliumebpf.MapSpec{Type: ciliumebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}), capBPF)
}

// probeOpenByID opens a map of its own. Programs are opened by the same privilege.
func probeOpenByID(context.Context, *host, string) outcome {
	m, err := newMap(&ciliumebpf.MapSpec{Type: ciliumebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		// Not about ids: without a map the question cannot be asked.
		o := fromKernel(err, capBPF)
		o.state = Inconclusive
		return o
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return fromKernel(fmt.Errorf("query the id of a map: %w", err), capByID)
	}
	id, known := info.ID()
	if !known {
		return no(errors.New("maps have no ids"))
	}
	opened, err := ciliumebpf.NewMapFromID(id)
	if err != nil {
		return fromKernel(fmt.Errorf("open a map by its id: %w", err), capByID)
	}
	return fromClose(opened.Close(), "")
}

func probeBTF(_ context.Context, h *host, _ string) outcome {
	path := h.sys("kernel/btf/vmlinux")
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return no(err)
	}
	if err != nil {
		return inconclusive(err)
	}
	return fromClose(f.Close(), path)
}

func fromClose(err error, detail string) outcome {
	if err != nil {
		return inconclusive(err)
	}
	return yes(detail)
}

// probeJIT reads the sysctl if it can, and otherwise inspects a program that it
// loads: net.core.bpf_jit_enable exists in the first network namespace only.
func probeJIT(_ context.Context, h *host, _ string) outcome {
	text, err := os.ReadFile(h.proc("sys/net/core/bpf_jit_enable"))
	if err == nil {
		return parseJITEnable(string(text))
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return inconclusive(err)
	}
	prog, err := loadProgram(&ciliumebpf.ProgramSpec{Type: ciliumebpf.SchedCLS, Instructions: returning(0)})
	if err != nil {
		o := fromKernel(err, capBPFNet)
		o.state = Inconclusive
		return o
	}
	defer prog.Close()
	info, err := prog.Info()
	if err != nil {
		return inconclusive(err)
	}
	size, err := info.JitedSize()
	if err != nil {
		return inconclusive(err)
	}
	if size == 0 {
		return no(errors.New("a loaded program was not compiled"))
	}
	return yes("seen on a loaded program")
}

func parseJITEnable(text string) outcome {
	switch value := strings.TrimSpace(text); value {
	case "0":
		return no(errors.New("net.core.bpf_jit_enable is 0"))
	case "1", "2":
		return yes("net.core.bpf_jit_enable is " + value)
	default:
		return inconclusive(fmt.Errorf("net.core.bpf_jit_enable is %q", value))
	}
}

// kernelTypes is the kernel's BTF.
type kernelTypes struct {
	vmlinux *btf.Spec
	err     error
}

func (h *host) readTypes() kernelTypes {
	path := h.sys("kernel/btf/vmlinux")
	load := func() (*btf.Spec, error) { return btf.LoadSpec(path) }
	if _, err := os.Stat(path); err == nil && h.opts.SysRoot == ownSys {
		load = loading.KernelTypes().Kernel // which the loads of programs need as well
	}
	vmlinux, err := load()
	return kernelTypes{vmlinux, err}
}

// probeKfunc looks a kernel function up in BTF, of the kernel proper and then
// of the module that has it elsewhere.
func probeKfunc(name, module string) probeFunc {
	return func(_ context.Context, h *host, _ string) outcome {
		types := h.types()
		base, err := types.vmlinux, types.err
		if errors.Is(err, fs.ErrNotExist) {
			return no(fmt.Errorf("kfuncs need kernel BTF: %w", err))
		}
		if err != nil {
			return inconclusive(err)
		}
		if found, err := hasFunc(base, name); err != nil || found {
			return fromFound(found, err, "in vmlinux")
		}
		moduleTypes, err := btf.LoadSplitSpec(h.sys("kernel/btf", module), base)
		if errors.Is(err, fs.ErrNotExist) {
			presence, reason := h.module(module, "")
			if presence == moduleAbsent || presence == moduleLoaded {
				return no(fmt.Errorf("%s is neither in the BTF of the kernel nor of a module", name))
			}
			return inconclusive(reason)
		}
		if err != nil {
			return inconclusive(err)
		}
		found, err := hasFunc(moduleTypes, name)
		if err == nil && !found {
			return no(fmt.Errorf("%s is not in the BTF of module %s", name, module))
		}
		return fromFound(found, err, "in module "+module)
	}
}

func fromFound(found bool, err error, detail string) outcome {
	if err != nil || !found {
		return inconclusive(err)
	}
	return yes(detail)
}

func hasFunc(spec *btf.Spec, name string) (bool, error) {
	var fn *btf.Func
	err := spec.TypeByName(name, &fn)
	if errors.Is(err, btf.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// returning is the smallest program: it returns value.
func returning(value int32) asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R0, value), asm.Return()}
}
