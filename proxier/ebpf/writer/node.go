// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"sync/atomic"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// syncNode writes what all frontends have in common.
func (w *Writer) syncNode(u proxier.Update) error {
	if u.NodeRules != nil {
		w.rules = u.NodeRules
	}
	if w.rules == nil || u.NodeRules == nil && !u.Full {
		return nil
	}
	return errors.Join(w.syncLocals(), w.syncPrefixes())
}

// PodDetector tells pods from others.
func (w *Writer) PodDetector() proxier.Detector {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if w.rules == nil {
		return proxier.Detector{}
	}
	return w.rules.Pods
}

// syncLocals compares with what is in the map, since that is small.
func (w *Writer) syncLocals() error {
	want := map[[4]uint32]uint32{}
	for _, a := range w.rules.LocalAddrs {
		want[lbmap.FromAddr(a)] |= lbmap.LocalAddress
	}
	for _, a := range w.rules.NodePortAddrs {
		want[lbmap.FromAddr(a)] |= lbmap.LocalAddress | lbmap.LocalNodePorts
	}
	have := map[[4]uint32]uint32{}
	if err := w.tables.Locals.Dump(func(key [4]uint32, value uint32) { have[key] = value }); err != nil {
		return fmt.Errorf("read the local addresses: %w", err)
	}
	defer func() { w.locals = have }()
	for key := range maps.Clone(have) {
		if _, ok := want[key]; ok {
			continue
		}
		if err := w.tables.Locals.Delete(key); err != nil {
			return fmt.Errorf("delete local address %s: %w", lbmap.ToAddr(key), err)
		}
		delete(have, key)
		w.writes++
	}
	for key, value := range want {
		if old, ok := have[key]; ok && old == value {
			continue
		}
		if err := w.tables.Locals.Put(key, value); err != nil {
			return fmt.Errorf("write local address %s: %w", lbmap.ToAddr(key), err)
		}
		have[key] = value
		w.writes++
	}
	return nil
}

// syncPrefixes writes the element that programs do not read, and then switches to it.
func (w *Writer) syncPrefixes() error {
	var want lbmap.Node
	var errs []error
	fill := func(name string, to []lbmap.Prefix, n *uint32, from []netip.Prefix) {
		if len(from) > len(to) {
			errs = append(errs, fmt.Errorf("%d %s do not fit into the %d entries of the map", len(from), name, len(to)))
			from = from[:len(to)]
		}
		for i, p := range from {
			to[i] = lbmap.FromPrefix(p)
		}
		*n = uint32(len(from))
	}
	r := w.rules
	var loopback []netip.Prefix
	for family := range proxier.Families {
		loopback = append(loopback, r.Loopback[family]...)
	}
	fill("prefixes of pods", want.Pods[:], &want.PodPrefixes, r.Pods.CIDRs)
	fill("prefixes of loopback addresses", want.Loopback[:], &want.LoopbackPrefixes, loopback)
	fill("prefixes of ServiceCIDRs", want.Unserved[:], &want.UnservedPrefixes, r.Unserved)
	for family, to := range [...]*[4]uint32{&want.Addr4, &want.Addr6} {
		if a := r.NodeIPs[family]; a.IsValid() {
			*to = lbmap.FromAddr(a)
		}
	}
	current := w.tables.Meta.Node & 1
	if w.tables.Nodes[current] == want {
		return errors.Join(errs...)
	}
	w.grace() // programs that still read the other element must end first
	w.tables.Nodes[1-current] = want
	atomic.StoreUint32(&w.tables.Meta.Node, 1-current)
	w.writes++
	return errors.Join(errs...)
}
