// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// direct is what the tables have of direct server return: on the side of the client's node, backends whose nodes take packets
// in IP packets; on the side of the backend's node, the backends to which other nodes may send those.
type direct struct {
	// ports have routes of direct server return; of each, what it has in targets.
	ports   map[uint32][]target
	targets mirror[lbmap.TargetKey, uint64]
	// nodes are the addresses that may send such packets to this node; nil if those of the cluster's nodes are not known, so that
	// all may.
	nodes map[lbmap.TargetKey]struct{}
	// clients are the ranges of the addresses of nodes and pods, sorted.
	clients []lbmap.RangeKey
	// ready are the addresses of backends whose nodes take such packets.
	ready map[netip.Addr]struct{}
	// accepts says that frontends take such packets; until then, although no port is direct; zero while some are.
	accepts bool
	until   time.Time
}

// directGrace is how long frontends take packets in IP packets after the last service port with direct server return is gone, or
// this process started without any. It is longer than other nodes take to find out.
const directGrace = 30 * time.Second

// anyFrontend is the target that stands for all frontends, and anyNode that for all senders.
var (
	anyFrontend = lbmap.TargetKey{}
	anyNode     = lbmap.TargetKey{Service: lbmap.TargetNode}
)

// target is an entry of tdm_target.
type target struct {
	key   lbmap.TargetKey
	value uint64
}

func newDirect(table lbmap.SmallMap[lbmap.TargetKey, uint64]) direct {
	d := direct{
		ports: map[uint32][]target{},
		targets: newMirror(table, func(key lbmap.TargetKey) string {
			if key.Service == lbmap.TargetNode {
				return "accept packets in IP packets from " + lbmap.ToAddr(key.Addr).String()
			}
			return "accept packets of other nodes for " + lbmap.ToAddr(key.Addr).String()
		}),
	}
	d.targets.use(anyNode, 0, 1)
	return d
}

// set says what a service port has; nil for nothing.
func (d *direct) set(index uint32, list []target, has bool) {
	before := d.ports[index]
	for _, t := range list {
		d.targets.use(t.key, t.value, 1)
	}
	for _, t := range before {
		d.targets.use(t.key, t.value, -1)
	}
	if has {
		d.ports[index] = list
	} else {
		delete(d.ports, index)
	}
}

// load reads what a previous process left. Nodes that it knew may send until others are known.
func (d *direct) load() error {
	err := d.targets.load()
	if item := d.targets.delta.Get(anyFrontend); item != nil && item.There() {
		d.accept()
	}
	nodes := map[lbmap.TargetKey]struct{}{}
	for key, item := range d.targets.delta.All() {
		if item.There() && key.Service == lbmap.TargetNode && key != anyNode {
			nodes[key] = struct{}{}
		}
	}
	if len(nodes) > 0 {
		d.useNodes(nodes, 1)
		d.useNodes(d.nodes, -1)
		d.nodes = nodes
	}
	return err
}

// useNodes has n users more of the addresses that may send packets in IP packets; nil is for all.
func (d *direct) useNodes(nodes map[lbmap.TargetKey]struct{}, n int) {
	if nodes == nil {
		d.targets.use(anyNode, 0, n)
	}
	for key := range nodes {
		d.targets.use(key, 0, n)
	}
}

// setNodes has these addresses send such packets, and then no others. Without room for all, those that may do so go on.
func (d *direct) setNodes(nodes map[lbmap.TargetKey]struct{}) error {
	d.useNodes(nodes, 1)
	if _, err := d.targets.write(); err != nil {
		d.useNodes(nodes, -1)
		return err
	}
	d.useNodes(d.nodes, -1)
	d.nodes = nodes
	_, err := d.targets.write()
	return err
}

func (d *direct) accept() {
	if !d.accepts {
		d.accepts = true
		d.targets.use(anyFrontend, 0, 1)
	}
}

// update says from when on frontends take no packets in IP packets.
func (d *direct) update(now time.Time) {
	switch {
	case len(d.ports) > 0:
		d.accept()
		d.until = time.Time{}
	case d.accepts && d.until.IsZero():
		d.until = now.Add(directGrace)
	case d.accepts && !now.Before(d.until):
		d.targets.use(anyFrontend, 0, -1)
		d.accepts, d.until = false, time.Time{}
	}
}

// ExpireDirect has frontends take no packets in IP packets any more, some time after the last service port with direct server return is
// gone. It is called from time to time.
func (w *Writer) ExpireDirect() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.direct.accepts || len(w.direct.ports) > 0 {
		return nil
	}
	w.direct.update(w.clock.Now())
	_, err := w.direct.targets.write()
	return err
}

