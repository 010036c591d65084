// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sockdiag

import (
	"context"
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// Listening calls fn for each address and port where a socket takes connections or datagrams from any peer: sockets of TCP and SCTP that
// listen, and of UDP without a peer. A wildcard of IPv6 that takes IPv4 as well is passed as both. A kernel
// without SCTP has none of that; one that cannot dump sockets of TCP or UDP is an error.
//
// As with Dump, the network namespace is that of the calling thread.
func Listening(ctx context.Context, fn func(p inet.Protocol, at netip.AddrPort)) error {
	for _, of := range []struct {
		protocol inet.Protocol
		state    uint8
	}{{inet.TCP, Listen}, {inet.UDP, Close}, {inet.SCTP, Listen}} {
		_, _, err := Dump(ctx, Filter{Protocol: uint8(of.protocol), States: 1 << of.state}, func(s Socket) bool {
			port := s.Local.Port()
			for _, a := range s.Locals {
				fn(of.protocol, netip.AddrPortFrom(a, port))
			}
			if len(s.Locals) == 0 {
				fn(of.protocol, s.Local)
			}
			if s.Family == unix.AF_INET6 && s.Local.Addr() == netip.IPv6Unspecified() && !s.V6Only {
				fn(of.protocol, netip.AddrPortFrom(netip.IPv4Unspecified(), port))
			}
			return false
		})
		if err != nil && (of.protocol != inet.SCTP || !errors.Is(err, ErrNotSupported)) {
			return err
		}
	}
	return nil
}
