// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sockdiag_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/sockdiag"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestListening: sockets of IPv6 that take IPv4 too can be told from those that do not, and those of SCTP with several addresses have
// them all.
func TestListening(t *testing.T) {
	s := netns(t)
	at := func(a unix.Sockaddr, v6only bool) func(fd int) error {
		return func(fd int) (err error) {
			if v6only {
				err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
			}
			return errors.Join(err, unix.Bind(fd, a))
		}
	}
	one := unix.SockaddrInet4{Port: 7003, Addr: backend4.As4()}
	for _, c := range []struct {
		family int
		bind   func(fd int) error
		want   []string
	}{
		{unix.AF_INET6, at(&unix.SockaddrInet6{Port: 7001}, false), []string{"0.0.0.0:7001", "[::]:7001"}},
		{unix.AF_INET6, at(&unix.SockaddrInet6{Port: 7002}, true), []string{"[::]:7002"}},
		{unix.AF_INET, at(&one, false), []string{"127.0.1.1:7003"}},
	} {
		for _, protocol := range []inet.Protocol{inet.TCP, inet.UDP, inet.SCTP} {
			t.Run(fmt.Sprintf("%s/%s", protocol, strings.Join(c.want, ",")), func(t *testing.T) {
				listen(t, s, protocol, c.family, c.bind)
				if got := listening(t, s, protocol); !slices.Equal(got, c.want) {
					t.Errorf("got %v, want %v", got, c.want)
				}
			})
		}
	}
	t.Run("SCTP/several", func(t *testing.T) {
		listen(t, s, inet.SCTP, unix.AF_INET, func(fd int) error {
			const bindxAdd = 100 // SCTP_SOCKOPT_BINDX_ADD
			second := [unix.SizeofSockaddrInet4]byte{unix.AF_INET, 0, 7003 >> 8, 7003 & 0xff, 127, 0, 1, 2}
			return errors.Join(at(&one, false)(fd), unix.SetsockoptString(fd, unix.IPPROTO_SCTP, bindxAdd, string(second[:])))
		})
		if got, want := listening(t, s, inet.SCTP), []string{"127.0.1.1:7003", "127.0.1.2:7003"}; !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

// listen opens a socket that listens until the test ends.
func listen(t *testing.T, s *lab.Sandbox, protocol inet.Protocol, family int, bind func(fd int) error) {
	t.Helper()
	if err := lab.SCTPAvailable(); protocol == inet.SCTP && err != nil {
		lab.SkipOrFailModule(t, err)
	}
	kind := unix.SOCK_STREAM
	if protocol == inet.UDP {
		kind = unix.SOCK_DGRAM
	}
	if err := s.Do(func() error {
		fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, int(protocol))
		if err != nil {
			return err
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := bind(fd); err != nil || protocol == inet.UDP {
			return err
		}
		return unix.Listen(fd, 1)
	}); err != nil {
		t.Fatal(err)
	}
}

// listening are the addresses where sockets of one protocol listen in a namespace, sorted.
func listening(t *testing.T, s *lab.Sandbox, protocol inet.Protocol) (found []string) {
	t.Helper()
	if err := s.Do(func() error {
		return sockdiag.Listening(t.Context(), func(p inet.Protocol, at netip.AddrPort) {
			if p == protocol {
				found = append(found, at.String())
			}
		})
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(found)
	return found
}
