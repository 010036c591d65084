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
	// ErrStorageNotSupported means that this kernel cannot read the storage of all
	// sockets.
	ErrStorageNotSupported = errors.New("reading socket storage is not supported by the kernel")
	// ErrInterrupted means that sockets changed during each of several dumps, so some
	// may be missing.
	ErrInterrupted = errors.New("dump was interrupted by changes")
)

// Socket states, as the kernel numbers them. A connected UDP socket is Established,
// other UDP sockets are Close.
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

// Filter selects sockets.
type Filter struct {
	// Protocol is unix.IPPROTO_UDP, unix.IPPROTO_TCP, or unix.IPPROTO_SCTP, whose sockets cannot be destroyed.
	Protocol uint8
	// Remote lists remote addresses; port 0 matches every port. IPv4 entries also
	// match IPv6 sockets connected to the mapped address. Empty matches all.
	Remote []netip.AddrPort
	// States is a set of 1<<state bits. Zero selects sockets with a peer and a
	// process: Established for UDP, all but Listen, Close, TimeWait and SynRecv for
	// TCP.
	States uint32
	// Storage has the values that a StorageReader read, which are reported with the
	// sockets. It does not restrict which sockets are found.
	Storage StorageValues
	// Info asks for TCP's state of each socket.
	Info bool
}

// Socket is one socket found.
type Socket struct {
	// Family is unix.AF_INET or unix.AF_INET6. An IPv6 socket connected to an
	// IPv4-mapped address has IPv4 addresses here.
	Family        uint8
	State         uint8
	Local, Remote netip.AddrPort
	// Locals are all local addresses of a socket of SCTP; none for other protocols.
	Locals []netip.Addr
	Cookie uint64
	Inode  uint32
	// V6Only says that an IPv6 socket that listens, or of UDP, takes nothing of IPv4 (Linux 4.10; otherwise it is false).
	V6Only bool
	// CgroupID is the socket's cgroup2 (Linux 5.8), 0 if not reported.
	CgroupID uint64
	// Storage is its value in Filter.Storage, or nil.
	Storage []byte
	// TCP is the state of a TCP socket as far as the kernel has it, if Filter.Info asks for it; nil otherwise.
	TCP *unix.TCPInfo

	id sockID // in the kernel's format
}

const (
	// maxBytecode is the number of addresses up to which the kernel filters. It
	// compares them one by one for each socket (some 10 ns each), while reporting a
	// socket takes about a microsecond.
	maxBytecode = 128
	// maxDumps bounds the attempts at an uninterrupted dump.
	maxDumps = 5
	// destroyBatch is the number of requests per message. Their answers must fit
	// into the receive buffer of the socket.
	destroyBatch = 64
)

// Dump calls fn for every matching socket in the network namespace of the calling
// thread (lock the goroutine to it if that matters) and destroys those for which fn
// returns true. Reads from a destroyed socket fail with ECONNABORTED, and writes to one
// of UDP with EDESTADDRREQ.
//
// fn runs after the dump is complete. A socket that is closed before it can be
// destroyed is not counted and no error. An error for one socket does not stop the
// others from being destroyed.
func Dump(ctx context.Context, f Filter, fn func(Socket) (destroy bool)) (seen, destroyed int, err error) {
	if f.Protocol != unix.IPPROTO_UDP && f.Protocol != unix.IPPROTO_TCP && f.Protocol != unix.IPPROTO_SCTP {
		return 0, 0, fmt.Errorf("dump sockets: protocol %d is not TCP, UDP or SCTP", f.Protocol)
	}
	c, err := open()
	if err != nil {
		return 0, 0, err
	}
	defer c.Close()
	var doomed []Socket
	for _, family := range families(f.Remote) {
		found, err := c.dump(ctx, family, f)
		if err != nil {
			return seen, 0, fmt.Errorf("dump sockets: %w", err)
		}
		for _, s := range found {
			seen++
			s.Storage = f.Storage[s.Cookie].Storage
			if fn(s) {
				doomed = append(doomed, s)
			}
		}
	}
	for len(doomed) > 0 {
		n := min(len(doomed), destroyBatch)
		gone, derr := c.destroy(ctx, f.Protocol, doomed[:n])
		destroyed += gone
		err = errors.Join(err, derr)
		if ctx.Err() != nil || errors.Is(derr, ErrNotSupported) || errors.Is(derr, unix.EPERM) {
			break // the others would fail too
		}
		doomed = doomed[n:]
	}
	if err != nil {
		err = fmt.Errorf("destroy sockets: %w", err)
	}
	return seen, destroyed, err
}

// families returns the families to dump. IPv6 sockets are always included, since they
// can be connected to IPv4 addresses.
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

// matcher filters in user space where the list is too long for the kernel. It returns
// nil if the kernel filters.
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
