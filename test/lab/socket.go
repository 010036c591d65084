// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// This file makes sockets by system calls instead of package net, for three reasons:
// the calls must happen on the sandbox's thread; net checks only once per process, in
// the first namespace, whether IPv6 works; and clients must be able to choose an IPv6
// socket for an IPv4 address.

// dialTimeout applies to contexts without a deadline.
var dialTimeout = 2 * time.Second * Slower()

// RequestTimeout applies to requests whose context has no deadline.
func RequestTimeout() time.Duration { return dialTimeout }

// Slower returns how much longer everything may take on this machine: TANDEM_SLOWER on an emulated
// one, where the verifier may use the only CPU for seconds.
func Slower() time.Duration {
	if n, err := strconv.Atoi(os.Getenv("TANDEM_SLOWER")); err == nil && n > 1 {
		return time.Duration(n)
	}
	return 1
}

// withDeadline gives a context a deadline if it has none.
func withDeadline(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, timeout)
}

// setDeadline gives a connection the deadline of a context, or a default one.
func setDeadline(ctx context.Context, c net.Conn, timeout time.Duration) error {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(timeout)
	}
	return c.SetDeadline(deadline)
}

// Dial connects from inside the sandbox. The network is "tcp", "udp" or "sctp". For an
// IPv4-mapped address (::ffff:a.b.c.d) an IPv6 socket is used, as dual-stack
// programs do. The connection can be used from any goroutine and outlives Do.
func (s *Sandbox) Dial(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	return s.DialFrom(ctx, network, 0, to)
}

// DialFrom is Dial from the given port of the client; 0 takes a free one. Several connections
// can have one port, to different addresses.
func (s *Sandbox) DialFrom(ctx context.Context, network string, port uint16, to netip.AddrPort) (net.Conn, error) {
	var conn net.Conn
	shared := port != 0
	attempt := func() (err error) {
		conn, err = dial(ctx, network, port, shared, to)
		return err
	}
	inTurn := port == 0 && (s.portsInTurn || network == "sctp")
	if inTurn {
		port = nextPort()
	}
	err := s.Do(attempt)
	for inTurn && errors.Is(err, unix.EADDRINUSE) && ctx.Err() == nil {
		port = nextPort()
		err = s.Do(attempt)
	}
	if err != nil {
		return nil, fmt.Errorf("dial %s %s from %s: %w", network, to, s.Name, err)
	}
	return conn, nil
}

func dial(ctx context.Context, network string, port uint16, shared bool, to netip.AddrPort) (net.Conn, error) {
	kind, protocol, err := socketType(network)
	if err != nil {
		return nil, err
	}
	family := unix.AF_INET
	if to.Addr().Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), network)
	defer f.Close() // FileConn works on a copy
	if protocol == unix.IPPROTO_SCTP {
		if err := hearRefusals(fd, family); err != nil {
			return nil, err
		}
	}
	if shared {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return nil, os.NewSyscallError("setsockopt", err)
		}
	}
	if port != 0 {
		any := netip.IPv4Unspecified()
		if to.Addr().Is6() {
			any = netip.IPv6Unspecified()
		}
		if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(any, port))); err != nil {
			return nil, os.NewSyscallError("bind", err)
		}
	}
	err = unix.Connect(fd, sockaddr(to))
	if errors.Is(err, unix.EINPROGRESS) {
		err = connected(ctx, fd)
	}
	if err != nil {
		return nil, os.NewSyscallError("connect", err)
	}
	return net.FileConn(f)
}

// connected waits for a connect to finish. It polls the context, as it must stay on the
// thread.
func connected(ctx context.Context, fd int) error {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(dialTimeout)
	}
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return os.ErrDeadlineExceeded
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 10)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if n > 0 {
			code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
			if err == nil && code != 0 {
				err = unix.Errno(code)
			}
			return err
		}
	}
}

