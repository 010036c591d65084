// SPDX-License-Identifier: Apache-2.0

package direct

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// sender sends whole IP packets. Its sockets receive nothing.
type sender [inet.Families]int

var domains = [inet.Families]int{unix.AF_INET, unix.AF_INET6}

// newSender sends from the network namespace of the calling thread. It needs CAP_NET_RAW.
func newSender() (*sender, error) {
	s := &sender{-1, -1}
	for f, domain := range domains {
		fd, err := socket(domain, unix.SOCK_RAW, unix.IPPROTO_RAW)
		switch {
		case err == nil:
			s[f] = fd
		case !errors.Is(err, unix.EAFNOSUPPORT): // a kernel without IPv6
			s.close()
			return nil, fmt.Errorf("open a raw socket: %w", err)
		}
	}
	return s, nil
}

func socket(domain, kind, protocol int) (int, error) {
	fd, err := unix.Socket(domain, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	return fd, os.NewSyscallError("socket", err)
}

func (s *sender) close() {
	for _, fd := range s {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// send sends the probe to an address, from the one that this host uses for it. The calling thread is in the sender's network
// namespace.
func (s *sender) send(p probe, to netip.Addr) error {
	f := inet.FamilyOf(to)
	if s[f] < 0 {
		return os.NewSyscallError("socket", unix.EAFNOSUPPORT)
	}
	from, err := sourceFor(to)
	if err != nil {
		return err
	}
	return os.NewSyscallError("sendto", unix.Sendto(s[f], p.request(from, to), unix.MSG_DONTWAIT, sockaddr(to, 0)))
}

// sourceFor is the address that this host has for packets to another one: that of a socket which is connected there.
func sourceFor(to netip.Addr) (netip.Addr, error) {
	const discard = 9 // nothing is sent
	fd, err := socket(domains[inet.FamilyOf(to)], unix.SOCK_DGRAM, 0)
	if err != nil {
		return netip.Addr{}, err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, sockaddr(to, discard)); err != nil {
		return netip.Addr{}, os.NewSyscallError("connect", err)
	}
	own, err := unix.Getsockname(fd)
	if err != nil {
		return netip.Addr{}, os.NewSyscallError("getsockname", err)
	}
	switch a := own.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(a.Addr), nil
	case *unix.SockaddrInet6:
		return netip.AddrFrom16(a.Addr), nil
	}
	return netip.Addr{}, errors.New("the socket has no address")
}

func sockaddr(a netip.Addr, port int) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4(), Port: port}
	}
	return &unix.SockaddrInet6{Addr: a.As16(), Port: port}
}
