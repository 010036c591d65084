// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/packet"
)

// pings numbers the echo requests of this process.
var pings atomic.Uint32

// Ping sends an ICMP echo request and waits for the reply. It returns an ICMP error about
// the request as the corresponding errno. Without a deadline in ctx it times out after
// two seconds.
func (s *Sandbox) Ping(ctx context.Context, to netip.Addr) error {
	c, err := s.dialICMP(to)
	if err != nil {
		return err
	}
	defer c.Close()
	return wrap(ping(ctx, c, to.Is4()), "ping %s from %s", to, s.Name)
}

// dialICMP opens a raw socket. It is connected, and so receives only from the peer.
func (s *Sandbox) dialICMP(to netip.Addr) (net.Conn, error) {
	var c net.Conn
	err := s.Do(func() error {
		family, protocol := unix.AF_INET, unix.IPPROTO_ICMP
		level, errorsToo := unix.IPPROTO_IP, unix.IP_RECVERR
		if to.Is6() {
			family, protocol = unix.AF_INET6, unix.IPPROTO_ICMPV6
			level, errorsToo = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
		}
		fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		f := os.NewFile(uintptr(fd), "icmp")
		defer f.Close()
		// Without it, the kernel does not report transient errors.
		if err := unix.SetsockoptInt(fd, level, errorsToo, 1); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
		if err := unix.Connect(fd, sockaddr(netip.AddrPortFrom(to, 0))); err != nil {
			return os.NewSyscallError("connect", err)
		}
		c, err = net.FileConn(f)
		return err
	})
	return c, wrap(err, "dial icmp %s from %s", to, s.Name)
}

func ping(ctx context.Context, c net.Conn, v4 bool) error {
	if err := setDeadline(ctx, c, dialTimeout); err != nil {
		return err
	}
	request, reply := uint8(packet.EchoRequest6>>8), uint8(packet.EchoReply6>>8)
	if v4 {
		request, reply = packet.EchoRequest>>8, packet.EchoReply>>8
	}
	id := pings.Add(1)
	message := packet.Packet{ICMP: &packet.ICMP{Type: request, Rest: id}}
	if _, err := c.Write(message.Build()); err != nil {
		return err
	}
	buf := make([]byte, 1500)
	for {
		n, err := c.Read(buf)
		if err != nil {
			return err
		}
		got := buf[:n]
		if v4 { // includes the IP header
			got = packet.ParseIP(got).Transport()
		}
		if len(got) >= 8 && got[0] == reply && binary.BigEndian.Uint32(got[4:]) == id {
			return nil
		}
	}
}
