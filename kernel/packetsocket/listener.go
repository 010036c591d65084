// SPDX-License-Identifier: Apache-2.0

// Package packetsocket tells by which devices packets come in that a BPF program selects. It uses
// packet sockets, so it changes nothing in the kernel and leaves nothing behind. These see IP
// packets that reach the network stack of this host, after the BPF programs on devices (XDP, tcx,
// clsact) and before routing and netfilter. Packets that a bridge forwards are not among them;
// those for the bridge itself come in by the bridge.
package packetsocket

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"syscall"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Arrival is a packet that came in.
type Arrival struct {
	Device int // index
	// Source is the sender at the link layer; empty where there is none.
	Source net.HardwareAddr
	// Packet is what the filter let through of it, from the network header on; valid until the
	// next call of Next.
	Packet []byte
}

// Listener is a packet socket.
type Listener struct {
	socket *os.File
	raw    syscall.RawConn
	buf    [256]byte
}

// Listen opens a socket for each family in the network namespace of the calling thread. filter is a
// program of type socket filter; the packets that it sees begin at the network header. It needs
// CAP_NET_RAW.
func Listen(filter *ciliumebpf.Program) (list []*Listener, err error) {
	defer func() {
		if err != nil {
			for _, l := range list {
				_ = l.Close()
			}
			list = nil
		}
	}()
	for _, protocol := range []uint16{unix.ETH_P_IP, unix.ETH_P_IPV6} {
		l, err := listen(filter, protocol)
		if err != nil {
			return list, err
		}
		list = append(list, l)
	}
	return list, nil
}

func listen(filter *ciliumebpf.Program, protocol uint16) (*Listener, error) {
	// With protocol 0 nothing arrives before the filter is there.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	l := &Listener{socket: os.NewFile(uintptr(fd), "packet socket")}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, filter.FD()); err != nil {
		return nil, errors.Join(fmt.Errorf("attach the filter to a packet socket: %w", err), l.Close())
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: hton(protocol)}); err != nil {
		return nil, errors.Join(fmt.Errorf("bind a packet socket: %w", err), l.Close())
	}
	if l.raw, err = l.socket.SyscallConn(); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// hton returns a number whose bytes in memory are in network byte order.
func hton(n uint16) uint16 { return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n)) }

// Next waits for a packet. It returns an error when the listener is closed.
func (l *Listener) Next() (a Arrival, err error) {
	for {
		var from unix.Sockaddr
		var failure error
		var n int
		err = l.raw.Read(func(fd uintptr) bool {
			n, from, failure = unix.Recvfrom(int(fd), l.buf[:], 0)
			return !errors.Is(failure, unix.EAGAIN)
		})
		if err != nil {
			return a, err
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && failure == nil {
			source := ll.Addr[:min(int(ll.Halen), len(ll.Addr))]
			return Arrival{Device: ll.Ifindex, Source: slices.Clone(source), Packet: l.buf[:n]}, nil
		}
		// A device went down, which the kernel reports to all packet sockets.
	}
}

// Close ends Next.
func (l *Listener) Close() error { return l.socket.Close() }
