// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sockdiag

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// receiveLen is more than the kernel puts into one message of a dump (32 KiB).
const receiveLen = 64 << 10

// patience bounds a single wait for the kernel, which answers at once; the limit
// only keeps a lost answer from blocking for ever.
const patience = 5 * time.Second

// conn is a sock_diag socket. It belongs to the network namespace of the thread
// that opened it.
type conn struct {
	ctx context.Context // of the one Dump the conn lives for
	fd  int
	seq uint32
	buf []byte
}

func open(ctx context.Context) (*conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		if errors.Is(err, unix.EPROTONOSUPPORT) {
			err = errors.Join(ErrNotSupported, err)
		}
		return nil, fmt.Errorf("open sock_diag socket: %w", err)
	}
	c := &conn{ctx: ctx, fd: fd, buf: make([]byte, receiveLen)}
	tv := unix.NsecToTimeval(int64(patience))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		c.close()
		return nil, fmt.Errorf("open sock_diag socket: %w", err)
	}
	// Errors then come without a copy of the request. Old kernels have no such
	// option, which only makes for longer answers.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	return c, nil
}

func (c *conn) close() { _ = unix.Close(c.fd) }

// dump returns the matching sockets of one family.
func (c *conn) dump(family uint8, f Filter) ([]Socket, error) {
	match := f.matcher()
	for range maxDumps {
		var found []Socket
		interrupted, err := c.exchange(dumpRequest(family, f, c.next()), func(body []byte) error {
			s, err := parseSocket(body)
			if err == nil && (match == nil || match(s.Remote)) {
				found = append(found, s)
			}
			return err
		})
		switch {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP):
			// No handler: the kernel lacks, or cannot load, the protocol's part.
			return nil, errors.Join(ErrNotSupported, err)
		case err != nil || !interrupted:
			return found, err
		}
	}
	return nil, ErrInterrupted
}

// exchange sends a dump request and passes on the body of each answer. Whatever fn
// says, the dump is read to its end, so that the next one starts clean.
func (c *conn) exchange(req []byte, fn func(body []byte) error) (interrupted bool, err error) {
	if err := c.send(req); err != nil {
		return false, err
	}
	for {
		done, rerr := c.receive(func(kind, flags uint16, _ uint32, body []byte) (bool, error) {
			interrupted = interrupted || flags&unix.NLM_F_DUMP_INTR != 0
			switch kind {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				return true, errnoOf(body)
			case msgByFamily:
				if err == nil {
					err = fn(body)
				}
			}
			return false, nil
		})
		if rerr != nil || done {
			return interrupted, errors.Join(err, rerr)
		}
	}
}

// destroy destroys sockets, and counts those that were still there. Each is named
// by its cookie too: a new socket with the same addresses is safe.
func (c *conn) destroy(protocol uint8, sockets []Socket) (destroyed int, err error) {
	var req []byte
	first := c.seq + 1
	for i := range sockets {
		start := len(req)
		req = header(req, msgDestroy, unix.NLM_F_REQUEST|unix.NLM_F_ACK, c.next())
		req = request(req, sockets[i].Family, protocol, 0, &sockets[i].id)
		req = finish(req, start)
	}
	if err := c.send(req); err != nil {
		return 0, err
	}
	var errs []error
	for left := len(sockets); left > 0; {
		_, rerr := c.receive(func(kind, _ uint16, seq uint32, body []byte) (bool, error) {
			if kind != unix.NLMSG_ERROR {
				return false, nil
			}
			left--
			switch err := errnoOf(body); {
			case err == nil:
				destroyed++
			case errors.Is(err, unix.ENOENT):
				// Closed meanwhile.
			case errors.Is(err, unix.EOPNOTSUPP):
				errs = append(errs, errors.Join(ErrNotSupported, err))
			default:
				errs = append(errs, fmt.Errorf("%s: %w", sockets[seq-first].Remote, err))
			}
			return false, nil
		})
		if rerr != nil {
			errs = append(errs, rerr)
			break
		}
	}
	return destroyed, joinDistinct(errs)
}

// joinDistinct spares the reader sixty-four equal lines.
func joinDistinct(errs []error) error {
	seen := map[string]bool{}
	var distinct []error
	for _, e := range errs {
		if !seen[e.Error()] {
			seen[e.Error()] = true
			distinct = append(distinct, e)
		}
	}
	return errors.Join(distinct...)
}

func (c *conn) next() uint32 {
	c.seq++
	return c.seq
}

func (c *conn) send(b []byte) error {
	for {
		err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("sendto", err)
		}
	}
}

// receive reads once and passes on each message; fn returns true after the last.
func (c *conn) receive(fn func(kind, flags uint16, seq uint32, body []byte) (done bool, err error)) (bool, error) {
	if err := c.ctx.Err(); err != nil {
		return false, err
	}
	n, _, flags, _, err := unix.Recvmsg(c.fd, c.buf, nil, 0)
	switch {
	case errors.Is(err, unix.EINTR):
		return false, nil
	case err != nil:
		return false, os.NewSyscallError("recvmsg", err)
	case flags&unix.MSG_TRUNC != 0:
		return false, fmt.Errorf("receive: a message is longer than %d bytes", len(c.buf))
	}
	for b := c.buf[:n]; len(b) >= unix.SizeofNlMsghdr; {
		l := int(binary.NativeEndian.Uint32(b))
		if l < unix.SizeofNlMsghdr || l > len(b) {
			return false, errors.New("receive: broken message")
		}
		kind, mflags := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:])
		done, err := fn(kind, mflags, binary.NativeEndian.Uint32(b[8:]), b[unix.SizeofNlMsghdr:l])
		if done || err != nil {
			return done, err
		}
		b = b[min(len(b), (l+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1)):]
	}
	return false, nil
}

// errnoOf reads the error number that NLMSG_ERROR and NLMSG_DONE start with.
func errnoOf(body []byte) error {
	if len(body) < 4 {
		return nil
	}
	if code := int32(binary.NativeEndian.Uint32(body)); code < 0 {
		return unix.Errno(-code)
	}
	return nil
}
