// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Serves reports whether the maps have a frontend for packets to an address. A ClusterIP that a device of
// this node has is the device's.
func (w *Writer) Serves(to netip.AddrPort, protocol proxier.Protocol) bool {
	key := lbmap.FrontendKey{Addr: lbmap.FromAddr(to.Addr()), Port: lbmap.NetworkPort(to.Port()), Proto: uint8(protocol), Scope: lbmap.ScopeAddress}
	w.mu.RLock() // otherwise the kernel may reuse the element for another key
	defer w.mu.RUnlock()
	local := w.locals[key.Addr]
	value, found, err := w.tables.Frontends.Lookup(key)
	if err == nil && found {
		return local == 0 || value.Flags>>lbmap.FrontendKindShift != lbmap.KindClusterIP
	}
	if err != nil || local&lbmap.LocalNodePorts == 0 {
		return false
	}
	key.Addr, key.Scope = lbmap.Unspecified(key.Addr), lbmap.ScopeNode
	_, found, err = w.tables.Frontends.Lookup(key)
	return err == nil && found
}

// WhileServed calls fn with a frontend and the decision that it is of, while the maps are as that says. A frontend at all addresses of the node
// has to be served at this one. fn is not called during a sync, nor where something is still to be written, could not be, or is left to others.
func (w *Writer) WhileServed(index uint32, f *proxier.Frontend, node netip.Addr, fn func(*proxier.Decision, *proxier.Frontend)) {
	if !w.mu.TryRLock() {
		return
	}
	defer w.mu.RUnlock()
	item := w.ports.Get(index)
	if item == nil || !item.Wanted() || w.ports.IsPending(index) || w.ports.Err(index) != nil {
		return
	}
	d := item.Desired()
	i := slices.IndexFunc(d.Frontends, func(o proxier.Frontend) bool { return o.Addr == f.Addr && o.Kind == f.Kind })
	if i < 0 || !served(&d.Frontends[i]) || d.Frontends[i].LeftOf(proxier.FromOutside) != "" {
		return
	}
	if f.Kind.Wildcard() {
		key := lbmap.KeyOf(d, i)
		key.Addr, key.Scope = lbmap.FromAddr(node), lbmap.ScopeAddress
		if w.locals[key.Addr]&lbmap.LocalNodePorts == 0 {
			return
		}
		if _, other, err := w.tables.Frontends.Lookup(key); other || err != nil { // a frontend at this address alone comes first
			return
		}
	}
	fn(d, &d.Frontends[i])
}
