// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sockdiag

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/netlink"
)

// conn is a sock_diag socket.
type conn struct {
	*netlink.Conn
	ctx context.Context // of the one Dump the conn lives for
	seq uint32
}

func open(ctx context.Context) (*conn, error) {
	c, err := netlink.Open(unix.NETLINK_SOCK_DIAG)
	if err != nil {
		if errors.Is(err, unix.EPROTONOSUPPORT) {
			err = errors.Join(ErrNotSupported, err)
		}
		return nil, fmt.Errorf("open sock_diag socket: %w", err)
	}
	return &conn{Conn: c, ctx: ctx}, nil
}

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
	if err := c.Send(req); err != nil {
		return false, err
	}
	rerr := c.Receive(c.ctx, func(m netlink.Message) (done bool, _ error) {
		interrupted = interrupted || m.Flags&unix.NLM_F_DUMP_INTR != 0
		switch m.Kind {
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			return true, m.Errno()
		case msgByFamily:
			if err == nil {
				err = fn(m.Body)
			}
		}
		return false, nil
	})
	return interrupted, errors.Join(err, rerr)
}

// destroy destroys sockets, and counts those that were still there. Each is named
// by its cookie too: a new socket with the same addresses is safe.
func (c *conn) destroy(protocol uint8, sockets []Socket) (destroyed int, err error) {
	var req []byte
	first := c.seq + 1
	for i := range sockets {
		start := len(req)
		req = netlink.Begin(req, msgDestroy, unix.NLM_F_REQUEST|unix.NLM_F_ACK, c.next())
		req = request(req, sockets[i].Family, protocol, 0, &sockets[i].id)
		req = netlink.End(req, start)
	}
	if err := c.Send(req); err != nil {
		return 0, err
	}
	var errs []error
	left := len(sockets)
	rerr := c.Receive(c.ctx, func(m netlink.Message) (done bool, _ error) {
		if m.Kind != unix.NLMSG_ERROR {
			return false, nil
		}
		switch err := m.Errno(); {
		case err == nil:
			destroyed++
		case errors.Is(err, unix.ENOENT):
			// Closed meanwhile.
		case errors.Is(err, unix.EOPNOTSUPP):
			errs = append(errs, errors.Join(ErrNotSupported, err))
		default:
			errs = append(errs, fmt.Errorf("%s: %w", sockets[m.Seq-first].Remote, err))
		}
		left--
		return left == 0, nil
	})
	if rerr != nil {
		errs = append(errs, rerr)
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
