// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
)

// backend is an endpoint of a service port, between its addition and its removal.
type backend struct {
	service proxier.ServicePortName
	addr    netip.AddrPort
	added   int // sequence number
}

// affinityKey identifies an affinity entry.
type affinityKey struct {
	service proxier.ServicePortName
	family  proxier.Family
	client  netip.Addr
}

// Decide updates the model's Services.
func (m *Model) Decide(list []proxier.PortChange, rules proxier.NodeRules) {
	m.rules = rules
	m.services = nil
	before := m.backends
	m.backends = nil
	for _, c := range list {
		m.services = append(m.services, c.New)
		for i := range c.New.Backends {
			b := backend{service: c.New.Name, addr: c.New.Backends[i].Addr}
			at := slices.IndexFunc(before, func(o backend) bool { return o.service == b.service && o.addr == b.addr })
			if at >= 0 {
				b = before[at]
			} else {
				m.added++
				b.added = m.added
			}
			m.backends = append(m.backends, b)
		}
	}
}

// Drain tells the model that another proxy took over. The backends stay as they are, since
// no later changes are known.
func (m *Model) Drain() { m.services, m.rules.Unserved, m.draining = nil, nil, true }

// serves reports whether a backend still exists.
func (m *Model) serves(b backend) bool { return slices.Contains(m.backends, b) }

// frontend returns the frontend of a destination: that of its address, or a NodePort, also of another
// node that sends what came for its own address.
func (m *Model) frontend(h *header) (*proxier.Decision, *proxier.Frontend) {
	t := h.tuple
	d, f := m.frontendWith(func(d *proxier.Decision, f *proxier.Frontend) bool {
		return uint8(d.Name.Protocol) == t.Protocol && f.Kind != proxier.NodePort && f.Addr == t.Dst
	})
	ofSender := h.wrapper != nil && h.wrapper.from == h.dst
	if f != nil || !ofSender && !slices.Contains(m.rules.NodePortAddrs, t.Dst.Addr()) {
		return d, f
	}
	return m.frontendWith(func(d *proxier.Decision, f *proxier.Frontend) bool {
		return uint8(d.Name.Protocol) == t.Protocol && f.Kind == proxier.NodePort &&
			f.Addr.Port() == t.Dst.Port() && f.Addr.Addr().Is4() == t.Dst.Addr().Is4()
	})
}

// frontendWith returns the served frontend with that address.
func (m *Model) frontendWith(is func(*proxier.Decision, *proxier.Frontend) bool) (*proxier.Decision, *proxier.Frontend) {
	for _, d := range m.services {
		for i := range d.Frontends {
			if f := &d.Frontends[i]; f.Conflict == nil && is(d, f) {
				return d, f
			}
		}
	}
	return nil, nil
}

func contains(list []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}

// origin returns the origin of a client.
func (m *Model) origin(client netip.Addr) proxier.Origin {
	switch {
	case m.node.FromPod || m.node.Pod && contains(m.rules.Pods.CIDRs, client):
		return proxier.FromPod
	case client.IsLoopback() || m.isLocal(client):
		return proxier.FromHost
	}
	return proxier.FromOutside
}

func (m *Model) isLocal(a netip.Addr) bool { return slices.Contains(m.rules.LocalAddrs, a) }

// isMartian reports whether no single host can have the address, so that it must not get
// answers (RFC 1122, 3.2.2).
func isMartian(a netip.Addr) bool {
	return a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() ||
		a.Is4() && (a.As4()[0] == 0 || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}))
}

// eligible returns the backends of a set.
func eligible(d *proxier.Decision, set proxier.Set) (list []proxier.Backend) {
	for _, b := range d.Backends {
		if b.Members&set.Member() != 0 && proxier.FamilyOf(b.Addr.Addr()) == set.Family() {
			list = append(list, b)
		}
	}
	return list
}
