// SPDX-License-Identifier: Apache-2.0

package sockets

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"sync"
	"time"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/kernel/sockdiag"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// secondLook is the delay of another search after backends were removed. A connect() that had picked
// the backend before becomes visible only when it has finished.
const secondLook = 500 * time.Millisecond

// Closer closes UDP sockets that are connected, through a service address, to a backend that
// serves it no longer, and untranslated ones: those that were connected to a frontend before
// the programs were there. Nothing else would tell their owners, since a connected socket
// never passes a hook again. A socket that dialled the backend itself is left alone, and so is
// TCP, whose ends notice by themselves.
type Closer struct {
	storage  *ciliumebpf.Map
	isStale  StaleFunc
	procRoot string
	report   func(proxier.Problem)
	wake     chan struct{}
	reader   *sockdiag.StorageReader // nil until first used
	scope    scope

	mu           sync.Mutex
	untranslated sets.Set[Pair] // to be closed
	closed       uint64
	failing      bool
}

// StaleFunc returns a function that reports whether the backend of a socket, by its stored
// destination, no longer serves it at the time of the call.
type StaleFunc func() (stale func(*lbmap.SocketDest) bool)

// Options of a Closer.
type Options struct {
	// Storage is what programs stored of each socket.
	Storage *ciliumebpf.Map
	// OptOuts are the network namespaces that the programs leave alone.
	OptOuts *ciliumebpf.Map
	Stale   StaleFunc
	Cgroup  *os.File
	// Host is the network namespace of the node.
	Host netns.Namespace
	// Left are the clients whose sockets the programs leave alone.
	Left proxier.Clients
	// ProcRoot is where network namespaces are found.
	ProcRoot string
	Report   func(proxier.Problem)
}

// New makes a Closer, which does nothing before Run or CloseNow.
func New(o Options) *Closer {
	return &Closer{
		storage: o.Storage, isStale: o.Stale, procRoot: o.ProcRoot, report: o.Report,
		scope: scope{cgroup: o.Cgroup, netns: o.Host, optOuts: o.OptOuts, left: o.Left},
		wake:  make(chan struct{}, 1), untranslated: sets.New[Pair](),
	}
}

// Wake makes Run search for sockets to close.
func (f *Closer) Wake() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// Unfinished reports whether the last search was incomplete.
func (f *Closer) Unfinished() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.failing
}

// Run searches and closes sockets after each Wake, until ctx is done.
func (f *Closer) Run(ctx context.Context) {
	logger := klog.FromContext(ctx)
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.wake:
			again = time.After(secondLook)
		case <-again:
			again = nil
		}
		start := time.Now()
		closed, err := f.CloseNow(ctx)
		f.mu.Lock()
		f.closed += uint64(closed)
		first := err != nil && !f.failing
		f.failing = err != nil
		f.mu.Unlock()
		if closed > 0 {
			logger.V(2).Info("Closed UDP sockets of removed backends", "sockets", closed, "duration", time.Since(start))
		}
		if first && ctx.Err() == nil {
			f.report(proxier.Problem{
				Kind: "Node", Reason: proxier.ReasonFlowsNotClosed,
				Message: "Cannot close all UDP sockets that are connected to removed backends; clients may keep sending to them: " + err.Error(),
			})
		}
	}
}

// Close frees the reader that CloseNow created.
func (f *Closer) Close() {
	if f.reader != nil {
		_ = f.reader.Close()
	}
}

// CloseNow closes the sockets that are connected to removed backends, and untranslated ones. Socket
// storage lists the former for all network namespaces at once, unless the kernel refuses the iterator over the
// map. Mostly there are none, and then no namespace is visited. Only sockets in namespaces below procRoot can be closed.
func (f *Closer) CloseNow(ctx context.Context) (closed int, err error) {
	// Untranslated sockets have no storage, so they can be closed even if it cannot be read.
	stale, remotes, unread := f.find(ctx)
	untranslated := f.TakeUntranslated()
	if len(stale) == 0 && len(untranslated) == 0 {
		return 0, unread
	}
	var served servedSockets
	if len(untranslated) > 0 {
		if served, err = f.scope.find(); err != nil {
			f.addUntranslated(untranslated)
			return 0, errors.Join(unread, err)
		}
	}
	for pair := range untranslated {
		remotes.Insert(pair.Remote)
	}

	filter := sockdiag.Filter{Protocol: unix.IPPROTO_UDP, Remote: remotes.UnsortedList()}
	err = sockdiag.ForEachNetNS(ctx, f.procRoot, func(sockdiag.NetNS) error {
		here := false
		switch {
		case len(untranslated) > 0:
			var err error
			if here, err = served.here(); err != nil {
				return err
			}
		case len(stale) == 0:
			return nil
		}
		_, n, err := sockdiag.Dump(ctx, filter, func(s sockdiag.Socket) bool {
			known := stale.Has(s.Cookie)
			delete(stale, s.Cookie)
			return known || here && untranslated.Has(Pair{s.Local, s.Remote}) && served.cgroup(s.CgroupID)
		})
		closed += n
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrPermission) {
		f.addUntranslated(untranslated)
	}
	switch {
	case len(stale) > 0:
		// Or their owners have just closed them. The next search tells.
		err = errors.Join(fmt.Errorf("%d sockets are in network namespaces that %s does not show: it must be the host's /proc (hostPID)", len(stale), f.procRoot), err)
	case errors.Is(err, fs.ErrPermission):
		err = nil // namespaces that cannot be opened had none of the sockets
	}
	return closed, errors.Join(unread, err)
}

// find lists the sockets that are connected to removed backends, by their cookies, and the addresses of
// these backends.
func (f *Closer) find(ctx context.Context) (stale sets.Set[uint64], remotes sets.Set[netip.AddrPort], err error) {
	stale, remotes = sets.New[uint64](), sets.New[netip.AddrPort]()
	if f.reader == nil {
		// Without sockets that their owners disconnected: they keep their storage.
		reader, err := sockdiag.NewStorageReader(f.storage, sockdiag.StorageOptions{States: 1 << sockdiag.Established, Protocols: []string{"udp"}, ProcRoot: f.procRoot})
		if err != nil {
			return stale, remotes, err
		}
		f.reader = reader
	}
	values, err := f.reader.Read(ctx)
	isStale := f.isStale()
	for cookie, s := range values {
		value := s.Storage
		var dest lbmap.SocketDest
		if len(value) != int(unsafe.Sizeof(dest)) {
			continue
		}
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&dest)), unsafe.Sizeof(dest)), value)
		if dest.Connected != 0 && proxier.Protocol(dest.Proto) == proxier.UDP && isStale(&dest) {
			stale.Insert(cookie)
			remotes.Insert(lbmap.ToAddrPort(dest.Addr, dest.Port))
		}
	}
	return stale, remotes, err
}

// Closed counts the sockets that were closed.
func (f *Closer) Closed() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.closed
}

// CloseSoon closes these sockets with the next search, unless the programs would not translate them if
// they were connected at that time.
func (f *Closer) CloseSoon(pairs []Pair) {
	f.addUntranslated(sets.New(pairs...))
	f.Wake()
}
