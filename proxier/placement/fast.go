// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"slices"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
)

func (t *Tier) syncFast(ctx context.Context, u *proxier.Update, order []uint32) error {
	rules := t.fastRules()
	if u.NodeRules != nil {
		rules = t.ownRules()
	}
	changes := t.changes(onFast, order)
	for _, c := range changes {
		t.room = t.room || c.Old != nil
	}
	if !u.Full {
		return t.sync(ctx, onFast, rules, changes)
	}
	full := proxier.Update{Full: true, NodeRules: rules}
	for _, index := range order {
		if want := t.want(onFast, index); want != nil {
			full.Changes = append(full.Changes, proxier.PortChange{Old: t.has(onFast, index), New: want})
			continue
		}
		t.forget(onFast, index)
	}
	return t.give(ctx, onFast, full)
}

// overflowing are the service ports that the fast tier has just had no room for.
func (t *Tier) overflowing(ctx context.Context) (moved []uint32) {
	for index, why := range t.fast.Unplaced() {
		p := t.ports[index]
		if p == nil || p.decision == nil || t.overflow[index] != nil {
			continue
		}
		t.overflow[index] = why
		t.assign(index, p)
		moved = append(moved, index)
		klog.FromContext(ctx).Info("Over capacity: the fallback serves a service port that does not fit into the fast path", "fallback", t.fallbackName(), "servicePort", p.decision.Name, "reason", why.Error())
	}
	slices.Sort(moved)
	if len(moved) > 0 {
		t.room = false
	}
	return moved
}

// fastRules are the rules of the node as the fast tier is to have them, if that is news.
func (t *Tier) fastRules() *proxier.NodeRules {
	if t.guards || t.clusterIPs == 0 {
		return nil
	}
	t.guards = true
	return t.ownRules()
}

// unguard has the fast tier reject connections to unallocated ClusterIPs, if it serves all
// ClusterIPs that there are.
func (t *Tier) unguard(ctx context.Context) error {
	// The other proxy may serve ClusterIPs that are not known here yet.
	if !t.guards || t.isForeign(proxier.ClusterIP) || t.clusterIPs > 0 || !t.served || t.failed[onFast] {
		return nil
	}
	t.guards = false
	return t.sync(ctx, onFast, t.ownRules(), nil)
}

func (t *Tier) ownRules() *proxier.NodeRules {
	own := t.rules
	if t.guards {
		own.Unserved = nil
	}
	return &own
}

// begin handles the result of the fast tier's first sync of all service ports. It returns the
// service ports that must move to the fallback.
func (t *Tier) begin(ctx context.Context, served error) (moved []uint32) {
	t.served = served == nil
	if stands := !t.served; stands != t.standsIn {
		t.standsIn = stands
		if stands {
			klog.FromContext(ctx).Error(served, "First sync of the fast path failed; the fallback serves all Services until one succeeds", "fallback", t.fallbackName())
		}
	}
	for index, p := range t.ports {
		t.assign(index, p)
	}
	for index, p := range t.ports {
		if p.decision != nil && (t.standsIn || p.decision.OptedOut) {
			moved = append(moved, index)
		}
	}
	slices.Sort(moved)
	return moved
}
