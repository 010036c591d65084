// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Load is clients that make one connection after the other. One that fails is an error
// of the test, and the end of its client.
type Load struct {
	tb   TB
	ctx  context.Context
	stop context.CancelFunc
	all  sync.WaitGroup

	// Asked counts requests, Failed those that failed, and Again those that were made a
	// second time.
	Asked, Failed, Again atomic.Int64
}

// NewLoad has no clients yet. The caller has to end it before the lab goes.
func NewLoad(tb TB) *Load {
	w := &Load{tb: tb}
	w.ctx, w.stop = context.WithCancel(tb.Context())
	return w
}

// End waits until no client asks any more.
func (w *Load) End() {
	w.stop()
	w.all.Wait()
}

// Pace is how a client asks.
type Pace struct {
	// Every is the time between two connections; 0 for as fast as one can.
	Every time.Duration
	// Tries is how often a request is made at most, as who uses datagrams does; 0 for 1.
	Tries int
}

// Use adds a client for each of the ways, whose names begin with the protocol.
func (w *Load) Use(from *Sandbox, ways map[string]netip.AddrPort, p Pace) {
	for name, to := range ways {
		w.all.Go(func() {
			for w.ctx.Err() == nil {
				w.Asked.Add(1)
				if err := w.ask(from, name[:3], to, p.Tries); err != nil {
					w.Failed.Add(1)
					w.tb.Errorf("%s, %s from %s: %v", time.Now().Format(time.TimeOnly), name, from.Name, err)
					return
				}
				if p.Every == 0 {
					continue
				}
				select {
				case <-w.ctx.Done():
				case <-time.After(p.Every):
				}
			}
		})
	}
}

func (w *Load) ask(from *Sandbox, network string, to netip.AddrPort, tries int) error {
	_, err := from.Ask(w.tb.Context(), network, to)
	for try := 1; err != nil && try < tries; try++ {
		w.Again.Add(1)
		_, err = from.Ask(w.tb.Context(), network, to)
	}
	return err
}

// moreLimit is for clients on a busy machine.
const moreLimit = 30 * time.Second

// More waits until so many more connections were made, or one failed.
func (w *Load) More(n int64) {
	w.tb.Helper()
	enough := w.Asked.Load() + n
	Await(w.tb, moreLimit, "connections", func() error {
		if w.Asked.Load() < enough && w.Failed.Load() == 0 {
			return errors.New("too few")
		}
		return nil
	})
}
