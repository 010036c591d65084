// SPDX-License-Identifier: Apache-2.0

package tc

import (
	"errors"
	"fmt"
	"os"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

func (d Direction) attachType() ciliumebpf.AttachType {
	if d == Egress {
		return ciliumebpf.AttachTCXEgress
	}
	return ciliumebpf.AttachTCXIngress
}

func findTCX(device int, d Direction, ours func(*ciliumebpf.Program) bool) (found []Attachment, err error) {
	result, err := link.QueryPrograms(link.QueryOptions{Target: device, Attach: d.attachType()})
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, link.ErrNotSupported):
		return nil, nil // a kernel without tcx
	case errors.Is(err, unix.ENOENT):
		return nil, nil // some kernels return this if nothing is attached
	case err != nil:
		return nil, err
	}
	for _, at := range result.Programs {
		// The proxy never uses links, so this program is foreign.
		if _, held := at.LinkID(); held {
			continue
		}
		program, err := openIfOwn(at.ID, ours)
		if err != nil {
			return found, err
		}
		if program != nil {
			found = append(found, Attachment{Device: device, Direction: d, Method: TCX, Program: program})
		}
	}
	return found, nil
}

// openIfOwn opens a program if ours returns true for it.
func openIfOwn(id ciliumebpf.ProgramID, ours func(*ciliumebpf.Program) bool) (*ciliumebpf.Program, error) {
	program, err := ciliumebpf.NewProgramFromID(id)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // detached in the meantime
	}
	if err != nil {
		return nil, fmt.Errorf("open program %d: %w", id, err)
	}
	if !ours(program) {
		program.Close()
		return nil, nil
	}
	return program, nil
}

// attachTCX attaches without a link, since a link would detach when the process ends.
func attachTCX(device int, d Direction, p *ciliumebpf.Program, replaced *Attachment) error {
	opts := link.RawAttachProgramOptions{Target: device, Program: p, Attach: d.attachType(), Anchor: link.Head()}
	if replaced != nil {
		opts.Anchor = link.ReplaceProgram(replaced.Program)
	}
	err := link.RawAttachProgram(opts)
	if errors.Is(err, unix.ERANGE) {
		return fmt.Errorf("%w: the device has the maximum number of programs", err)
	}
	return err
}

func detachTCX(a Attachment) error {
	err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: a.Device, Program: a.Program, Attach: a.attachType()})
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}
