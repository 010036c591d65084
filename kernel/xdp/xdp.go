// SPDX-License-Identifier: Apache-2.0

// Package xdp attaches programs to devices in native mode: in the driver, before the kernel makes a packet of its own. An attachment
// belongs to the device and outlives the process. A device has one program, so one of others is never replaced. All functions work in
// the network namespace of the calling thread.
package xdp

import (
	"errors"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Errors of this package.
var (
	// ErrNoDevice means that the device does not exist.
	ErrNoDevice = errors.New("there is no such device")
	// ErrOccupied means that the device has another program.
	ErrOccupied = errors.New("the device has another program")
	// ErrUnsupported means that the driver of the device has no native mode, at least as the device is set up now.
	ErrUnsupported = errors.New("the driver does not support it")
)

// State is what a device has.
type State struct {
	Program ciliumebpf.ProgramID // 0 for none
	// Native says that the driver runs it, else the kernel (generic mode) or the device.
	Native bool
}

// Look returns what a device has. With programs in several modes, it is the native one.
func Look(device int) (State, error) {
	l, err := netlink.LinkByIndex(device)
	if err != nil {
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			err = ErrNoDevice
		}
		return State{}, fmt.Errorf("look for XDP programs on device %d: %w", device, err)
	}
	x := l.Attrs().Xdp
	if x == nil || !x.Attached {
		return State{}, nil
	}
	return State{Program: ciliumebpf.ProgramID(x.ProgId), Native: x.AttachMode == nl.XDP_ATTACHED_DRV}, nil
}

// Attach attaches a program in native mode, in place of an earlier one, or where that is nil of none (Linux 5.7).
func Attach(device int, p, earlier *ciliumebpf.Program) error {
	flags := uint32(nl.XDP_FLAGS_DRV_MODE)
	attrs := map[int]int32{nl.IFLA_XDP_FD: int32(p.FD())}
	if earlier != nil {
		flags |= replace
		attrs[expectedFD] = int32(earlier.FD())
	} else {
		flags |= nl.XDP_FLAGS_UPDATE_IF_NOEXIST
	}
	return set(device, "attach an XDP program to", attrs, flags)
}

// Detach takes a program off a device. It succeeds if the device has another one, or none.
func Detach(device int, p *ciliumebpf.Program) error {
	err := set(device, "detach an XDP program from", map[int]int32{nl.IFLA_XDP_FD: -1, expectedFD: int32(p.FD())}, nl.XDP_FLAGS_DRV_MODE|replace)
	if errors.Is(err, ErrOccupied) || errors.Is(err, ErrNoDevice) {
		return nil
	}
	return err
}

// Of include/uapi/linux/if_link.h.
const (
	expectedFD = 8      // IFLA_XDP_EXPECTED_FD
	replace    = 1 << 4 // XDP_FLAGS_REPLACE
)

func set(device int, what string, fds map[int]int32, flags uint32) error {
	request := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	message := nl.NewIfInfomsg(unix.AF_UNSPEC)
	message.Index = int32(device)
	request.AddData(message)
	attr := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
	for kind, fd := range fds {
		attr.AddRtAttr(kind, nl.Uint32Attr(uint32(fd)))
	}
	attr.AddRtAttr(nl.IFLA_XDP_FLAGS, nl.Uint32Attr(flags))
	request.AddData(attr)
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENODEV):
		err = ErrNoDevice
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EEXIST):
		err = errors.Join(ErrOccupied, err)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		err = errors.Join(ErrUnsupported, err)
	}
	return fmt.Errorf("%s device %d: %w", what, device, err)
}
