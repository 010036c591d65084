// SPDX-License-Identifier: Apache-2.0

package ebpf

import "github.com/tandem-proxy/tandem/proxier"

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

// StaleSockets says of the destinations of sockets whether their backends serve them no
// longer.
func (w *writer) StaleSockets() func(*sockDest) bool { return w.newJudge().stale }

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
	key := frontendKey{Addr: dest.Vip, Port: dest.VipPort, Proto: uint8(proxier.UDP), Scope: ScopeAddress}
	j.writer.mu.RLock() // or the element becomes that of another key
	defer j.writer.mu.RUnlock()
	value, found, err := j.writer.tables.frontends.Lookup(key)
	if err == nil && !found {
		key.Addr, key.Scope = unspecifiedOf(key.Addr), ScopeNode
		value, found, err = j.writer.tables.frontends.Lookup(key)
	}
	if err != nil {
		return false
	}
	_, serves := j.live[liveBackend{value.Service, dest.Addr, dest.Port}]
	return !found || !serves
}
