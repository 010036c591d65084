// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/servicelb"
)

const (
	dialTimeout = time.Second
	// listensFor is how long an answer counts: a process may end, or begin.
	listensFor = 10 * time.Second
	// lookFor is how long new connections are begun in a row, and dialsAtOnce how many are under way.
	lookFor, dialsAtOnce = time.Second, 512
)

// listeners finds out whether a process of a host already answers at a port that a Service wants, by a TCP connection before the Service gets
// the address. UDP cannot be asked, and a firewall hides a process from the controller as from clients.
type listeners struct {
	dial func(ctx context.Context, to netip.AddrPort) bool

	mu     sync.Mutex
	known  map[servicelb.Claim]answer
	wanted map[servicelb.Claim]struct{}
}

type answer struct {
	listens bool
	at      time.Time
}

func newListeners() *listeners {
	return &listeners{dial: dialTCP, known: map[servicelb.Claim]answer{}, wanted: map[servicelb.Claim]struct{}{}}
}

func dialTCP(ctx context.Context, to netip.AddrPort) bool {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", to.String())
	if err == nil {
		_ = c.Close()
	}
	return err == nil
}

// listens implements servicelb.Objects. Until a claim was looked at, it counts as taken: a process that listens there must not lose a connection.
func (l *listeners) listens(c servicelb.Claim) bool {
	if c.Protocol != v1.ProtocolTCP {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	known, ok := l.known[c]
	if !ok || time.Since(known.at) > listensFor {
		l.wanted[c] = struct{}{}
	}
	return !ok || known.listens
}

// look looks at the claims that were asked for, and reports whether there were any.
func (l *listeners) look(ctx context.Context) bool {
	l.mu.Lock()
	wanted := l.wanted
	l.wanted = map[servicelb.Claim]struct{}{}
	for c, a := range l.known {
		if time.Since(a.at) > 2*listensFor {
			delete(l.known, c)
		}
	}
	l.mu.Unlock()
	var group errgroup.Group
	group.SetLimit(dialsAtOnce)
	until := time.Now().Add(lookFor)
	for c := range wanted {
		if time.Now().After(until) { // the rest is asked for again: decisions about other Services must not wait
			break
		}
		group.Go(func() error {
			listens := l.dial(ctx, netip.AddrPortFrom(c.Addr, uint16(c.Port)))
			l.mu.Lock()
			l.known[c] = answer{listens, time.Now()}
			l.mu.Unlock()
			return nil
		})
	}
	_ = group.Wait()
	return len(wanted) > 0
}

// want reports whether there are claims to be looked at.
func (l *listeners) want() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.wanted) > 0
}

// forget is for claims that a Service has from now on: its own frontend answers there.
func (l *listeners) forget(c servicelb.Claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.known, c)
}
