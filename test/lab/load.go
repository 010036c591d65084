// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Load runs clients that make one connection after the other. A failed connection fails the
// test and ends its client.
type Load struct {
	tb   TB
	ctx  context.Context
	stop context.CancelFunc
	all  sync.WaitGroup
	from time.Time

	// Asked counts requests, Failed those that failed, Again those that were
	// repeated, and Told those that were repeated because the kernel destroyed a UDP socket whose endpoint was
	// removed: its client was told at once.
	Asked, Failed, Again, Told atomic.Int64

	mu       sync.Mutex
	repeated []string // why the first ones were
}

// repeatedKept is how many reasons of repeated requests are kept.
const repeatedKept = 20

// Repeated says of the first requests that were repeated when and why.
func (w *Load) Repeated() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.repeated)
}

// NewLoad makes a Load without clients. The caller must end it before the lab is closed.
func NewLoad(tb TB) *Load {
	w := &Load{tb: tb, from: time.Now()}
	w.ctx, w.stop = context.WithCancel(tb.Context())
	return w
}

// PerSecond is how many requests were made each second since the Load was made.
func (w *Load) PerSecond() int64 {
	return int64(float64(w.Asked.Load()) / time.Since(w.from).Seconds())
}

// End stops all clients and waits for them.
func (w *Load) End() {
	w.stop()
	w.all.Wait()
}

// Pace is how often a client sends requests.
type Pace struct {
	// Every is the time between two connections; 0 means without a pause.
	Every time.Duration
	// Tries is how often a request is sent at most by UDP, whose clients repeat theirs; 0 means once.
	Tries int
	// Reconnect repeats connections as well.
	Reconnect bool
}

// Use adds a client for each target. The names of targets begin with the protocol.
func (w *Load) Use(from *Sandbox, ways map[string]netip.AddrPort, p Pace) {
	for name, to := range ways {
		w.all.Go(func() {
			for w.ctx.Err() == nil {
				w.Asked.Add(1)
				if err := w.ask(from, name, to, p); err != nil {
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

// ask returns the error of the last try.
func (w *Load) ask(from *Sandbox, name string, to netip.AddrPort, p Pace) error {
	network := name[:3]
	_, err := from.Ask(w.tb.Context(), network, to)
	for try := 1; err != nil && try < p.Tries && (network == "udp" || p.Reconnect); try++ {
		if network == "udp" && errors.Is(err, syscall.ECONNABORTED) {
			w.Told.Add(1)
		} else {
			w.repeat(fmt.Sprintf("%s, %s from %s: %v", time.Now().Format(time.TimeOnly), name, from.Name, err))
		}
		_, err = from.Ask(w.tb.Context(), network, to)
	}
	return err
}

func (w *Load) repeat(why string) {
	w.Again.Add(1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.repeated) < repeatedKept {
		w.repeated = append(w.repeated, why)
	}
}

// moreLimit is for clients on a busy machine.
const moreLimit = 30 * time.Second

// More waits until the given number of further connections were made, or one failed.
func (w *Load) More(n int64) {
	w.tb.Helper()
	enough := w.Asked.Load() + n
	Await(w.tb, moreLimit, "connections", func() error {
		if w.Asked.Load() < enough && w.Failed.Load() == 0 {
			return errors.New("too few connections")
		}
		return nil
	})
}
