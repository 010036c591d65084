// SPDX-License-Identifier: Apache-2.0

package tc

import (
	"errors"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Direction is the direction of packets on a device.
type Direction int

// Ingress packets are received by the device, Egress packets are sent by it.
const (
	Ingress Direction = iota
	Egress
)

func (d Direction) String() string {
	if d == Egress {
		return "egress"
	}
	return "ingress"
}

// Method is a way to attach a program.
type Method int

const (
	// TCX attaches to the device itself (Linux 6.6).
	TCX Method = iota
	// Clsact makes the program a filter of a clsact qdisc.
	Clsact
)

func (m Method) String() string {
	if m == Clsact {
		return "clsact"
	}
	return "tcx"
}

// ErrNoDevice means that the network namespace has no such device.
var ErrNoDevice = errors.New("no such device")

// Attachment is a program on a device.
type Attachment struct {
	Device int // its index
	Direction
	Method
	Program *ciliumebpf.Program

	filter netlink.FilterAttrs // identifies the filter, for Clsact
}

func (a Attachment) String() string { return where(a.Device, a.Direction, a.Method) }

func where(device int, d Direction, m Method) string {
	return fmt.Sprintf("%s %s of device %d", m, d, device)
}

// Close closes the programs of a list; they stay attached.
func Close(list []Attachment) {
	for _, a := range list {
		a.Program.Close()
	}
}

// Find returns the programs on a device for which ours returns true, attached by either
// method. The caller closes them. It needs CAP_SYS_ADMIN, which the kernel requires for
// opening programs by id.
func Find(device int, d Direction, ours func(*ciliumebpf.Program) bool) (found []Attachment, err error) {
	defer func() {
		if err != nil {
			Close(found)
			found, err = nil, failed(fmt.Sprintf("find programs of device %d", device), err)
		}
	}()
	// The library reports a missing privilege as a missing feature, which would look as
	// if nothing was attached.
	if _, err := ciliumebpf.ProgramGetNextID(0); errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("%w: CAP_SYS_ADMIN is required", err)
	}
	// Without tcx, and for filters, a deleted device looks like one without programs.
	if _, err := netlink.LinkByIndex(device); err != nil {
		return nil, err
	}
	for _, find := range []func(int, Direction, func(*ciliumebpf.Program) bool) ([]Attachment, error){findTCX, findFilters} {
		some, err := find(device, d, ours)
		found = append(found, some...)
		if err != nil {
			return found, err
		}
	}
	return found, nil
}

// Attach attaches a program to a device. It replaces one of the earlier programs in place
// if that was attached by the same method, and then detaches the others. If the program
// is attached already, it stays. Earlier is the result of a preceding Find: if the
// program to replace was detached since, Attach fails and changes nothing.
func Attach(device int, d Direction, m Method, p *ciliumebpf.Program, earlier []Attachment) error {
	kept, there, err := choose(m, p, earlier)
	if err != nil {
		return failed("attach "+where(device, d, m), err)
	}
	if !there {
		var replaced *Attachment
		if kept >= 0 {
			replaced = &earlier[kept]
		}
		if m == Clsact {
			err = attachFilter(device, d, p, replaced)
		} else {
			err = attachTCX(device, d, p, replaced)
		}
		if err != nil {
			return failed("attach "+where(device, d, m), err)
		}
	}
	var errs []error
	for i, e := range earlier {
		if i != kept {
			errs = append(errs, Detach(e))
		}
	}
	return errors.Join(errs...)
}

// choose picks the earlier attachment to replace, or -1. There reports that the program
// is attached already.
func choose(m Method, p *ciliumebpf.Program, earlier []Attachment) (kept int, there bool, err error) {
	kept = -1
	for i, e := range earlier {
		if e.Method != m {
			continue
		}
		same, err := sameProgram(e.Program, p)
		if err != nil {
			return -1, false, err
		}
		if same {
			return i, true, nil
		}
		if kept < 0 {
			kept = i
		}
	}
	return kept, false, nil
}

func sameProgram(a, b *ciliumebpf.Program) (bool, error) {
	var ids [2]ciliumebpf.ProgramID
	for i, p := range []*ciliumebpf.Program{a, b} {
		info, err := p.Info()
		if err != nil {
			return false, err
		}
		ids[i], _ = info.ID()
	}
	return ids[0] == ids[1], nil
}

// Detach detaches a program from its device. A program that is detached already is no
// error. A missing device is, since it may have moved to another namespace with its tcx
// program.
func Detach(a Attachment) error {
	var err error
	if a.Method == Clsact {
		err = detachFilter(a)
	} else {
		err = detachTCX(a)
	}
	return failed("detach "+a.String(), err)
}

// failed adds the step to an error, and maps the errors for a missing device to
// ErrNoDevice.
func failed(step string, err error) error {
	_, notFound := errors.AsType[netlink.LinkNotFoundError](err)
	switch {
	case err == nil:
		return nil
	case notFound, errors.Is(err, unix.ENODEV):
		return fmt.Errorf("%s: %w", step, ErrNoDevice)
	}
	return fmt.Errorf("%s: %w", step, err)
}
