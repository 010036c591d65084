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
	seq uint32
}

func open() (*conn, error) {
	c, err := netlink.Open(unix.NETLINK_SOCK_DIAG)
	if err != nil {
		if errors.Is(err, unix.EPROTONOSUPPORT) {
			err = errors.Join(ErrNotSupported, err)
		}
		return nil, fmt.Errorf("open sock_diag socket: %w", err)
	}
	return &conn{Conn: c}, nil
}

// dump returns the matching sockets of one family.
func (c *conn) dump(ctx context.Context, family uint8, f Filter) ([]Socket, error) {
	match := f.matcher()
	for range maxDumps {
		var found []Socket
		interrupted, err := c.exchange(ctx, dumpRequest(family, f, c.next()), func(body []byte) error {
			s, err := parseSocket(body)
			if err == nil && (match == nil || match(s.Remote)) {
				found = append(found, s)
			}
			return err
		})
		switch {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP):
			// No handler: the kernel cannot load the diag module of the protocol.
			return nil, errors.Join(ErrNotSupported, err)
		case err != nil || !interrupted:
			return found, err
		}
	}
	return nil, ErrInterrupted
}

// exchange sends a dump request and calls fn with the body of each answer. It reads the
// dump to its end even if fn fails, so that no answer is left for the next request.
func (c *conn) exchange(ctx context.Context, req []byte, fn func(body []byte) error) (interrupted bool, err error) {
	if err := c.Send(req); err != nil {
		return false, err
	}
	rerr := c.Receive(ctx, func(m netlink.Message) (done bool, _ error) {
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

// destroy destroys sockets and returns how many still existed. Requests include the
// cookie, so a new socket with the same addresses is not destroyed.
func (c *conn) destroy(ctx context.Context, protocol uint8, sockets []Socket) (destroyed int, err error) {
	var req []byte
	first := c.seq + 1
	for i := range sockets {
		start := len(req)
		req = netlink.Begin(req, msgDestroy, unix.NLM_F_REQUEST|unix.NLM_F_ACK, c.next())
		req = request(req, sockets[i].Family, protocol, 0, 0, &sockets[i].id)
		req = netlink.End(req, start)
	}
	if err := c.Send(req); err != nil {
		return 0, err
	}
	var errs []error
	left := len(sockets)
	rerr := c.Receive(ctx, func(m netlink.Message) (done bool, _ error) {
		if m.Kind != unix.NLMSG_ERROR {
			return false, nil
		}
		switch err := m.Errno(); {
		case err == nil:
			destroyed++
		case errors.Is(err, unix.ENOENT):
			// It was closed in the meantime.
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

// joinDistinct joins errors without repeating equal messages.
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
