// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sockdiag

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

var (
	// ErrNotSupported means that this kernel cannot dump sockets of the protocol,
	// or cannot destroy sockets (CONFIG_INET_DIAG_DESTROY).
	ErrNotSupported = errors.New("not supported by the kernel")
	// ErrStorageNotSupported means that this kernel has no way of reading the
	// storage of all sockets.
	ErrStorageNotSupported = errors.New("reading socket storage is not supported by the kernel")
	// ErrInterrupted means that sockets changed during every one of several dumps,
	// so that some may be missing.
	ErrInterrupted = errors.New("dump was interrupted by changes")
)

// Socket states, as the kernel numbers them; a connected UDP socket is Established,
// another one Close.
const (
	Established uint8 = iota + 1
	SynSent
	SynRecv
	FinWait1
	FinWait2
	TimeWait
	Close
	CloseWait
	LastAck
	Listen
	Closing
)

// Filter says which sockets to look at.
type Filter struct {
	// Protocol is unix.IPPROTO_UDP or unix.IPPROTO_TCP.
	Protocol uint8
	// Remote lists the addresses a socket may be connected to; port 0 stands for
	// every port. IPv4 entries also find IPv6 sockets connected to the mapped
	// address. Empty means any.
	Remote []netip.AddrPort
	// States is a set of 1<<state bits. If zero, the sockets that have a peer and
	// a process: Established for UDP, all but Listen, Close, TimeWait and SynRecv
	// for TCP.
	States uint32
	// Storage is what a StorageReader read, to be reported with the sockets. It
	// does not restrict which are found.
	Storage StorageValues
}

// Socket is one socket found.
type Socket struct {
	// Family is unix.AF_INET or unix.AF_INET6, also where an IPv6 socket carries
	// IPv4: its addresses are given as IPv4 then.
	Family        uint8
	State         uint8
	Local, Remote netip.AddrPort
	Cookie        uint64
	Inode         uint32
	// CgroupID is the socket's cgroup2 (Linux 5.8), 0 if not reported.
	CgroupID uint64
	// Storage is its value in the storage of the filter, nil if it has none.
	Storage []byte

	id sockID // as the kernel sent it
}

const (
	// maxBytecode is the number of addresses up to which the kernel filters. It
	// tries them one by one for each socket (some 10 ns each), while handing
	// out a socket costs about a microsecond.
	maxBytecode = 128
	// maxDumps bounds the attempts at an undisturbed dump.
	maxDumps = 5
	// destroyBatch is how many requests go into one message; their answers
	// must fit into the socket's receive buffer.
	destroyBatch = 64
)

// Dump calls fn for every matching socket in the network namespace of the calling
// thread (lock the goroutine to it if that matters) and destroys those for which it
// returns true. A read of a destroyed socket fails with ECONNABORTED.
//
// fn runs after the dump is complete. A socket that vanishes before it can be
// destroyed is fine, and not counted. An error about one socket does not keep the
// others.
func Dump(ctx context.Context, f Filter, fn func(Socket) (destroy bool)) (seen, destroyed int, err error) {
	if f.Protocol != unix.IPPROTO_UDP && f.Protocol != unix.IPPROTO_TCP {
		return 0, 0, fmt.Errorf("dump sockets: protocol %d is neither TCP nor UDP", f.Protocol)
	}
	c, err := open(ctx)
	if err != nil {
		return 0, 0, err
	}
	defer c.Close()
	var doomed []Socket
	for _, family := range families(f.Remote) {
		found, err := c.dump(family, f)
		if err != nil {
			return seen, 0, fmt.Errorf("dump sockets: %w", err)
		}
		for _, s := range found {
			seen++
			s.Storage = f.Storage[s.Cookie]
			if fn(s) {
				doomed = append(doomed, s)
			}
		}
	}
	for len(doomed) > 0 {
		n := min(len(doomed), destroyBatch)
		gone, derr := c.destroy(f.Protocol, doomed[:n])
		destroyed += gone
		err = errors.Join(err, derr)
		if ctx.Err() != nil || errors.Is(derr, ErrNotSupported) || errors.Is(derr, unix.EPERM) {
			break // the rest would fare no better
		}
		doomed = doomed[n:]
	}
	if err != nil {
		err = fmt.Errorf("destroy sockets: %w", err)
	}
	return seen, destroyed, err
}

// families lists the dumps to make. IPv6 sockets can be connected to IPv4
// addresses, so they always have to be looked at.
func families(remote []netip.AddrPort) []uint8 {
	for _, r := range remote {
		if r.Addr().Unmap().Is4() {
			return []uint8{unix.AF_INET, unix.AF_INET6}
		}
	}
	if len(remote) > 0 {
		return []uint8{unix.AF_INET6}
	}
	return []uint8{unix.AF_INET, unix.AF_INET6}
}

func (f *Filter) states() uint32 {
	switch {
	case f.States != 0:
		return f.States
	case f.Protocol == unix.IPPROTO_UDP:
		return 1 << Established
	}
	return 1<<Established | 1<<SynSent | 1<<FinWait1 | 1<<FinWait2 | 1<<CloseWait | 1<<LastAck | 1<<Closing
}

// matcher repeats the kernel's filter for lists too long for it; nil means that
// nothing is left to check.
func (f *Filter) matcher() func(netip.AddrPort) bool {
	if len(f.Remote) <= maxBytecode {
		return nil
	}
	set := make(map[netip.AddrPort]struct{}, len(f.Remote))
	for _, r := range f.Remote {
		set[netip.AddrPortFrom(r.Addr().Unmap(), r.Port())] = struct{}{}
	}
	return func(r netip.AddrPort) bool {
		if _, ok := set[r]; ok {
			return true
		}
		_, ok := set[netip.AddrPortFrom(r.Addr(), 0)]
		return ok
	}
}
