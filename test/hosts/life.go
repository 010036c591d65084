// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// Live plays the cells of kind Life: the process is killed and started again, and the endpoint
// elsewhere goes and returns, while clients connect all the time and have open connections. No
// connection may fail, and the open ones continue.
func (w *World) Live(ctx context.Context, cells []Cell, p *Proxy) (Results, error) {
	l := &life{world: w, results: Results{}, flows: map[Cell][]flow{}}
	over, end := context.WithCancel(ctx)
	defer end()
	for _, c := range cells {
		l.results[c] = nil
		l.open(ctx, c)
		if l.results[c] == nil {
			l.running.Go(func() { l.connect(over, ctx, c) })
		}
	}
	err := l.events(ctx, p)
	end()
	l.running.Wait()
	for c, flows := range l.flows {
		for _, f := range flows {
			switch reply, err := lab.AskConn(ctx, f.Conn); {
			case err != nil:
				l.fail(c, fmt.Errorf("open connection to %s: %w", f.first.Server, err))
			case reply != f.first:
				l.fail(c, fmt.Errorf("open connection to %s: answered by %s, from %s", f.first.Server, reply.Server, reply.Peer))
			}
			_ = f.Close()
		}
	}
	return l.results, err
}

// life are clients with their connections.
type life struct {
	world   *World
	flows   map[Cell][]flow
	running sync.WaitGroup

	mu      sync.Mutex // guards the results
	results Results
}

// flow is an open connection.
type flow struct {
	net.Conn
	first lab.Reply
}

func (l *life) fail(c Cell, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.results[c] == nil {
		l.results[c] = err
	}
}

// open makes connections until both endpoints have one. UDP flows to the endpoint that goes are
// meant to move, so that one does not stay open.
func (l *life) open(ctx context.Context, c Cell) {
	missing := map[string]bool{Here: true, There: true}
	for try := 0; len(missing) > 0; try++ {
		const most = 40
		if try == most {
			l.fail(c, fmt.Errorf("%d connections, and none to some endpoint: %v", try, missing))
			return
		}
		f, err := l.world.dial(ctx, c)
		if err != nil {
			l.fail(c, err)
			return
		}
		stays := missing[f.first.Server] && (c.protocol() == "tcp" || f.first.Server == Here)
		delete(missing, f.first.Server)
		if !stays {
			_ = f.Close()
			continue
		}
		l.flows[c] = append(l.flows[c], f)
	}
}

// dial makes a connection, and a request over it.
func (w *World) dial(ctx context.Context, c Cell) (flow, error) {
	return w.dialTo(ctx, c, w.client(c.Client), w.target(c))
}

func (w *World) dialTo(ctx context.Context, c Cell, from *lab.Sandbox, to netip.AddrPort) (flow, error) {
	ctx, cancel := context.WithTimeout(ctx, w.limit(c))
	defer cancel()
	conn, err := from.Dial(ctx, c.protocol(), to)
	if err != nil {
		return flow{}, err
	}
	first, err := lab.AskConn(ctx, conn)
	if err != nil {
		return flow{}, errors.Join(err, conn.Close())
	}
	return flow{conn, first}, nil
}

// connect makes one connection after the other. An endpoint that has just gone may still be
// chosen, and answers.
func (l *life) connect(over, ctx context.Context, c Cell) {
	const pause = 20 * time.Millisecond
	for over.Err() == nil {
		f, err := l.world.dial(ctx, c)
		if err != nil && c.protocol() == "udp" {
			// A packet may be lost, and sockets of an endpoint that has just gone are ended:
			// clients of UDP repeat their requests.
			f, err = l.world.dial(ctx, c)
		}
		if err == nil {
			err = f.Close()
		}
		if err != nil {
			l.fail(c, fmt.Errorf("new connection: %w", err))
			return
		}
		select {
		case <-over.Done():
		case <-time.After(pause):
		}
	}
}

// events are what happens.
func (l *life) events(ctx context.Context, p *Proxy) error {
	s := services[len(services)-1]
	if err := p.Restart(ctx); err != nil {
		return err
	}
	for _, pods := range [][]*lab.Pod{{l.world.Here}, {l.world.Here, l.world.There}} {
		p.Put(l.world.slices(s, pods...)...)
		if err := l.seen(ctx, len(pods)); err != nil {
			return err
		}
	}
	return nil
}

// seen waits until the node connects to so many endpoints.
func (l *life) seen(ctx context.Context, endpoints int) error {
	c := Cell{Client: FromHost, Frontend: ClusterIP, Network: "tcp" + string(l.world.families()[0]), Backend: Both, Policy: Cluster}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second*lab.Slower())
	defer cancel()
	for {
		servers := map[string]bool{}
		for range 12 {
			if reply, err := l.world.client(c.Client).Ask(ctx, c.protocol(), l.world.target(c)); err == nil {
				servers[reply.Server] = true
			}
		}
		if len(servers) == endpoints {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("a change to %d endpoints has no effect: connections reach %v", endpoints, servers)
		}
	}
}
