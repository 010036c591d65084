// SPDX-License-Identifier: Apache-2.0

package direct

import (
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// newFilter is a filter of packet sockets that lets replies to probes with this id through.
func newFilter(id uint16) (*ciliumebpf.Program, error) {
	const longest = 256
	is := func(offset int32, size asm.Size, value int32) asm.Instructions {
		return asm.Instructions{asm.LoadAbs(offset, size), asm.JNE.Imm(asm.R0, value, "no")}
	}
	code := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1), // where LoadAbs expects the packet
		asm.LoadAbs(0, asm.Byte),
		asm.JNE.Imm(asm.R0, 0x45, "v6"),
	}
	code = append(code, is(9, asm.Byte, unix.IPPROTO_ICMP)...)
	code = append(code, is(header4, asm.Byte, echoReply4)...)
	code = append(code, is(header4+4, asm.Half, int32(id))...)
	code = append(code, asm.Mov.Imm(asm.R0, longest), asm.Return(), asm.LoadAbs(6, asm.Byte).WithSymbol("v6"), asm.JNE.Imm(asm.R0, unix.IPPROTO_ICMPV6, "no"))
	code = append(code, is(header6, asm.Byte, echoReply6)...)
	code = append(code, is(header6+4, asm.Half, int32(id))...)
	code = append(code, asm.Mov.Imm(asm.R0, longest), asm.Return(), asm.Mov.Imm(asm.R0, 0).WithSymbol("no"), asm.Return())
	program, err := ciliumebpf.NewProgram(&ciliumebpf.ProgramSpec{Name: "tdm_replies", Type: ciliumebpf.SocketFilter, Instructions: code, License: "Apache-2.0"})
	if err != nil {
		return nil, fmt.Errorf("load the filter of replies: %w", err)
	}
	return program, nil
}
