// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package selfprobe checks whether this node's kernel translates a frontend to an endpoint. It
// dials the frontend and asks the kernel for the destination of the connection. It does not
// wait for an answer of the endpoint. An endpoint on this node that refuses a TCP connection
// immediately looks like a missing translation: the kernel has deleted the connection before
// the probe can find it.
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

// Frontend is the frontend to dial.
type Frontend struct {
	Protocol inet.Protocol
	Addr     netip.AddrPort
	// Backends are the expected destinations.
	Backends []netip.AddrPort
}

// errNotTranslated is the usual failure.
var errNotTranslated = errors.New("not translated to an endpoint, or the endpoint refused immediately")

// BySocket probes connections that are translated when the socket connects. The process must
// be in a cgroup with the eBPF programs. Connecting a UDP socket sends no packet.
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
		err = errNotTranslated
	}
	return to, err
}

// ByPackets probes connections whose packets are translated with conntrack. For TCP, the
// endpoint gets a SYN and possibly a reset.
func ByPackets(ctx context.Context, f Frontend) (to netip.AddrPort, err error) {
	s, err := dial(f)
	if err != nil {
		return to, err
	}
	defer s.close()
	flow, err := conntrack.Kernel{}.Find(ctx, f.Protocol, s.local, f.Addr)
	switch {
	case errors.Is(err, unix.ENOENT):
		return to, fmt.Errorf("%w: no conntrack entry for the connection", errNotTranslated)
	case err != nil:
		return to, fmt.Errorf("query conntrack: %w", err)
	}
	if !slices.Contains(f.Backends, flow.Replies) {
		return to, errNotTranslated
	}
	return flow.Replies, nil
}

// socket is a connecting socket.
type socket struct {
	fd    int
	local netip.AddrPort
}

// dial starts to connect and does not wait for an answer.
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
		return nil, fmt.Errorf("open socket: %w", err)
	}
	s := &socket{fd: fd}
	// Closing resets the connection, even if it is established by then.
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil && kind == unix.SOCK_STREAM {
		s.close()
		return nil, fmt.Errorf("set up socket: %w", err)
	}
	if err := unix.Connect(fd, sockaddr(f.Addr)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		s.close()
		return nil, fmt.Errorf("connect: %w", err)
	}
	local, err := unix.Getsockname(fd)
	if err != nil {
		s.close()
		return nil, fmt.Errorf("get local address of socket: %w", err)
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
