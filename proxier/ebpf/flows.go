// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/sockdiag"
	"github.com/tandem-proxy/tandem/proxier"
)

// secondLook is how long after closing flows we look again: a connect() that
// had picked a backend when it was removed shows only when it has finished.
const secondLook = 500 * time.Millisecond

// flows closes UDP sockets that are connected, through a service address, to a
// backend that serves it no longer, and strays. Nothing else would tell their owners: a
// connected socket never passes a hook again. A socket that dialled the
// backend itself is left alone, and so is TCP, whose ends notice by themselves.
type flows struct {
	writer   *writer
	storage  *ciliumebpf.Map
	procRoot string
	report   func(proxier.Problem)
	wake     chan struct{}
	reader   *sockdiag.StorageReader // nil until first used
	reach    reach

	mu      sync.Mutex
	strays  map[SocketPair]struct{} // to be closed
	closed  uint64
	failing bool
}

func newFlows(w *writer, storage *ciliumebpf.Map, procRoot string, r reach, report func(proxier.Problem)) *flows {
	return &flows{
		writer: w, storage: storage, procRoot: procRoot, reach: r, report: report,
		wake: make(chan struct{}, 1), strays: map[SocketPair]struct{}{},
	}
}

// look has the flows looked at.
func (f *flows) look() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// unfinished says that the last look could not do everything.
func (f *flows) unfinished() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.failing
}

func (f *flows) run(ctx context.Context) {
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
		closed, err := f.closeNow(ctx)
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
				Message: "UDP sockets connected to removed backends could not all be closed; their owners notice only by themselves: " + err.Error(),
			})
		}
	}
}

// free lets go of what closeNow made.
func (f *flows) free() {
	if f.reader != nil {
		_ = f.reader.Close()
	}
}

// closeNow closes the sockets that lead to backends which serve them no
// longer, and the strays. Socket storage tells which the former are, for the whole
// machine at once; mostly there are none, and then no namespace is visited. Only where
// they are visible can they be closed.
func (f *flows) closeNow(ctx context.Context) (closed int, err error) {
	// Strays have no storage: they can be closed on a kernel that does not let it be read.
	stale, remotes, unread := f.find(ctx)
	strays := f.takeStrays()
	if len(stale) == 0 && len(strays) == 0 {
		return 0, unread
	}
	var hooked hooked
	if len(strays) > 0 {
		if hooked, err = f.reach.find(); err != nil {
			f.addStrays(strays)
			return 0, errors.Join(unread, err)
		}
	}
	for pair := range strays {
		remotes[pair.Remote] = struct{}{}
	}

	filter := sockdiag.Filter{Protocol: unix.IPPROTO_UDP, Remote: slices.Collect(maps.Keys(remotes))}
	err = sockdiag.ForEachNetNS(ctx, f.procRoot, func(sockdiag.NetNS) error {
		here := false
		switch {
		case len(strays) > 0:
			var err error
			if here, err = hooked.here(); err != nil {
				return err
			}
		case len(stale) == 0:
			return nil
		}
		_, n, err := sockdiag.Dump(ctx, filter, func(s sockdiag.Socket) bool {
			known := has(stale, s.Cookie)
			delete(stale, s.Cookie)
			return known || here && has(strays, SocketPair{s.Local, s.Remote}) && hooked.cgroup(s.CgroupID)
		})
		closed += n
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrPermission) {
		f.addStrays(strays)
	}
	switch {
	case len(stale) > 0:
		// Or their owners closed them this moment: the next look will tell.
		err = errors.Join(fmt.Errorf("%d sockets are in no network namespace that %s shows; it has to be the host's (hostPID)", len(stale), f.procRoot), err)
	case errors.Is(err, fs.ErrPermission):
		err = nil // what may not be looked at had nothing to close
	}
	return closed, errors.Join(unread, err)
}

// find lists the sockets that lead to backends which serve them no longer, by their
// cookies, and those backends.
func (f *flows) find(ctx context.Context) (stale map[uint64]struct{}, remotes map[netip.AddrPort]struct{}, err error) {
	stale, remotes = map[uint64]struct{}{}, map[netip.AddrPort]struct{}{}
	if f.reader == nil {
		// Not those that their owners disconnected: they keep what is stored.
		if f.reader, err = sockdiag.NewStorageReader(f.storage, 1<<sockdiag.Established); err != nil {
			return stale, remotes, err
		}
	}
	values, err := f.reader.Read(ctx)
	if err != nil {
		return stale, remotes, err
	}
	judge := f.writer.newJudge()
	for cookie, value := range values {
		var dest sockDest
		if len(value) != int(unsafe.Sizeof(dest)) {
			continue
		}
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&dest)), unsafe.Sizeof(dest)), value)
		if dest.Connected != 0 && proxier.Protocol(dest.Proto) == proxier.UDP && judge.stale(&dest) {
			stale[cookie] = struct{}{}
			remotes[goAddrPort(dest.Addr, dest.Port)] = struct{}{}
		}
	}
	return stale, remotes, nil
}

// judge knows which backends serve which service, as of one moment.
type judge struct {
	writer *writer
	live   map[liveBackend]struct{}
}

type liveBackend struct {
	service uint32
	addr    [4]uint32
	port    uint16
}

func (w *writer) newJudge() *judge {
	w.mu.RLock()
	defer w.mu.RUnlock()
	j := &judge{writer: w, live: map[liveBackend]struct{}{}}
	for id := range w.backends.next {
		b := &w.tables.backends[id]
		if b.Service != 0 && proxier.Protocol(b.Proto) == proxier.UDP {
			j.live[liveBackend{b.Service, b.Addr, b.Port}] = struct{}{}
		}
	}
	return j
}

// stale says that the socket's backend does not serve the address it dialled.
// It goes by addresses, not ids: the tables may have been built anew since.
func (j *judge) stale(dest *sockDest) bool {
	key := frontendKey{Addr: dest.Vip, Port: dest.VipPort, Proto: uint8(proxier.UDP), Scope: scopeAddress}
	j.writer.mu.RLock() // or the element becomes that of another key
	defer j.writer.mu.RUnlock()
	value, found, err := j.writer.tables.frontends.Lookup(key)
	if err == nil && !found {
		key.Addr, key.Scope = unspecifiedOf(key.Addr), scopeNode
		value, found, err = j.writer.tables.frontends.Lookup(key)
	}
	if err != nil {
		return false
	}
	return !found || !has(j.live, liveBackend{value.Service, dest.Addr, dest.Port})
}

// usage of the tables.
func (w *writer) usage() map[string]Usage {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return map[string]Usage{
		"frontends": {w.usedFrontends, w.tables.frontends.MaxEntries()},
		"services":  {w.services.used, int(w.services.limit) - 1},
		"backends":  {w.backends.used, int(w.backends.limit) - 1},
		"slots":     {w.slots.used, int(w.slots.size)},
		"ranges":    {w.usedRanges, w.tables.ranges.MaxEntries()},
		"locals":    {len(w.locals), w.tables.locals.MaxEntries()},
	}
}