// hearRefusals makes an SCTP client's socket fail on ICMP errors, as TCP sockets do by
// default. The kernel ignores an error that arrives while connect holds the socket. In the
// lab, this happens to the first one, so the second attempt comes soon instead of after
// three seconds.
func hearRefusals(fd, family int) error {
	level, option := unix.IPPROTO_IP, unix.IP_RECVERR
	if family == unix.AF_INET6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	const rtoInfo = 0 // SCTP_RTOINFO: association, initial, maximum and minimum timeout
	wait := slices.Concat(native(0), native(500), native(60_000), native(100))
	return os.NewSyscallError("setsockopt", unix.SetsockoptString(fd, unix.IPPROTO_SCTP, rtoInfo, string(wait)))
}

var ports atomic.Uint32

// nextPort returns consecutive source ports. The kernel chooses random ports for SCTP. If it
// reuses a port soon, the packets go to the previous backend: conntrack keeps an association for
// ten seconds after its end and, unlike for TCP, does not replace it when a new one begins
// (Linux 6.1, nf_conntrack_proto_sctp.c).
func nextPort() uint16 {
	const first, last = 32768, 60999 // net.ipv4.ip_local_port_range
	return uint16(first + ports.Add(1)%(last-first+1))
}

func native(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

// listen and listenUDP bind a port on all addresses of both families with one IPv6
// socket; port 0 takes a free one. Package net treats SCTP connections as TCP ones, as it
// checks only the socket type, not the protocol.
func (s *Sandbox) listen(network string, port uint16) (net.Listener, error) {
	var l net.Listener
	err := s.bound(network, port, func(f *os.File) (err error) {
		if err = unix.Listen(int(f.Fd()), 1024); err == nil {
			l, err = net.FileListener(f)
		}
		return err
	})
	return l, err
}

func (s *Sandbox) listenUDP(port uint16) (*net.UDPConn, error) {
	var c *net.UDPConn
	err := s.bound("udp", port, func(f *os.File) error {
		// Replies must have the destination address of the request as their source.
		if err := unix.SetsockoptInt(int(f.Fd()), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1); err != nil {
			return err
		}
		pc, err := net.FilePacketConn(f)
		if err == nil {
			c = pc.(*net.UDPConn)
		}
		return err
	})
	return c, err
}

// ListenUDP opens an unconnected UDP socket in the sandbox, for clients that send
// to many addresses. The family is unix.AF_INET, or unix.AF_INET6 for a dual-stack
// socket.
func (s *Sandbox) ListenUDP(family int) (*net.UDPConn, error) {
	var c *net.UDPConn
	err := s.Do(func() error {
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		f := os.NewFile(uintptr(fd), "udp")
		defer f.Close()
		if family == unix.AF_INET6 {
			if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0); err != nil {
				return os.NewSyscallError("setsockopt", err)
			}
		}
		pc, err := net.FilePacketConn(f)
		if err == nil {
			c = pc.(*net.UDPConn)
		}
		return err
	})
	return c, wrap(err, "open udp socket in %s", s.Name)
}

func (s *Sandbox) bound(network string, port uint16, use func(*os.File) error) error {
	err := s.Do(func() error {
		kind, protocol, err := socketType(network)
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		f := os.NewFile(uintptr(fd), network)
		defer f.Close()
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
		if kind == unix.SOCK_STREAM {
			// Connections of an earlier server on this port may still exist.
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
				return os.NewSyscallError("setsockopt", err)
			}
		}
		if err := unix.Bind(fd, &unix.SockaddrInet6{Port: int(port)}); err != nil {
			return os.NewSyscallError("bind", err)
		}
		return use(f)
	})
	return wrap(err, "listen on %s port %d in %s", network, port, s.Name)
}

func socketType(network string) (kind, protocol int, err error) {
	switch network {
	case "tcp":
		return unix.SOCK_STREAM, unix.IPPROTO_TCP, nil
	case "udp":
		return unix.SOCK_DGRAM, unix.IPPROTO_UDP, nil
	case "sctp":
		return unix.SOCK_STREAM, unix.IPPROTO_SCTP, nil
	}
	return 0, 0, fmt.Errorf("unknown network %q", network)
}

// SCTPAvailable returns nil if the kernel has SCTP or can load it, or the reason why not.
func SCTPAvailable() error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		return fmt.Errorf("this kernel has no SCTP: %w", err)
	}
	return unix.Close(fd)
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}
