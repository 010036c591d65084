// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// What a client does.
const (
	connectRate  = 100 // new TCP connections per second
	datagramRate = 10  // new UDP sockets per second
	longTCP      = 10  // connections that stay
	longUDP      = 4   // sockets that stay
	longPause    = 200 * time.Millisecond
	limit        = 10 * time.Second // for an answer, on a busy machine
)

// counts are attempts and failures, by what was attempted.
type counts struct {
	Tried, Failed map[string]int
	// Examples are errors, one of each kind of attempt.
	Examples map[string]string
	// Slowest is the longest time that a connect took that succeeded.
	Slowest time.Duration

	running sync.WaitGroup // attempts that have begun
}

func newCounts() *counts {
	return &counts{Tried: map[string]int{}, Failed: map[string]int{}, Examples: map[string]string{}}
}

func (c *counts) String() string {
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(c.Tried)) {
		part := fmt.Sprintf("%s %d of %d", kind, c.Failed[kind], c.Tried[kind])
		if example := c.Examples[kind]; example != "" {
			part += " (" + example + ")"
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, ", ") + fmt.Sprintf(", slowest %v", c.Slowest.Round(time.Millisecond))
}

// asClient has a copy of the test's program be a client of these addresses.
const asClient = "TANDEM_TEST_AS_CLIENT"

// clientMain is such a client. For each line of its input, it writes one: to an empty one, what it
// counted since the last; to a network and an address, the name of the server that answers there. It
// ends with its input.
func clientMain(targets string) error {
	c := &client{counts: newCounts()}
	for text := range strings.SplitSeq(targets, ",") {
		to, err := netip.ParseAddrPort(text)
		if err != nil {
			return err
		}
		c.targets = append(c.targets, to)
	}
	go c.often("tcp", connectRate)
	go c.often("udp", datagramRate)
	for i := range longTCP {
		go c.long("tcp", i)
	}
	for i := range longUDP {
		go c.long("udp", i)
	}
	out := json.NewEncoder(os.Stdout)
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var said any
		if network, to, asked := strings.Cut(in.Text(), " "); asked {
			said = serverAt(network, to)
		} else {
			said = c.take()
		}
		if err := out.Encode(said); err != nil {
			return err
		}
	}
	return nil
}

type client struct {
	targets []netip.AddrPort
	mu      sync.Mutex
	counts  *counts
}

// take returns counts of what has begun since the last call, when all of that has ended.
func (c *client) take() *counts {
	c.mu.Lock()
	last := c.counts
	c.counts = newCounts()
	c.mu.Unlock()
	last.running.Wait()
	return last
}

// count makes an attempt and counts it.
func (c *client) count(kind string, attempt func() error) {
	c.mu.Lock()
	counts := c.counts
	counts.running.Add(1)
	c.mu.Unlock()
	defer counts.running.Done()
	began := time.Now()
	err := attempt()

	c.mu.Lock()
	defer c.mu.Unlock()
	counts.Tried[kind]++
	if err == nil {
		counts.Slowest = max(counts.Slowest, time.Since(began))
		return
	}
	counts.Failed[kind]++
	if counts.Examples[kind] == "" {
		counts.Examples[kind] = time.Now().Format("15:04:05.000 ") + err.Error()
	}
}

// often connects at a rate, to one target after the other.
func (c *client) often(network string, rate int) {
	for i := 0; ; i++ {
		time.Sleep(time.Second / time.Duration(rate))
		go c.count(network, func() error {
			conn, err := c.dial(network, i)
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = ask(conn)
			return err
		})
	}
}

// long asks again and again over one socket. After a failure it takes another one.
func (c *client) long(network string, i int) {
	var conn net.Conn
	for {
		c.count("long "+network, func() (err error) {
			if conn == nil {
				if conn, err = c.dial(network, i); err != nil {
					conn = nil // not one without a value
					return err
				}
			}
			if _, err = ask(conn); err != nil {
				_ = conn.Close()
				conn = nil
			}
			return err
		})
		time.Sleep(longPause)
	}
}

func (c *client) dial(network string, i int) (net.Conn, error) {
	return net.DialTimeout(network, c.targets[i%len(c.targets)].String(), limit)
}

func ask(conn net.Conn) (server string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	reply, err := lab.AskConn(ctx, conn)
	if err != nil {
		return "", fmt.Errorf("%s to %s: %w", conn.LocalAddr(), conn.RemoteAddr(), err)
	}
	return reply.Server, nil
}

// answer is who answered, or why no one did.
type answer struct{ Server, Err string }

func serverAt(network, to string) answer {
	conn, err := net.DialTimeout(network, to, limit)
	if err != nil {
		return answer{Err: err.Error()}
	}
	defer conn.Close()
	server, err := ask(conn)
	if err != nil {
		return answer{Err: err.Error()}
	}
	return answer{Server: server}
}

// process is a client in a process of its own, as this test sees it.
type process struct {
	*lab.Cmd
	where string
	in    io.Writer
	out   *json.Decoder
	errs  *lab.Log
}

func startClient(where string, cmd *lab.Cmd) (*process, error) {
	p := &process{Cmd: cmd, where: where, errs: &lab.Log{}}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.in, p.out, cmd.Stderr = in, json.NewDecoder(out), p.errs
	return p, cmd.Start()
}

// say has the client answer a line.
func (p *process) say(line string, answer any) error {
	_, err := io.WriteString(p.in, line+"\n")
	if err == nil {
		err = p.out.Decode(answer)
	}
	if err != nil {
		err = fmt.Errorf("the client %s: %w\n%s", p.where, err, p.errs)
	}
	return err
}

// take returns what the client counted since the last call.
func (p *process) take() (*counts, error) {
	c := newCounts()
	return c, p.say("", c)
}

// server is who answers the client at an address.
func (p *process) server(network, to string) (string, error) {
	var a answer
	err := p.say(network+" "+to, &a)
	if err == nil && a.Err != "" {
		err = fmt.Errorf("%s: %s", p.where, a.Err)
	}
	return a.Server, err
}
