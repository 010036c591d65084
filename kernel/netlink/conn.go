// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package netlink exchanges messages with the kernel where a library does not do: for
// dumps that are read as they come, and batches of requests that are answered one by one.
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
	// receiveLen is more than the kernel puts into one message of a dump (32 KiB).
	receiveLen = 64 << 10
	// patience bounds a single wait for the kernel, which answers at once; the
	// limit only keeps a lost answer from blocking for ever.
	patience = 5 * time.Second
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
	tv := unix.NsecToTimeval(int64(patience))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		c.Close()
		return nil, os.NewSyscallError("setsockopt", err)
	}
	// Errors then come without a copy of the request. Old kernels have no such
	// option, which only makes for longer answers.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	return c, nil
}

// Close closes the socket. A dump that is not read to its end ends with it.
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

// Receive passes on messages until fn is done.
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
			return fmt.Errorf("receive: a message is longer than %d bytes", len(c.buf))
		}
		if done, err := each(c.buf[:n], fn); done || err != nil {
			return err
		}
	}
}

// each passes on the messages that were received at once.
func each(b []byte, fn func(Message) (done bool, err error)) (done bool, err error) {
	for len(b) >= unix.SizeofNlMsghdr {
		l := int(binary.NativeEndian.Uint32(b))
		if l < unix.SizeofNlMsghdr || l > len(b) {
			return false, errors.New("receive: broken message")
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
