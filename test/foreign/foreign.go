// SPDX-License-Identifier: Apache-2.0

// Package foreign attaches programs as other software on a node does.
package foreign

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/test/lab"
)

// Name is that of the programs.
const Name = "foreign"

// PutFirst attaches a program to a device, ahead of all others, which accepts all packets. So those
// behind it see none.
func PutFirst(s *lab.Sandbox, device string, method tc.Method, d tc.Direction) (remove func() error, err error) {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: Name, Type: ebpf.SchedCLS, License: "MIT",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		return nil, fmt.Errorf("load a foreign program: %w", err)
	}
	defer program.Close() // it stays while it is attached
	l, err := s.Netlink().LinkByName(device)
	if err != nil {
		return nil, fmt.Errorf("find device %s of %s: %w", device, s.Name, err)
	}
	index := l.Attrs().Index
	at, parent := ebpf.AttachTCXIngress, uint32(netlink.HANDLE_MIN_INGRESS)
	if d == tc.Egress {
		at, parent = ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS
	}
	if method == tc.Clsact {
		f := &netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: parent, Priority: 2, Handle: 1, Protocol: unix.ETH_P_ALL},
			Fd:          program.FD(), Name: Name, DirectAction: true,
		}
		return func() error { return s.Netlink().FilterDel(f) }, s.Netlink().FilterAdd(f)
	}
	id, err := idOf(program)
	if err != nil {
		return nil, err
	}
	err = s.Do(func() error {
		return link.RawAttachProgram(link.RawAttachProgramOptions{Target: index, Program: program, Attach: at, Anchor: link.Head()})
	})
	return func() error {
		program, err := ebpf.NewProgramFromID(id)
		if err != nil {
			return err
		}
		defer program.Close()
		return s.Do(func() error {
			return link.RawDetachProgram(link.RawDetachProgramOptions{Target: index, Program: program, Attach: at})
		})
	}, err
}

func idOf(p *ebpf.Program) (ebpf.ProgramID, error) {
	info, err := p.Info()
	if err != nil {
		return 0, fmt.Errorf("inspect a foreign program: %w", err)
	}
	id, _ := info.ID()
	return id, nil
}
