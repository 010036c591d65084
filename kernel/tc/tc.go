// SPDX-License-Identifier: Apache-2.0

package tc

import (
	"errors"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Direction is that of packets, as the device sees it.
type Direction int

// Ingress is what the device receives, Egress what is sent by it.
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
	// TCX attaches to the device itself, from Linux 6.6 on.
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

// ErrNoDevice says that the network namespace has no such device, or no more.
var ErrNoDevice = errors.New("no such device")

// Attachment is a program on a device.
type Attachment struct {
	Device int // its index
	Direction
	Method
	Program *ciliumebpf.Program

	filter netlink.FilterAttrs // of Clsact: what names the filter
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

// Find returns the programs on a device that are ours, attached by either method. The
// caller closes them. It needs CAP_SYS_ADMIN, since the kernel opens programs by id for
// nobody else.
func Find(device int, d Direction, ours func(*ciliumebpf.Program) bool) (found []Attachment, err error) {
	defer func() {
		if err != nil {
			Close(found)
			found, err = nil, failed(fmt.Sprintf("find programs of device %d", device), err)
		}
	}()
	// The library takes a missing privilege for a missing feature, and then
	// nothing would look like nothing attached.
	if _, err := ciliumebpf.ProgramGetNextID(0); errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("%w: CAP_SYS_ADMIN is needed", err)
	}
	// Where there is no tcx, and for filters, a device that is gone looks like one
	// without programs.
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

// Attach puts a program on a device. It replaces one of the earlier ones in place if
// that was attached by the same method, and takes the others off once it is there. A
// program that is there already stays as it is. The earlier ones are what Find returned
// just now: if one that is to be replaced went away since, that is an error, and
// everything as it was.
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

// choose picks the earlier attachment whose place a program takes, -1 for none. There
// says that it is that program already.
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

// Detach takes a program off its device. One that is not there any more is no error,
// unless the device is gone: a tcx program may be with it in another namespace.
func Detach(a Attachment) error {
	var err error
	if a.Method == Clsact {
		err = detachFilter(a)
	} else {
		err = detachTCX(a)
	}
	return failed("detach "+a.String(), err)
}

// failed adds the step to an error, and says in one way that the device is gone.
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
