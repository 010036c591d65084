// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// asCrowd makes a copy of the test program open connections and keep them busy: one process may not
// open enough files. Its arguments are a number, of TCP connections and of UDP flows each, and
// addresses like tcp=10.96.0.10:80.
const asCrowd = "TANDEM_TEST_AS_CROWD"

const (
	// crowdSize is how many TCP connections, and UDP flows, a process opens.
	crowdSize = 4000
	// crowdWorkers is how many requests of a process are under way at once.
	crowdWorkers = 4
	// crowdPause is the least time between turns.
	crowdPause = time.Second / 2
)

// crowd is many connections with traffic, from processes in several sandboxes.
type crowd struct{ members []*crowdMember }

type crowdMember struct {
	*lab.Watched
	out lab.Log
}

// newCrowd opens as many TCP connections as UDP flows, from all clients to all addresses.
func newCrowd(t testing.TB, s *stage, each int) *crowd {
	t.Helper()
	c := &crowd{}
	clients := 0
	s.everybody(func(*lab.Sandbox, map[string]netip.AddrPort) { clients++ })
	s.everybody(func(from *lab.Sandbox, ways map[string]netip.AddrPort) {
		for left := (each + clients - 1) / clients; left > 0; left -= crowdSize {
			args := []string{strconv.Itoa(min(left, crowdSize))}
			for name, to := range ways {
				args = append(args, name[:3]+"="+to.String())
			}
			m := &crowdMember{Watched: lab.Watch(from.Command(context.Background(), os.Args[0], args...))}
			m.Env = append(os.Environ(), asCrowd+"=1")
			m.Stdout = &m.out
			m.Begin(t)
			c.members = append(c.members, m)
		}
	})
	c.more(t)
	return c
}

// turns is how often a process has asked on each of its connections.
func (m *crowdMember) turns() int { return strings.Count(m.out.String(), "turn\n") }

// more waits until each connection was asked since now.
func (c *crowd) more(t testing.TB) {
	t.Helper()
	from := make([]int, len(c.members))
	for i, m := range c.members {
		from[i] = m.turns()
	}
	for i, m := range c.members {
		m.Await(t, 2*patience, "answers on every connection", func() error {
			if n := m.turns() - from[i]; n < 2 { // the first may have begun before
				return fmt.Errorf("%d turns", n)
			}
			return nil
		})
	}
}

// end reports connections that broke.
func (c *crowd) end(t testing.TB) {
	t.Helper()
	turns := 0
	for _, m := range c.members {
		_ = m.Close()
		turns += m.turns()
		for line := range strings.Lines(m.out.String()) {
			if text, broken := strings.CutPrefix(line, "broken: "); broken {
				t.Error(strings.TrimSpace(text))
			}
		}
	}
	t.Logf("%d turns of requests in %d processes", turns, len(c.members))
}

// crowdMain is such a process. It asks on every connection, turn by turn.
func crowdMain(args []string) error {
	if len(args) < 2 {
		return errors.New("want a number and addresses")
	}
	each, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	ways := map[string][]string{}
	for _, arg := range args[1:] {
		network, to, _ := strings.Cut(arg, "=")
		ways[network] = append(ways[network], to)
	}
	flows := make([]flow, 2*each)
	for i := range flows {
		network := [...]string{"tcp", "udp"}[i%2]
		to := ways[network][i/2%len(ways[network])]
		conn, err := net.Dial(network, to)
		if err != nil {
			return err
		}
		flows[i].Conn = conn
		if flows[i].first, err = lab.AskConn(context.Background(), conn); err != nil {
			return fmt.Errorf("%s to %s: %w", network, to, err)
		}
	}
	// Others need the CPU, too.
	for pace := time.NewTicker(crowdPause * lab.Slower()); ; <-pace.C {
		var next atomic.Int64
		var wg sync.WaitGroup
		for range crowdWorkers {
			wg.Go(func() {
				for i := int(next.Add(1)) - 1; i < len(flows); i = int(next.Add(1)) - 1 {
					flows[i].turn()
				}
			})
		}
		wg.Wait()
		fmt.Println("turn")
	}
}

// turn asks once, unless the connection is broken.
func (f *flow) turn() {
	if f.Conn == nil {
		return
	}
	if r, err := lab.AskConn(context.Background(), f); err != nil || r != f.first {
		fmt.Printf("broken: %s from %s to %s: %v %v, first %v\n", f.RemoteAddr().Network(), f.LocalAddr(), f.RemoteAddr(), r, err, f.first)
		f.Close()
		f.Conn = nil
	}
}
