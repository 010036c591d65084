// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// crowd plays a cell of kind Crowd: connections of the client, and in turn as many from a pod to
// the same endpoint, which the node masquerades. All of them work, to the end.
func (w *World) crowd(ctx context.Context, c Cell) error {
	ctx, cancel := context.WithTimeout(ctx, 4*w.limit(c))
	defer cancel()
	var flows []flow
	defer func() {
		for _, f := range flows {
			_ = f.Close()
		}
	}()
	direct := netip.AddrPortFrom(address(w.There.Sandbox, c.family()), requestPort)
	for i := range 2 * w.Profile.Crowd {
		from, to := w.client(c.Client), w.target(c)
		if i%2 == 1 {
			from, to = w.Pod.Sandbox, direct
		}
		f, err := w.dialTo(ctx, c, from, to)
		if err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
		flows = append(flows, f)
	}
	for i, f := range flows {
		if reply, err := lab.AskConn(ctx, f.Conn); err != nil || reply != f.first {
			return fmt.Errorf("connection %d of %d again: %v %w", i, len(flows), reply, err)
		}
	}
	return nil
}

// PlayGap plays the cells of kind Gap: the first packet of a connection comes while the node has
// no route to the other one.
func (w *World) PlayGap(ctx context.Context, cells []Cell) (Results, error) {
	results := Results{}
	if len(cells) == 0 {
		return results, nil
	}
	if err := w.apply(ctx, w.Node.Sandbox, w.Gap, w.Node, nil); err != nil {
		return nil, err
	}
	outcomes := map[Cell]chan error{}
	for _, c := range cells {
		seen, err := w.Node.Capture(lab.Uplink, func(p lab.Captured) bool { return !p.Outgoing && p.Destination() == w.target(c) })
		if err != nil {
			return nil, err
		}
		outcomes[c] = make(chan error, 1)
		go func() { outcomes[c] <- w.insist(ctx, c) }()
		if _, err := seen.Expect(ctx, func(lab.Captured) bool { return true }); err != nil {
			results[c] = err
		}
		if err := seen.Close(); err != nil {
			return nil, err
		}
	}
	if err := w.apply(ctx, w.Node.Sandbox, w.Back, w.Node, nil); err != nil {
		return nil, err
	}
	for _, c := range cells {
		results[c] = errors.Join(results[c], <-outcomes[c])
	}
	return results, nil
}

// insist sends requests over one socket until there is an answer. A TCP client dials again after
// an ICMP error.
func (w *World) insist(ctx context.Context, c Cell) error {
	ctx, cancel := context.WithTimeout(ctx, w.limit(c))
	defer cancel()
	for {
		conn, err := w.client(c.Client).Dial(ctx, c.protocol(), w.target(c))
		for err == nil {
			once, stop := context.WithTimeout(ctx, silence/2)
			if _, err = lab.AskConn(once, conn); err == nil {
				stop()
				return conn.Close()
			}
			if c.protocol() == "udp" && ctx.Err() == nil {
				<-once.Done() // ICMP errors arrive at once
				err = nil
			}
			stop()
		}
		if conn != nil {
			_ = conn.Close()
		}
		if ctx.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(silence / 5):
		}
	}
}
