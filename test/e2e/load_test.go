// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// load is clients that make one connection after the other. One that fails is an error
// of the test, and the end of its client.
type load struct {
	t    *testing.T
	ctx  context.Context
	stop context.CancelFunc
	all  sync.WaitGroup

	asked, failed atomic.Int64
	// again counts requests that were made a second time.
	again atomic.Int64
}

// newLoad has no clients yet. The caller has to end it before the lab goes.
func newLoad(t *testing.T) *load {
	w := &load{t: t}
	w.ctx, w.stop = context.WithCancel(t.Context())
	return w
}

// end waits until no client asks any more.
func (w *load) end() {
	w.stop()
	w.all.Wait()
}

// how a client asks.
type how struct {
	// pace is the time between two connections; 0 for as fast as one can.
	pace time.Duration
	// tries is how often a request is made at most, as who uses datagrams does; 0 for 1.
	tries int
}

// use adds a client for each of the ways, whose names begin with the protocol.
func (w *load) use(from *lab.Sandbox, ways map[string]netip.AddrPort, h how) {
	for name, to := range ways {
		w.all.Go(func() {
			for w.ctx.Err() == nil {
				w.asked.Add(1)
				if err := w.ask(from, name[:3], to, h.tries); err != nil {
					w.failed.Add(1)
					w.t.Errorf("%s, %s from %s: %v", time.Now().Format(time.TimeOnly), name, from.Name, err)
					return
				}
				if h.pace == 0 {
					continue
				}
				select {
				case <-w.ctx.Done():
				case <-time.After(h.pace):
				}
			}
		})
	}
}

func (w *load) ask(from *lab.Sandbox, network string, to netip.AddrPort, tries int) error {
	_, err := from.Ask(w.t.Context(), network, to)
	for try := 1; err != nil && try < tries; try++ {
		w.again.Add(1)
		_, err = from.Ask(w.t.Context(), network, to)
	}
	return err
}

// more waits until so many more connections were made, or one failed.
func (w *load) more(n int64) {
	w.t.Helper()
	enough := w.asked.Load() + n
	await(w.t, "connections", func() error {
		if w.asked.Load() < enough && w.failed.Load() == 0 {
			return errors.New("too few")
		}
		return nil
	})
}
