// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"net/netip"

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
