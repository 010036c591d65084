// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/netlink"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
)

// ErrNoEvents means that the kernel reports no new entries.
var ErrNoEvents = errors.New("conntrack events are off")

const (
	eventsName = settingsDir + "nf_conntrack_events"
	// groupNew is NFNLGRP_CONNTRACK_NEW of include/uapi/linux/netfilter/nfnetlink_compat.h.
	groupNew = 1
	// eventsBuffer holds some 30,000 events, and eventsWait is how long the end of a context
	// can go unnoticed.
	eventsBuffer = 16 << 20
	eventsWait   = 100 * time.Millisecond
	// eventsRest bounds how long older events are read after that.
	eventsRest = 2 * time.Second
)

// EventsOn returns nil if the kernel reports new entries in the network namespace of the calling
// thread to those who listen, and else an error that wraps ErrNoEvents and says what to do.
func EventsOn(root sysctl.Root) error {
	value, err := root.Get(eventsName)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := root.Get(limitName); err != nil {
			return fmt.Errorf("%w: the kernel has no connection tracking, or its module is not loaded; load it with modprobe nf_conntrack", ErrNoEvents)
		}
		return fmt.Errorf("%w: the kernel lacks CONFIG_NF_CONNTRACK_EVENTS", ErrNoEvents)
	case err != nil:
		return fmt.Errorf("read sysctl: %w", err)
	case value == "0":
		// 1 is on, 2 is on while a process listens (Linux 5.19).
		return fmt.Errorf("%w: turn them on with sysctl -w net.netfilter.nf_conntrack_events=1", ErrNoEvents)
	}
	return nil
}

// Events calls each with every entry that is created from now on in the network namespace of the
// calling thread, until ctx is done. The entry is reported when its first packet has passed, so
// translations are in it. If events come faster than each returns, some are lost: then it calls
// lost. After the subscription it calls ready. It needs CAP_NET_ADMIN.
func (Kernel) Events(ctx context.Context, ready func(), each func(Flow), lost func()) error {
	c, err := netlink.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open netfilter socket: %w", err)
	}
	defer c.Close()
	if err := c.Join(groupNew, eventsWait, eventsBuffer); err != nil {
		return fmt.Errorf("subscribe to conntrack events, which needs CAP_NET_ADMIN: %w", err)
	}
	ready()
	// What the kernel has reported before the end of ctx is still read, as far as there is time.
	var end time.Time
	over := func() bool {
		if ctx.Err() == nil {
			return false
		}
		if end.IsZero() {
			end = time.Now().Add(eventsRest)
		}
		return time.Now().After(end)
	}
	for {
		err := c.Receive(context.WithoutCancel(ctx), func(m netlink.Message) (done bool, err error) {
			if m.Kind != msgNew {
				return over(), nil
			}
			f, err := parseFlow(m.Body)
			if err != nil {
				return true, err
			}
			each(f)
			return over(), nil
		})
		switch {
		case err == nil:
			return nil // it is over
		case errors.Is(err, unix.EAGAIN):
			if ctx.Err() != nil {
				return nil
			}
		case errors.Is(err, unix.ENOBUFS):
			lost()
		default:
			return fmt.Errorf("receive conntrack events: %w", err)
		}
	}
}
