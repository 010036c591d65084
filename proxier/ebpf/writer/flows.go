// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// RenumberFlows returns a function that gives a flow that was made beside other tables the ids that its service and its backend have in
// these. It compares addresses. A UDP flow whose backend is not there gets none, so its next datagram begins another one; a TCP
// connection goes on as it is. The backends are those at the first such flow.
func (w *Writer) RenumberFlows() func(*lbmap.Flow) {
	var ids map[liveBackend]uint32
	first := w.tables.Meta.Generation
	services := map[lbmap.FrontendKey]uint32{}
	return func(f *lbmap.Flow) {
		if f.Service == 0 || int32(f.BackendGeneration-first) >= 0 {
			return // of no Service, or of these tables
		}
		to := lbmap.FrontendKey{Addr: f.Request.Dst, Port: f.Request.Dport, Proto: f.Request.Proto, Scope: lbmap.ScopeAddress}
		service, known := services[to]
		if !known {
			service = w.serviceAt(to)
			services[to] = service
		}
		if ids == nil {
			ids = w.backendIDs()
		}
		id, ok := ids[liveBackend{service, f.Reply.Src, f.Reply.Sport}]
		switch {
		case ok:
			f.Service, f.Backend, f.BackendGeneration = service, id, w.tables.Backends[id].Generation
		case proxier.Protocol(f.Request.Proto) == proxier.UDP:
			f.Backend, f.BackendGeneration = 0, first
		}
	}
}

// backendIDs are the ids of all backends.
func (w *Writer) backendIDs() map[liveBackend]uint32 {
	w.mu.RLock()
	defer w.mu.RUnlock()
	ids := map[liveBackend]uint32{}
	for id := range w.backends.next {
		if b := &w.tables.Backends[id]; b.Service != 0 {
			ids[liveBackend{b.Service, b.Addr, b.Port}] = uint32(id)
		}
	}
	return ids
}

// serviceAt returns the service of the frontend at an address, or of the NodePort at its port; 0 for none.
func (w *Writer) serviceAt(key lbmap.FrontendKey) uint32 {
	w.mu.RLock() // otherwise the kernel may reuse the element for another key
	defer w.mu.RUnlock()
	value, found, err := w.tables.Frontends.Lookup(key)
	if err == nil && !found {
		key.Addr, key.Scope = lbmap.Unspecified(key.Addr), lbmap.ScopeNode
		value, found, err = w.tables.Frontends.Lookup(key)
	}
	if err != nil || !found {
		return 0
	}
	return value.Service
}
