// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

const (
	// receiveLen is more than the kernel puts into one message of a dump (32 KiB).
	receiveLen = 64 << 10
	// patience bounds a single wait for the kernel, which answers at once; the
	// limit only keeps a lost answer from blocking for ever.
	patience = 5 * time.Second
	// deleteBatch is how many requests go into one message; their answers must fit
	// into the socket's receive buffer.
	deleteBatch = 64
)

// Kernel is the conntrack of the calling thread's network namespace. The netlink
// library has one as well, but deletes by a dump for each call, and without the ids
// that keep a newer entry with the same addresses safe.
type Kernel struct{}

var _ Table = Kernel{}

// Flows implements Table.
func (Kernel) Flows(ctx context.Context, family proxier.Family) iter.Seq2[Flow, error] {
	return func(yield func(Flow, error) bool) {
		c, err := open()
		if err != nil {
			yield(Flow{}, err)
			return
		}
		defer c.close()
		interrupted, stopped := false, false
		if err = c.send(listRequest(family, 1)); err == nil {
			err = c.receive(ctx, func(m message) (done bool, err error) {
				interrupted = interrupted || m.flags&unix.NLM_F_DUMP_INTR != 0
				switch m.kind {
				case unix.NLMSG_DONE, unix.NLMSG_ERROR:
					return true, m.errno()
				case msgNew:
					f, err := parseFlow(m.body)
					if err != nil {
						return true, err
					}
					stopped = !yield(f, nil)
				}
				return stopped, nil
			})
		}
		if err == nil && interrupted {
			err = ErrInterrupted
		}
		// A dump that is cut short ends with its socket.
		if err != nil && !stopped {
			yield(Flow{}, err)
		}
	}
}

// Delete implements Table.
func (Kernel) Delete(ctx context.Context, flows []Flow) (deleted int, err error) {
	c, err := open()
	if err != nil {
		return 0, err
	}
	defer c.close()
	failed := 0
	for len(flows) > 0 {
		batch := flows[:min(len(flows), deleteBatch)]
		flows = flows[len(batch):]
		if rerr := c.delete(ctx, batch, func(f *Flow, ferr error) {
			switch {
			case ferr == nil:
				deleted++
			case errors.Is(ferr, unix.ENOENT):
				// Gone meanwhile.
			default:
				// One is named; the others will mostly have the same.
				failed++
				err = fmt.Errorf("%s: %w", f, ferr)
			}
		}); rerr != nil {
			return deleted, errors.Join(err, rerr)
		}
	}
	if failed > 1 {
		err = fmt.Errorf("%d entries, last %w", failed, err)
	}
	return deleted, err
}

// conn is a netlink socket. It belongs to the network namespace of the thread that
// opened it.
type conn struct {
	fd  int
	req []byte
	buf []byte
}

func open() (*conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open netfilter socket: %w", err)
	}
	c := &conn{fd: fd, buf: make([]byte, receiveLen)}
	tv := unix.NsecToTimeval(int64(patience))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		c.close()
		return nil, fmt.Errorf("open netfilter socket: %w", err)
	}
	// Errors then come without a copy of the request. Old kernels have no such
	// option, which only makes for longer answers.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	return c, nil
}

func (c *conn) close() { _ = unix.Close(c.fd) }

// delete deletes entries, and tells what became of each.
func (c *conn) delete(ctx context.Context, flows []Flow, told func(*Flow, error)) error {
	c.req = c.req[:0]
	for i := range flows {
		c.req = deleteRequest(c.req, &flows[i], uint32(i))
	}
	if err := c.send(c.req); err != nil {
		return err
	}
	left := len(flows)
	return c.receive(ctx, func(m message) (done bool, err error) {
		if m.kind != unix.NLMSG_ERROR {
			return false, nil
		}
		if m.seq >= uint32(len(flows)) {
			return true, fmt.Errorf("receive: answer to request %d of %d", m.seq, len(flows))
		}
		told(&flows[m.seq], m.errno())
		left--
		return left == 0, nil
	})
}

func (c *conn) send(b []byte) error {
	for {
		err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("sendto", err)
		}
	}
}

// message is one of the kernel's answers.
type message struct {
	kind, flags uint16
	seq         uint32
	body        []byte
}

// errno reads the error number that NLMSG_ERROR and NLMSG_DONE start with.
func (m message) errno() error {
	if len(m.body) < 4 {
		return nil
	}
	if code := int32(binary.NativeEndian.Uint32(m.body)); code < 0 {
		return unix.Errno(-code)
	}
	return nil
}

// receive passes on messages until fn is done.
func (c *conn) receive(ctx context.Context, fn func(message) (done bool, err error)) error {
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
		for b := c.buf[:n]; len(b) >= unix.SizeofNlMsghdr; {
			l := int(binary.NativeEndian.Uint32(b))
			if l < unix.SizeofNlMsghdr || l > len(b) {
				return errors.New("receive: broken message")
			}
			m := message{
				kind: binary.NativeEndian.Uint16(b[4:]), flags: binary.NativeEndian.Uint16(b[6:]),
				seq: binary.NativeEndian.Uint32(b[8:]), body: b[unix.SizeofNlMsghdr:l],
			}
			if done, err := fn(m); done || err != nil {
				return err
			}
			b = b[min(len(b), (l+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1)):]
		}
	}
}