// SetCluster says which addresses the cluster has. Packets in IP packets are taken from nodes alone. Connections of nodes and pods to
// endpoints on other nodes are masqueraded: they may be on the same node.
func (w *Writer) SetCluster(c proxier.Cluster) error {
	nodes := make(map[lbmap.TargetKey]struct{}, len(c.Nodes))
	var clients []lbmap.RangeKey
	for _, a := range c.Nodes {
		nodes[lbmap.TargetKey{Service: lbmap.TargetNode, Addr: lbmap.FromAddr(a)}] = struct{}{}
		clients = append(clients, lbmap.NewRangeKey(lbmap.TargetNode, netip.PrefixFrom(a, a.BitLen())))
	}
	for _, p := range c.Pods {
		clients = append(clients, lbmap.NewRangeKey(lbmap.TargetNode, p.Masked()))
	}
	slices.SortFunc(clients, compareRanges)
	clients = slices.Compact(clients)
	w.mu.Lock()
	defer w.mu.Unlock()
	return errors.Join(w.direct.setNodes(nodes), w.setClients(clients))
}

// setClients writes which addresses the clients of the cluster have.
func (w *Writer) setClients(want []lbmap.RangeKey) error {
	d := &w.direct
	if fresh := w.freshRanges(d.clients, want); fresh > 0 && w.usedRanges+fresh > w.tables.Ranges.MaxEntries() {
		return fmt.Errorf("no room for %d ranges of nodes and pods (--ebpf-max-ranges): connections of theirs to endpoints on their own node may fail", fresh)
	}
	before := w.writes
	added := port{ranges: d.clients}
	err := w.addRanges(&added, want)
	if err == nil {
		err = w.removeRanges(&added, want)
	}
	if err != nil {
		err = fmt.Errorf("nodes and pods: %w", err)
	}
	d.clients = added.ranges
	w.gauges(w.writes != before)
	return err
}

// noteDirect is called with the backends that a service port has from now on.
func (w *Writer) noteDirect(index uint32, d *proxier.Decision, service uint32, ids []uint32) {
	if !d.Direct() {
		w.direct.set(index, nil, false)
		return
	}
	var list []target
	for i, id := range ids {
		if !d.Backends[i].Local {
			continue
		}
		e := &w.tables.Backends[id]
		list = append(list,
			target{lbmap.TargetKey{Service: service, Addr: e.Addr}, lbmap.TargetWord(id, e.Generation)},
			target{lbmap.TargetKey{Addr: e.Addr}, 0}) // of any service: which is asked with the packet
	}
	w.direct.set(index, list, true)
}

// flagsOf are the flags of a backend. Without direct server return, flows of before end with the client's next SYN.
func (w *Writer) flagsOf(d *proxier.Decision, b *proxier.Backend) uint32 {
	f := backendFlags(b)
	if _, ready := w.direct.ready[b.Addr.Addr()]; ready && b.Remote && d.Direct() {
		f |= lbmap.BackendDirect
	}
	return f
}

// HasDirect reports whether any service port has routes of direct server return.
func (w *Writer) HasDirect() bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return len(w.direct.ports) > 0
}

// DirectPeers are the addresses of the backends on other nodes that have routes of direct server return, sorted.
func (w *Writer) DirectPeers() (list []netip.Addr) {
	w.mu.RLock()
	defer w.mu.RUnlock()
	for index := range w.direct.ports {
		item := w.ports.Get(index)
		if item == nil {
			continue
		}
		for _, id := range item.Applied.backends {
			if e := &w.tables.Backends[id]; e.Flags&lbmap.BackendRemote != 0 {
				list = append(list, lbmap.ToAddr(e.Addr))
			}
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}

// SetDirect says which of the DirectPeers take packets in IP packets. New connections to the others are masqueraded.
func (w *Writer) SetDirect(ready map[netip.Addr]struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.writes
	w.direct.ready = ready
	for index := range w.direct.ports {
		item := w.ports.Get(index)
		if item == nil {
			continue
		}
		for _, id := range item.Applied.backends {
			e := &w.tables.Backends[id]
			flags := e.Flags &^ lbmap.BackendDirect
			if _, is := ready[lbmap.ToAddr(e.Addr)]; is && flags&lbmap.BackendRemote != 0 {
				flags |= lbmap.BackendDirect
			}
			if e.Flags != flags {
				e.Flags = flags
				w.writes++
			}
		}
	}
	w.gauges(w.writes != before)
}
