// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/tandem-proxy/tandem/kernel/xdp"
)

// PassingXDP is a program that passes all packets. The caller closes it.
func PassingXDP(name string) (*ebpf.Program, error) {
	const pass = 2 // XDP_PASS
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: name, Type: ebpf.XDP, License: "Apache-2.0",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, pass), asm.Return()},
	})
}

// LosesXDP ends what ReceivesXDP began.
func (s *Sandbox) LosesXDP(device string) error {
	link, err := s.nl.LinkByName(device)
	if err != nil {
		return err
	}
	return s.Do(func() error {
		state, err := xdp.Look(link.Attrs().Index)
		if err != nil {
			return err
		}
		p, err := ebpf.NewProgramFromID(state.Program)
		if err != nil {
			return err
		}
		defer p.Close()
		return xdp.Detach(link.Attrs().Index, p)
	})
}

// ReceivesXDP has a veth receive what XDP at its other end sends, which it does with a program of its own.
func (s *Sandbox) ReceivesXDP(device string) error {
	link, err := s.nl.LinkByName(device)
	if err != nil {
		return err
	}
	p, err := PassingXDP("pass")
	if err != nil {
		return err
	}
	defer p.Close() // the device holds it
	return s.Do(func() error { return xdp.Attach(link.Attrs().Index, p, nil) })
}
