// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// askLimit is far above the time for an answer, and below the delay after a lost SYN.
const askLimit = 800 * time.Millisecond

// client is where requests come from.
type client struct {
	label string
	*lab.Sandbox
}

// target is an address of the Service.
type target struct {
	network string
	addr    netip.AddrPort
}

var targets = []target{
	{"tcp", netip.AddrPortFrom(serviceIP4, servicePortTCP)},
	{"tcp", netip.AddrPortFrom(serviceIP6, servicePortTCP)},
	{"udp", netip.AddrPortFrom(serviceIP4, servicePortUDP)},
	{"udp", netip.AddrPortFrom(serviceIP6, servicePortUDP)},
}

func (t target) kind() string {
	if t.network == "tcp" {
		return "TCP"
	}
	return "UDP"
}

func (t target) String() string { return t.kind() + " " + t.addr.String() }

func (c client) ask(to target) (lab.Reply, error) {
	ctx, cancel := context.WithTimeout(context.Background(), askLimit)
	defer cancel()
	reply, err := c.Ask(ctx, to.network, to.addr)
	if to.network == "udp" && (errors.Is(err, syscall.ECONNABORTED) || errors.Is(err, syscall.EDESTADDRREQ)) {
		// The proxy closed the socket, since its endpoint was removed before the answer, or even before the
		// request. Retry, as UDP clients do.
		reply, err = c.Ask(ctx, to.network, to.addr)
	}
	return reply, err
}

// tally counts the results of the load.
type tally struct {
	asked   int // requests with a connection or socket of their own
	steady  int // requests on the established connection
	failed  int
	failure error // the last
}

func (t tally) since(before tally) tally {
	return tally{t.asked - before.asked, t.steady - before.steady, t.failed - before.failed, t.failure}
}

// load sends requests continuously, from each client to each target.
type load struct {
	done    chan struct{}
	workers sync.WaitGroup

	mu    sync.Mutex
	count tally
	// first is when a pod first answered. last is when the last request that it answered
	// was sent.
	first, last map[string]time.Time
}

// pace is the interval of requests; it leaves CPU time for the rest of the machine.
const pace = 2 * time.Millisecond

func startLoad(from []client, to []target) *load {
	l := &load{done: make(chan struct{}), first: map[string]time.Time{}, last: map[string]time.Time{}}
	for _, c := range from {
		for _, t := range to {
			l.workers.Go(func() { l.every(func() { l.once(c, t) }) })
		}
	}
	l.workers.Go(func() { l.stay(from[0], to[0]) })
	return l
}

func (l *load) every(do func()) {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for {
		select {
		case <-l.done:
			return
		case <-tick.C:
			do()
		}
	}
}

func (l *load) once(c client, t target) {
	sent := time.Now()
	reply, err := c.ask(t)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count.asked++
	if err != nil {
		l.fail(err)
		return
	}
	if l.first[reply.Server].IsZero() {
		l.first[reply.Server] = time.Now()
	}
	if sent.After(l.last[reply.Server]) {
		l.last[reply.Server] = sent
	}
}

// stay keeps one connection open and sends requests on it.
func (l *load) stay(c client, t target) {
	conn, err := c.Dial(context.Background(), t.network, t.addr)
	if err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.fail(err)
		return
	}
	defer conn.Close()
	broken := false
	l.every(func() {
		if broken {
			return // counted already, and no more answers will come
		}
		_, err := lab.AskConn(context.Background(), conn)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.count.steady++
		if err != nil {
			broken = true
			l.fail(fmt.Errorf("on the established connection: %w", err))
		}
	})
}

// fail counts a failure. The caller holds the lock.
func (l *load) fail(err error) {
	l.count.failed++
	l.count.failure = err
}

func (l *load) tally() tally {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}

// stop waits for pending requests to finish.
func (l *load) stop() tally {
	close(l.done)
	l.workers.Wait()
	return l.tally()
}

// left waits until a pod gets no more requests, and returns when the last was sent.
func (l *load) left(ctx context.Context, pod string, changed time.Time) (time.Time, error) {
	const quiet = 300 * time.Millisecond // some hundred requests
	var last time.Time
	err := l.await(ctx, func() bool {
		last = l.last[pod]
		since := last
		if changed.After(since) {
			since = changed
		}
		return time.Since(since) > quiet
	})
	if err != nil {
		return last, fmt.Errorf("%s still gets requests: %w", pod, err)
	}
	return last, nil
}

// came waits until a pod answers, and returns when it first did.
func (l *load) came(ctx context.Context, pod string) (time.Time, error) {
	var first time.Time
	err := l.await(ctx, func() bool {
		first = l.first[pod]
		return !first.IsZero()
	})
	if err != nil {
		return first, fmt.Errorf("%s gets no requests: %w", pod, err)
	}
	return first, nil
}

func (l *load) await(ctx context.Context, condition func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		l.mu.Lock()
		ok := condition()
		l.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}
