// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"fmt"
	"strings"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// What the kernel allows the stacks of functions that call each other to take together, in bytes, and what it rounds each of them up to
// (check_max_stack_depth() of kernel/bpf/verifier.c). Since Linux 6.9 it rounds up to 16 where it compiles programs.
const (
	stackLimit = 512
	stackUnit  = 32
)

// TestStacks: the stack of each program fits, as old kernels count it: those of the functions that call each other at most.
func TestStacks(t *testing.T) {
	for _, load := range []func() (*ciliumebpf.CollectionSpec, error){loadSock, loadTc, loadXdp, loadArrival, loadHold, loadMonitor} {
		spec, err := load()
		if err != nil {
			t.Fatal(err)
		}
		for name, p := range spec.Programs {
			functions := functionsOf(p.Instructions)
			depth, calls := deepest(functions, name)
			if depth > stackLimit {
				t.Errorf("%s: %d bytes of stack, and %d are allowed: %s", name, depth, stackLimit, strings.Join(calls, ", "))
			}
			t.Logf("%s: %d bytes: %s", name, depth, strings.Join(calls, ", "))
		}
	}
}

// function is a function of a program: the bytes of its stack, and those that it calls.
type function struct {
	stack int
	calls []string
}

func functionsOf(list asm.Instructions) map[string]*function {
	all := map[string]*function{}
	var at *function
	addresses := map[asm.Register]bool{} // registers that have the frame's end
	for _, ins := range list {
		if name := ins.Symbol(); name != "" && !strings.HasPrefix(name, "LBB") {
			at = &function{}
			all[name], addresses = at, map[asm.Register]bool{}
		}
		uses := func(offset int64) { at.stack = max(at.stack, int(-offset)) }
		op := ins.OpCode
		switch class := op.Class(); {
		case ins.IsFunctionReference():
			at.calls = append(at.calls, ins.Reference())
			addresses = map[asm.Register]bool{}
		case class == asm.LdXClass && ins.Src == asm.RFP, (class == asm.StClass || class == asm.StXClass) && ins.Dst == asm.RFP:
			uses(int64(ins.Offset))
		case class.IsALU() && op.ALUOp() == asm.Add && op.Source() == asm.ImmSource && addresses[ins.Dst]:
			uses(ins.Constant)
		}
		if class := op.Class(); class == asm.LdXClass || class == asm.LdClass || class.IsALU() {
			addresses[ins.Dst] = class == asm.ALU64Class && op.ALUOp() == asm.Mov && op.Source() == asm.RegSource && ins.Src == asm.RFP
		}
	}
	return all
}

// deepest returns the calls, from a function on, that need the most stack.
func deepest(all map[string]*function, name string) (depth int, calls []string) {
	f := all[name]
	if f == nil {
		return 0, []string{name + " (unknown)"}
	}
	for _, called := range f.calls {
		if d, list := deepest(all, called); d > depth {
			depth, calls = d, list
		}
	}
	own := (max(f.stack, 1) + stackUnit - 1) / stackUnit * stackUnit
	return depth + own, append([]string{fmt.Sprintf("%s %d", name, f.stack)}, calls...)
}
