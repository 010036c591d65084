// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Dials counts connections.
type Dials struct {
	All, Failed int
	Slowest     time.Duration
	// Err is why the first one failed.
	Err error
}

// DialOften connects at the given rate per second until the context ends, even if attempts
// fail. Each attempt times out after a second.
func (s *Sandbox) DialOften(ctx context.Context, network string, to netip.AddrPort, rate int) (d Dials) {
	var mu sync.Mutex
	var running sync.WaitGroup
	tick := time.NewTicker(time.Second / time.Duration(rate))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			running.Wait()
			return d
		case <-tick.C:
		}
		running.Go(func() {
			began := time.Now()
			try, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			c, err := s.Dial(try, network, to)
			took := time.Since(began)
			if err == nil {
				if tcp, ok := c.(*net.TCPConn); ok {
					_ = tcp.SetLinger(0) // no TIME_WAIT: ports would run out
				}
				_ = c.Close()
			}
			mu.Lock()
			defer mu.Unlock()
			d.All++
			d.Slowest = max(d.Slowest, took)
			if err != nil {
				d.Failed++
				if d.Err == nil {
					d.Err = err
				}
			}
		})
	}
}
