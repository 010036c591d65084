// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/netlink"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
)

// changeBatch is the number of requests per message. Their answers must fit into the
// receive buffer of the socket.
const changeBatch = 64

// Kernel is the conntrack table of the calling thread's network namespace. The netlink
// library can delete entries too, but it dumps the table for each call, and does not
// compare ids, so it could delete a newer entry with the same addresses.
type Kernel struct{}

var _ Table = Kernel{}

// Flows implements Table.
func (Kernel) Flows(ctx context.Context, family inet.Family) iter.Seq2[Flow, error] {
	return list(ctx, family, listRequest(family, inet.UDP, false, 1))
}

// Opening lists the TCP connections of a family that were not answered, as Flows does.
func (Kernel) Opening(ctx context.Context, family inet.Family) iter.Seq2[Flow, error] {
	return func(yield func(Flow, error) bool) {
		for f, err := range list(ctx, family, listRequest(family, inet.TCP, true, 1)) {
			if (err != nil || f.Protocol == inet.TCP && !f.Answered) && !yield(f, err) {
				return
			}
		}
	}
}

func list(ctx context.Context, family inet.Family, request []byte) iter.Seq2[Flow, error] {
	return func(yield func(Flow, error) bool) {
		c, err := open()
		if err != nil {
			yield(Flow{}, err)
			return
		}
		defer c.Close()
		interrupted, stopped := false, false
		if err = c.Send(request); err == nil {
			err = c.Receive(ctx, func(m netlink.Message) (done bool, err error) {
				interrupted = interrupted || m.Flags&unix.NLM_F_DUMP_INTR != 0
				switch m.Kind {
				case unix.NLMSG_DONE, unix.NLMSG_ERROR:
					return true, m.Errno()
				case msgNew:
					f, err := parseFlow(m.Body)
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
		// Closing the socket ends a dump that was not read to its end.
		if err != nil && !stopped {
			yield(Flow{}, err)
		}
	}
}

// Find returns the entry in zone 0 whose original direction has these addresses. The error is
// unix.ENOENT if there is none.
func (Kernel) Find(ctx context.Context, protocol inet.Protocol, source, destination netip.AddrPort) (found Flow, err error) {
	c, err := open()
	if err != nil {
		return found, err
	}
	defer c.Close()
	if err := c.Send(getRequest(&Flow{Protocol: protocol, Source: source, Destination: destination}, 1)); err != nil {
		return found, err
	}
	err = c.Receive(ctx, func(m netlink.Message) (done bool, err error) {
		switch m.Kind {
		case msgNew:
			found, err = parseFlow(m.Body)
			return true, err
		case unix.NLMSG_ERROR:
			return true, m.Errno()
		}
		return false, nil
	})
	return found, err
}

// Delete implements Table. Entries that expired meanwhile are no error.
func (Kernel) Delete(ctx context.Context, flows []Flow) (deleted int, err error) {
	return change(ctx, flows, unix.ENOENT, deleteRequest)
}

// CreateEstablished creates entries in zone 0 for established TCP connections, with the timeout of those, and returns how many did
// not exist. An error for one does not stop the others. It needs CAP_NET_ADMIN.
func (Kernel) CreateEstablished(ctx context.Context, root sysctl.Root, flows []Flow) (created int, err error) {
	seconds, err := number(root, settingsDir+establishedName)
	if err != nil {
		return 0, err
	}
	return change(ctx, flows, unix.EEXIST, func(b []byte, f *Flow, seq uint32) []byte { return createRequest(b, f, uint32(seconds), seq) })
}

// change sends a request for each flow, and returns how many succeeded. An error for one, other than the expected one, does not
// stop the others.
func change(ctx context.Context, flows []Flow, expected unix.Errno, request func(b []byte, f *Flow, seq uint32) []byte) (done int, err error) {
	c, err := open()
	if err != nil {
		return 0, err
	}
	defer c.Close()
	failed := 0
	for len(flows) > 0 {
		batch := flows[:min(len(flows), changeBatch)]
		flows = flows[len(batch):]
		if rerr := c.change(ctx, batch, request, func(f *Flow, ferr error) {
			switch {
			case ferr == nil:
				done++
			case errors.Is(ferr, expected):
			default:
				// Report one; the others mostly fail for the same reason.
				failed++
				err = fmt.Errorf("%s: %w", f, ferr)
			}
		}); rerr != nil {
			return done, errors.Join(err, rerr)
		}
	}
	if failed > 1 {
		err = fmt.Errorf("%d entries, last %w", failed, err)
	}
	return done, err
}

// conn is a netlink socket with a buffer for requests.
type conn struct {
	*netlink.Conn
	req []byte
}

func open() (*conn, error) {
	c, err := netlink.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open netfilter socket: %w", err)
	}
	return &conn{Conn: c}, nil
}

// change sends a request for each flow, and calls result with each answer.
func (c *conn) change(ctx context.Context, flows []Flow, request func(b []byte, f *Flow, seq uint32) []byte, result func(*Flow, error)) error {
	c.req = c.req[:0]
	for i := range flows {
		c.req = request(c.req, &flows[i], uint32(i))
	}
	if err := c.Send(c.req); err != nil {
		return err
	}
	left := len(flows)
	return c.Receive(ctx, func(m netlink.Message) (done bool, err error) {
		if m.Kind != unix.NLMSG_ERROR {
			return false, nil
		}
		if m.Seq >= uint32(len(flows)) {
			return true, fmt.Errorf("receive: answer to request %d of %d", m.Seq, len(flows))
		}
		result(&flows[m.Seq], m.Errno())
		left--
		return left == 0, nil
	})
}
