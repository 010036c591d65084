// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package selfprobe finds out whether this node's kernel leads a frontend to an endpoint, by
// dialling it from this process and asking the kernel where the connection leads. Whether
// the endpoint answers is not of interest, and nobody waits for it. But one that refuses a
// TCP connection at once, as one on this node can, cannot be told from none: the kernel has
// forgotten the connection before it can be asked.
package selfprobe

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/sockdiag"
)

// Frontend is what to dial.
type Frontend struct {
	Protocol inet.Protocol
	Addr     netip.AddrPort
	// Backends that it may lead to.
	Backends []netip.AddrPort
}

// errNowhere is the usual failure: nobody translates.
var errNowhere = errors.New("it leads to no endpoint, or to one that refuses at once")

// BySocket is for connections that are translated when the socket connects. The process has
// to be in a cgroup that is served. A connected UDP socket has sent nothing.
func BySocket(ctx context.Context, f Frontend) (to netip.AddrPort, err error) {
	s, err := dial(f)
	if err != nil {
		return to, err
	}
	defer s.close()
	_, _, err = sockdiag.Dump(ctx, sockdiag.Filter{Protocol: uint8(f.Protocol), Remote: f.Backends}, func(found sockdiag.Socket) bool {
		if found.Local == s.local {
			to = found.Remote
		}
		return false
	})
	if err == nil && !to.IsValid() {
		err = errNowhere
	}
	return to, err
}

// ByPackets is for connections whose packets are translated, with conntrack's knowledge. Of
// a TCP connection, the endpoint sees a SYN and maybe a reset.
func ByPackets(ctx context.Context, f Frontend) (to netip.AddrPort, err error) {
	s, err := dial(f)
	if err != nil {
		return to, err
	}
	defer s.close()
	flow, err := conntrack.Kernel{}.Find(ctx, f.Protocol, s.local, f.Addr)
	switch {
	case errors.Is(err, unix.ENOENT):
		return to, fmt.Errorf("%w: conntrack does not know the connection", errNowhere)
	case err != nil:
		return to, fmt.Errorf("ask conntrack: %w", err)
	}
	if !slices.Contains(f.Backends, flow.Replies) {
		return to, errNowhere
	}
	return flow.Replies, nil
}

// socket is one that connects.
type socket struct {
	fd    int
	local netip.AddrPort
}

// dial does not wait for an answer.
func dial(f Frontend) (*socket, error) {
	family, kind := unix.AF_INET, unix.SOCK_STREAM
	if f.Addr.Addr().Is6() {
		family = unix.AF_INET6
	}
	if f.Protocol == inet.UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(f.Protocol))
	if err != nil {
		return nil, fmt.Errorf("open a socket: %w", err)
	}
	s := &socket{fd: fd}
	// Closing is a reset, also of what was established meanwhile.
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil && kind == unix.SOCK_STREAM {
		s.close()
		return nil, fmt.Errorf("set up a socket: %w", err)
	}
	if err := unix.Connect(fd, sockaddr(f.Addr)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		s.close()
		return nil, fmt.Errorf("connect: %w", err)
	}
	local, err := unix.Getsockname(fd)
	if err != nil {
		s.close()
		return nil, fmt.Errorf("address of a socket: %w", err)
	}
	s.local = addrPort(local)
	return s, nil
}

func (s *socket) close() { _ = unix.Close(s.fd) }

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func addrPort(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
	}
	return netip.AddrPort{}
}
