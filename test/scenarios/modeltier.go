// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
)

// modelTier is a Tier without a kernel. It applies the changes of each sync, and has no
// access to the table.
type modelTier struct {
	decisions map[uint32]*proxier.Decision
	rules     proxier.NodeRules
	changes   []proxier.PortChange
}

var _ proxier.Tier = (*modelTier)(nil)

// Sync applies changes.
func (t *modelTier) Sync(_ context.Context, u proxier.Update) error {
	if u.Full || t.decisions == nil {
		t.decisions = map[uint32]*proxier.Decision{}
	}
	if u.NodeRules != nil {
		t.rules = *u.NodeRules
	}
	for _, c := range u.Changes {
		if c.New != nil {
			t.decisions[c.Index()] = c.New
		} else {
			delete(t.decisions, c.Index())
		}
	}
	t.changes = append(t.changes, u.Changes...)
	return nil
}

// Cleanup removes everything.
func (t *modelTier) Cleanup(context.Context) error {
	*t = modelTier{}
	return nil
}

// Supports implements proxier.Tier: all frontends are supported.
func (t *modelTier) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

// verdict is what a tier does with a packet at a node.
type verdict struct {
	outcome  proxier.Outcome
	decision *proxier.Decision // nil for none
	route    proxier.Route
	backends []netip.AddrPort // eligible
}

// decide returns the verdict about a packet, given the addresses of the node's
// devices.
func (t *modelTier) decide(f proxier.Flow, local []netip.Addr) verdict {
	origin := proxier.FromOutside
	if slices.Contains(local, f.Source.Addr()) || f.Source.Addr().IsLoopback() {
		origin = proxier.FromHost
	}
	external := origin
	if t.rules.Pods.Local(f.Source.Addr(), f.Device) {
		origin = proxier.FromPod
		if t.rules.Pods.Interface != "" || !slices.Contains(t.rules.Uplinks, f.Device) {
			external = origin
		}
	}
	to := f.Destination
	d, i := t.find(to, f.Protocol)
	if d == nil && t.servesNodePorts(to.Addr(), origin, local) {
		d, i = t.find(netip.AddrPortFrom(unspecified(to.Addr()), to.Port()), f.Protocol)
	}
	switch {
	case d != nil:
	case !slices.Contains(local, to.Addr()) && slices.ContainsFunc(t.rules.Unserved, func(p netip.Prefix) bool { return p.Contains(to.Addr()) }):
		return verdict{outcome: proxier.Rejected}
	default:
		return verdict{outcome: proxier.Pass}
	}
	if d.Frontends[i].Kind.External() {
		origin = external
	}
	x := verdict{decision: d, route: d.Frontends[i].Routes[origin]}
	for _, b := range d.Backends {
		if proxier.FamilyOf(b.Addr.Addr()) == x.route.Set.Family() && b.Members&x.route.Set.Member() != 0 {
			x.backends = append(x.backends, b.Addr)
		}
	}
	switch {
	case !d.Frontends[i].Admits(f.Source.Addr()) && d.Frontends[i].RejectOthers:
		x.outcome = proxier.Rejected
	case !d.Frontends[i].Admits(f.Source.Addr()):
		x.outcome = proxier.Dropped
	case len(x.backends) > 0:
		x.outcome = proxier.Forward
	case d.Empty[x.route.Set] == proxier.Drop:
		x.outcome = proxier.Dropped
	default:
		x.outcome = proxier.Rejected
	}
	return x
}

// find returns the decision and the frontend with exactly that address.
func (t *modelTier) find(addr netip.AddrPort, protocol proxier.Protocol) (*proxier.Decision, int) {
	for _, d := range t.decisions {
		if d.Name.Protocol != protocol {
			continue
		}
		for i := range d.Frontends {
			if d.Frontends[i].Addr == addr && d.Frontends[i].Conflict == nil {
				return d, i
			}
		}
	}
	return nil, 0
}

func (t *modelTier) servesNodePorts(a netip.Addr, origin proxier.Origin, local []netip.Addr) bool {
	return slices.Contains(t.rules.NodePortAddrs, a) ||
		t.rules.AllNodePortAddrs[proxier.FamilyOf(a)] && slices.Contains(local, a) && !a.IsLoopback() ||
		origin == proxier.FromHost && slices.ContainsFunc(t.rules.Loopback[proxier.FamilyOf(a)], func(p netip.Prefix) bool { return p.Contains(a) })
}

// agrees compares the verdict with the table's explanation of the same packet.
func (x *verdict) agrees(e *proxier.Explanation) error {
	var backends []netip.AddrPort
	for i := range e.Endpoints {
		if e.Endpoints[i].In(e.Route.Set) {
			backends = append(backends, e.Endpoints[i].Addr)
		}
	}
	if x.outcome != e.Outcome || x.decision != e.Decision || x.route != e.Route || !slices.Equal(x.backends, backends) {
		return fmt.Errorf("%s -> %s: the tier decides %s, %s %v, but the table explains %s, %s %v",
			e.Flow.Source.Addr(), e.Flow.Destination, x.outcome, x.route, x.backends, e.Outcome, e.Route, backends)
	}
	return nil
}

func unspecified(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}
