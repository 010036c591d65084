// SPDX-License-Identifier: Apache-2.0

// Package rootlock is a lock of a network namespace that only privileged processes can hold, unlike one on a
// file that every user may open. The kernel releases it when its process ends. It is a fanout group of packet
// sockets with room for one: no packets of its protocol are sent, so it costs nothing.
package rootlock

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// ErrHeld says that another process holds the lock.
var ErrHeld = errors.New("another process holds the lock")

// protocol is one of those for local experiments (IEEE 802).
const protocol = 0x88b5

// Lock is held until it is closed.
type Lock struct{ socket *os.File }

// Acquire takes the lock with that number in the network namespace of the calling thread. It needs
// CAP_NET_RAW, Linux 5.12 and a loopback device that is up.
func Acquire(number uint16) (*Lock, error) {
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		return nil, fmt.Errorf("find the loopback device: %w", err)
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	l := &Lock{os.NewFile(uintptr(fd), "lock")}
	big := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, protocol))
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: big, Ifindex: lo.Index}); err != nil {
		return nil, errors.Join(fmt.Errorf("bind a packet socket: %w", err), l.Close())
	}
	// struct fanout_args of linux/if_packet.h, whose first two fields are in this order on
	// little-endian hosts, and the other way round on others.
	var args [8]byte
	binary.NativeEndian.PutUint32(args[:], uint32(number)) // type and flags: PACKET_FANOUT_HASH
	binary.NativeEndian.PutUint32(args[4:], 1)             // max_num_members
	switch err := unix.SetsockoptString(fd, unix.SOL_PACKET, unix.PACKET_FANOUT, string(args[:])); {
	case errors.Is(err, unix.ENOSPC):
		return nil, errors.Join(ErrHeld, l.Close())
	case err != nil:
		return nil, errors.Join(fmt.Errorf("join a fanout group: %w", err), l.Close())
	}
	return l, nil
}

// Close releases the lock. It may be called on nil.
func (l *Lock) Close() error {
	if l == nil {
		return nil
	}
	return l.socket.Close()
}
