// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// liveness is a snapshot of the backends that serve each service.
type liveness struct {
	writer *Writer
	live   map[liveBackend]struct{}
	// elsewhere are the service ports of frontends that other datapaths serve.
	elsewhere map[lbmap.FrontendKey]*proxier.Decision
}

type liveBackend struct {
	service uint32
	addr    [4]uint32
	port    uint16
}

// StaleSockets returns a function that reports whether the backend of a socket, by its stored
// destination, has been removed.
func (w *Writer) StaleSockets() func(*lbmap.SocketDest) bool { return w.newLiveness().stale }

func (w *Writer) newLiveness() *liveness {
	w.mu.RLock()
	defer w.mu.RUnlock()
	j := &liveness{writer: w, live: map[liveBackend]struct{}{}, elsewhere: map[lbmap.FrontendKey]*proxier.Decision{}}
	for id := range w.backends.next {
		b := &w.tables.Backends[id]
		if b.Service != 0 && proxier.Protocol(b.Proto) == proxier.UDP {
			j.live[liveBackend{b.Service, b.Addr, b.Port}] = struct{}{}
		}
	}
	for _, item := range w.ports.All() {
		d := item.Desired()
		if d == nil || d.Name.Protocol != proxier.UDP {
			continue
		}
		for i := range d.Frontends {
			if f := &d.Frontends[i]; f.Conflict == nil && f.IsLeft() {
				j.elsewhere[lbmap.KeyOf(d, i)] = d
			}
		}
	}
	return j
}

// stale reports whether the socket's backend does not serve the address that it dialled. It compares
// addresses, not ids, because the tables may have been rebuilt since.
func (j *liveness) stale(dest *lbmap.SocketDest) bool {
	key := lbmap.FrontendKey{Addr: dest.Vip, Port: dest.VipPort, Proto: uint8(proxier.UDP), Scope: lbmap.ScopeAddress}
	j.writer.mu.RLock() // otherwise the kernel may reuse the element for another key
	defer j.writer.mu.RUnlock()
	value, found, err := j.writer.tables.Frontends.Lookup(key)
	d := j.elsewhere[key]
	if err == nil && !found && d == nil {
		key.Addr, key.Scope = lbmap.Unspecified(key.Addr), lbmap.ScopeNode
		value, found, err = j.writer.tables.Frontends.Lookup(key)
		d = j.elsewhere[key]
	}
	switch {
	case err != nil:
		return false
	case found:
		_, serves := j.live[liveBackend{value.Service, dest.Addr, dest.Port}]
		return !serves
	case d != nil:
		backend := lbmap.ToAddrPort(dest.Addr, dest.Port)
		return !slices.ContainsFunc(d.Backends, func(b proxier.Backend) bool { return b.Addr == backend })
	}
	return true
}
