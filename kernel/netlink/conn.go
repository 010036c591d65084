// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package netlink exchanges netlink messages with the kernel. It covers what the netlink
// library does not: dumps that are processed while they arrive, and batches of requests
// with one answer each.
package netlink

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// receiveLen is larger than the largest message of a dump (32 KiB).
	receiveLen = 64 << 10
	// receiveTimeout bounds a single wait. The kernel answers immediately; the timeout
	// only prevents a lost answer from blocking forever.
	receiveTimeout = 5 * time.Second
)

// Conn is a netlink socket. It belongs to the network namespace of the thread that
// opened it.
type Conn struct {
	fd  int
	buf []byte
}

// Open opens a socket for a protocol, such as unix.NETLINK_NETFILTER.
func Open(protocol int) (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	c := &Conn{fd: fd, buf: make([]byte, receiveLen)}
	tv := unix.NsecToTimeval(int64(receiveTimeout))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		c.Close()
		return nil, os.NewSyscallError("setsockopt", err)
	}
	// Error answers then omit the copy of the request (Linux 4.2). Without the option,
	// answers are only longer.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	return c, nil
}

// Join subscribes to a multicast group. A single wait of Receive ends after the given time with
// EAGAIN, so that the caller can do something else. The buffer is as large as this process may
// make it, up to the size in bytes: what does not fit is lost, and Receive returns ENOBUFS.
func (c *Conn) Join(group int, wait time.Duration, buffer int) error {
	if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer); err != nil {
		_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, buffer)
	}
	tv := unix.NsecToTimeval(int64(wait))
	if err := unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	// A socket without an address counts as the kernel's own, which gets no notifications.
	if err := unix.Bind(c.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("bind", err)
	}
	return os.NewSyscallError("setsockopt", unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group))
}

// Close closes the socket, and ends a dump that was not read to its end.
func (c *Conn) Close() { _ = unix.Close(c.fd) }

// Send sends messages.
func (c *Conn) Send(b []byte) error {
	for {
		err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("sendto", err)
		}
	}
}

// Receive calls fn for each message until fn returns done or an error.
func (c *Conn) Receive(ctx context.Context, fn func(Message) (done bool, err error)) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, _, flags, _, err := unix.Recvmsg(c.fd, c.buf, nil, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return os.NewSyscallError("recvmsg", err)
		case flags&unix.MSG_TRUNC != 0:
			return fmt.Errorf("receive: message longer than %d bytes", len(c.buf))
		}
		if done, err := each(c.buf[:n], fn); done || err != nil {
			return err
		}
	}
}

// each calls fn for each message of one datagram.
func each(b []byte, fn func(Message) (done bool, err error)) (done bool, err error) {
	for len(b) >= unix.SizeofNlMsghdr {
		l := int(binary.NativeEndian.Uint32(b))
		if l < unix.SizeofNlMsghdr || l > len(b) {
			return false, errors.New("receive: malformed message")
		}
		m := Message{
			Kind: binary.NativeEndian.Uint16(b[4:]), Flags: binary.NativeEndian.Uint16(b[6:]),
			Seq: binary.NativeEndian.Uint32(b[8:]), Body: b[unix.SizeofNlMsghdr:l],
		}
		if done, err := fn(m); done || err != nil {
			return done, err
		}
		b = b[min(len(b), align(l)):]
	}
	return false, nil
}
