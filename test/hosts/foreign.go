// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/tandem-proxy/tandem/test/lab"
)

// foreignMark is what the other project's programs mark packets of pods with: an identity, and
// that it is one.
const foreignMark = 0x12340f00

// attachForeign attaches programs of another project to the node's card and to the devices of its
// pods, in both directions. They let packets pass, past all programs after them, and mark those of pods.
func (w *World) attachForeign(context.Context) error {
	if !w.Foreign {
		return nil
	}
	const skbMark = 8 // offset in struct __sk_buff
	pass := asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}
	mark := append(asm.Instructions{asm.Mov.Imm(asm.R2, foreignMark), asm.StoreMem(asm.R1, skbMark, asm.R2, asm.Word)}, pass...)
	for _, p := range []struct {
		instructions asm.Instructions
		device       string
		attach       ebpf.AttachType
	}{
		{pass, lab.Uplink, ebpf.AttachTCXIngress},
		{pass, lab.Uplink, ebpf.AttachTCXEgress},
		{mark, w.Here.HostLink, ebpf.AttachTCXIngress},
		{pass, w.Here.HostLink, ebpf.AttachTCXEgress},
		{mark, w.Pod.HostLink, ebpf.AttachTCXIngress},
		{pass, w.Pod.HostLink, ebpf.AttachTCXEgress},
	} {
		program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "foreign", Type: ebpf.SchedCLS, Instructions: p.instructions, License: "GPL"})
		if err != nil {
			return fmt.Errorf("load a foreign program: %w", err)
		}
		device, err := w.Node.Netlink().LinkByName(p.device)
		if err != nil {
			return fmt.Errorf("find %s: %w", p.device, err)
		}
		err = w.Node.Do(func() error {
			l, err := link.AttachTCX(link.TCXOptions{Interface: device.Attrs().Index, Program: program, Attach: p.attach})
			if err == nil {
				w.open = append(w.open, l)
			}
			return err
		})
		if err := errors.Join(err, program.Close()); err != nil {
			return fmt.Errorf("attach a foreign program to %s: %w", p.device, err)
		}
	}
	return nil
}
