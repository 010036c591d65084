// SPDX-License-Identifier: Apache-2.0

//go:build linux

package crr

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
)

// request is what clients send; servers answer with their pod's name. Both fit
// into a segment.
var request = []byte("GET /\n")

// server answers one connection after the other, on a thread of its own.
type server struct {
	name   string
	thread int
	listen int // file descriptor
	ended  chan error
}

// serve starts a server in a pod.
func serve(on *cpu, pod *lab.Pod) (*server, error) {
	s := &server{name: pod.Name, ended: make(chan error, 1)}
	ready := make(chan error, 1)
	go func() {
		s.ended <- pod.Do(func() error {
			unpin, err := on.pin()
			if err != nil {
				ready <- err
				return err
			}
			defer unpin()
			s.thread = unix.Gettid()
			s.listen, err = listen(netip.AddrPortFrom(pod.Addr4, targetPort))
			ready <- err
			if err != nil {
				return err
			}
			defer unix.Close(s.listen)
			return s.loop()
		})
	}()
	if err := <-ready; err != nil {
		return nil, fmt.Errorf("serve in %s: %w", pod.Name, err)
	}
	return s, nil
}

func listen(at netip.AddrPort) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	err = os.NewSyscallError("bind", unix.Bind(fd, sockaddr(at)))
	if err == nil {
		err = os.NewSyscallError("listen", unix.Listen(fd, 128))
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// loop serves until close. Clients that fail notice by themselves.
func (s *server) loop() error {
	answer, buf := []byte(s.name), make([]byte, 64)
	for {
		fd, _, err := unix.Accept4(s.listen, unix.SOCK_CLOEXEC)
		if errors.Is(err, unix.EINVAL) { // shut down
			return nil
		}
		if err != nil {
			return os.NewSyscallError("accept", err)
		}
		if n, err := unix.Read(fd, buf); err == nil && n > 0 {
			_, _ = unix.Write(fd, answer)
			_, _ = unix.Read(fd, buf) // the client closes first
		}
		_ = unix.Close(fd)
	}
}

func (s *server) close() error {
	_ = unix.Shutdown(s.listen, unix.SHUT_RDWR)
	return <-s.ended
}

// client makes connections to a server by one of a variant's paths.
type client struct {
	from *lab.Sandbox
	to   []*unix.SockaddrInet4
	next int // index of the target for the next connection
	want *server
	buf  [64]byte
}

func newClient(from *lab.Sandbox, want *server, targets []netip.AddrPort) *client {
	c := &client{from: from, want: want}
	for _, t := range targets {
		c.to = append(c.to, sockaddr(t))
	}
	return c
}

func sockaddr(a netip.AddrPort) *unix.SockaddrInet4 {
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}

// cost is the CPU time of one of n connections, over all targets in turn. Some more
// beforehand bring the caches to where they are when one connection follows
// another.
func (c *client) cost(on *cpu, n int) (each time.Duration, err error) {
	err = c.from.Do(func() error {
		unpin, err := on.pin()
		if err != nil {
			return err
		}
		defer unpin()
		if err := c.run(n / 10); err != nil {
			return err
		}
		threads := []int{unix.Gettid(), c.want.thread}
		before, err := on.used(threads...)
		if err != nil {
			return err
		}
		if err := c.run(n); err != nil {
			return err
		}
		after, err := on.used(threads...)
		each = (after - before) / time.Duration(n)
		return err
	})
	return each, err
}

// check makes a connection to every target.
func (c *client) check() error {
	return c.from.Do(func() error { return c.run(len(c.to)) })
}

func (c *client) run(n int) error {
	for range n {
		to := c.to[c.next]
		c.next = (c.next + 1) % len(c.to)
		if err := c.ask(to); err != nil {
			return fmt.Errorf("ask %s: %w", netip.AddrPortFrom(netip.AddrFrom4(to.Addr), uint16(to.Port)), err)
		}
	}
	return nil
}

func (c *client) ask(to *unix.SockaddrInet4) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, to); err != nil {
		return os.NewSyscallError("connect", err)
	}
	if _, err := unix.Write(fd, request); err != nil {
		return os.NewSyscallError("write", err)
	}
	n, err := unix.Read(fd, c.buf[:])
	if err != nil {
		return os.NewSyscallError("read", err)
	}
	if name := string(c.buf[:n]); name != c.want.name {
		return fmt.Errorf("%q answers, want %s", name, c.want.name)
	}
	return nil
}
