// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
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
// open enough files. Its arguments are a number, of TCP connections and of UDP flows each, a pause between
// turns, and addresses like tcp=10.96.0.10:80.
const asCrowd = "TANDEM_TEST_AS_CROWD"

const (
	// crowdSize is how many TCP connections, and UDP flows, a process opens, and so a client: a
	// process may not open more files, and a UDP socket has a port of its client for itself, of which
	// there are 28,000.
	crowdSize = 6250
	// crowdOpening is how many processes open connections at once. Traffic begins when all are open.
	crowdOpening = 8
	// crowdTries is how often a connection is tried until it is open, on a machine that is busy with opening
	// the others.
	crowdTries = 5
	// crowdWorkers is how many requests of a process are under way at once.
	crowdWorkers = 4
	// crowdPause is the least time between turns, for each process.
	crowdPause = time.Second / 6
)

// crowd is many connections with traffic, from processes in several sandboxes.
type crowd struct {
	members []*crowdMember
	// expected is how many broken connections are no error.
	expected int
}

type crowdMember struct {
	*lab.Watched
	in  io.WriteCloser // its end begins the traffic
	out lab.Log
}

// newCrowd opens as many TCP connections as UDP flows, from this host, and from as many pods and clients
// outside as it takes, to all addresses.
func newCrowd(t testing.TB, s *stage, each int) *crowd {
	t.Helper()
	var places []place
	s.everybody(func(from *lab.Sandbox, ways map[string]netip.AddrPort) { places = append(places, place{from, ways}) })
	for i := len(places); i*crowdSize < each; i++ {
		if i%2 == 0 {
			places = append(places, place{s.lab.Client(fmt.Sprintf("client%d", i)).Sandbox, outside(s.node)})
		} else {
			places = append(places, place{s.node.Pod(fmt.Sprintf("client%d", i)).Sandbox, targets()})
		}
	}
	return openCrowd(t, places, each)
}

// place is where a process of a crowd runs, and the addresses to which it opens connections.
type place struct {
	*lab.Sandbox
	ways map[string]netip.AddrPort
}

// openCrowd opens as many TCP connections as UDP flows, from these places.
func openCrowd(t testing.TB, places []place, each int) *crowd {
	t.Helper()
	c := &crowd{}
	pause := time.Duration(len(places)) * crowdPause
	for i, p := range places {
		if i >= crowdOpening {
			c.members[i-crowdOpening].opened(t)
		}
		args := []string{strconv.Itoa((each + len(places) - 1) / len(places)), pause.String()}
		for name, to := range p.ways {
			args = append(args, name[:3]+"="+to.String())
		}
		m := &crowdMember{Watched: lab.Watch(p.Command(context.Background(), os.Args[0], args...))}
		m.Env = append(os.Environ(), asCrowd+"=1")
		m.Stdout = &m.out
		var err error
		if m.in, err = m.StdinPipe(); err != nil {
			t.Fatal(err)
		}
		m.Begin(t)
		c.members = append(c.members, m)
	}
	for _, m := range c.members {
		m.opened(t)
	}
	for _, m := range c.members {
		_ = m.in.Close()
	}
	c.turn(t, 1)
	return c
}

// opened waits until the process has opened its connections.
func (m *crowdMember) opened(t testing.TB) {
	t.Helper()
	m.Await(t, 10*patience, "many connections", func() error {
		if !strings.HasPrefix(m.out.String(), "open\n") {
			return errors.New("not all of them are open")
		}
		return nil
	})
}

// turns is how often a process has asked on each of its connections.
func (m *crowdMember) turns() int { return strings.Count(m.out.String(), "turn\n") }

// more waits until each connection was asked since now.
func (c *crowd) more(t testing.TB) {
	t.Helper()
	c.turn(t, 2) // the first may have begun before
}

// turn waits for so many turns of all processes.
func (c *crowd) turn(t testing.TB, turns int) {
	t.Helper()
	from := make([]int, len(c.members))
	for i, m := range c.members {
		from[i] = m.turns()
	}
	for i, m := range c.members {
		m.Await(t, 10*patience, "answers on every connection", func() error {
			if n := m.turns() - from[i]; n < turns {
				return fmt.Errorf("%d turns", n)
			}
			return nil
		})
	}
}

// end reports connections that broke.
func (c *crowd) end(t testing.TB) {
	t.Helper()
	turns, again := 0, 0
	for _, m := range c.members {
		_ = m.Close()
		turns += m.turns()
		again += strings.Count(m.out.String(), "again\n")
	}
	for _, text := range c.broken()[c.expected:] {
		t.Error(text)
	}
	t.Logf("%d turns of requests in %d processes, %d datagrams repeated", turns, len(c.members), again)
}

// broken says which connections are broken, and how.
func (c *crowd) broken() (list []string) {
	for _, m := range c.members {
		for line := range strings.Lines(m.out.String()) {
			if text, broken := strings.CutPrefix(line, "broken: "); broken {
				list = append(list, strings.TrimSpace(text))
			}
		}
	}
	return list
}

// crowdMain is such a process. It asks on every connection, turn by turn.
func crowdMain(args []string) error {
	if len(args) < 3 {
		return errors.New("want a number, a duration and addresses")
	}
	each, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	pause, err := time.ParseDuration(args[1])
	if err != nil {
		return err
	}
	ways := map[string][]string{}
	for _, arg := range args[2:] {
		network, to, _ := strings.Cut(arg, "=")
		ways[network] = append(ways[network], to)
	}
	flows := make([]flow, 2*each)
	for i := range flows {
		network := [...]string{"tcp", "udp"}[i%2]
		to := ways[network][i/2%len(ways[network])]
		err := flows[i].begin(network, to)
		for tries := 1; err != nil && tries < crowdTries; tries++ {
			err = flows[i].begin(network, to)
		}
		if err != nil {
			return err
		}
	}
	fmt.Println("open")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	// Others need the CPU, too.
	for pace := time.NewTicker(pause * lab.Slower()); ; <-pace.C {
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

// ask sends a request. The machine may have thousands of others to do before.
func (f *flow) ask() (lab.Reply, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*lab.RequestTimeout())
	defer cancel()
	return lab.AskConn(ctx, f)
}

// begin opens the connection.
func (f *flow) begin(network, to string) (err error) {
	if f.Conn, err = net.Dial(network, to); err != nil {
		return err
	}
	if f.first, err = f.ask(); err != nil {
		f.Close()
		err = fmt.Errorf("%s to %s: %w", network, to, err)
	}
	return err
}

// turn asks once, unless the connection is broken.
func (f *flow) turn() {
	if f.Conn == nil {
		return
	}
	r, err := f.ask()
	if os.IsTimeout(err) && f.RemoteAddr().Network() == "udp" {
		fmt.Println("again") // a busy machine loses datagrams, which clients repeat
		r, err = f.ask()
	}
	if err != nil || r != f.first {
		fmt.Printf("broken: %s from %s to %s: %v %v, first %v\n", f.RemoteAddr().Network(), f.LocalAddr(), f.RemoteAddr(), r, err, f.first)
		f.Close()
		f.Conn = nil
	}
}
