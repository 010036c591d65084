// SPDX-License-Identifier: Apache-2.0

// Package placement has two tiers carry the frontends of one node: each is carried by
// the fast tier if that can, and else by the other one.
package placement

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
)

// Fast is a tier that may have no room for a service port.
type Fast interface {
	proxier.Tier
	// Unplaced are the service ports that the last Sync had no room for, by index, and
	// why.
	Unplaced() map[uint32]error
}

// Tier is both of them.
type Tier struct {
	fast     Fast
	fallback proxier.Tier
	// both says that the fast tier carries for some clients alone, and the fallback
	// for all others: it has everything then.
	both bool

	mu    sync.Mutex
	ports map[uint32]*port // by Decision.Index
	// overflow are service ports that the fast tier has no room for, and why.
	overflow map[uint32]error
	// leaving are service ports that the fast tier has got, and since when: what was
	// sent before it had them is still to be translated by the fallback.
	leaving map[uint32]time.Time
	// held are service ports that the fast tier still has in place of the fallback, which
	// failed.
	held     map[uint32]struct{}
	cleaning cleaning
	grace    time.Duration
	rules    proxier.NodeRules
	// slow counts the service ports that the fallback is to have something of, and
	// clusterIPs those of them with a ClusterIP. While there are such, the fallback
	// refuses what nobody serves, since the fast tier does not know what that serves:
	// guards says that the fast tier refuses nothing. It does not before it is known
	// what it has no room for.
	slow, clusterIPs int
	guards           bool
	state            state
	owes             [sides]bool // a tier tries again with its next sync
	// served says that the fast tier has had everything once. Until then it is not known
	// which tier serves what, and Services cannot opt out. If it fails at that, the
	// fallback stands in: it has everything, too.
	served, standsIn bool
	// room says that the fast tier let go of something since it last had no room.
	room bool
	// seen is for who asks while a Sync goes on.
	seen atomic.Pointer[placed]
}

// placed is what was known after a Sync.
type placed struct {
	overflow map[uint32]error // by Decision.Index
	served   bool
}

// state is how much of the fallback there is in the kernel.
type state uint8

const (
	unknown state = iota // as a process before this one left it
	idle                 // nothing
	active
)

var _ proxier.Tier = (*Tier)(nil)

// grace is how long a packet may take from the socket that was not translated to the
// rules that do it, on a busy machine.
const grace = time.Second

// New joins two tiers. With both, the fallback has everything, too: for clients that
// the fast tier does not see.
func New(fast Fast, fallback proxier.Tier, both bool) *Tier {
	t := &Tier{
		fast: fast, fallback: fallback, both: both, grace: grace, guards: true,
		ports: map[uint32]*port{}, overflow: map[uint32]error{}, leaving: map[uint32]time.Time{}, held: map[uint32]struct{}{},
	}
	t.publish()
	return t
}

// Sync implements proxier.Tier. What moves is there before it goes: for a moment both
// tiers have it, and both do the same.
func (t *Tier) Sync(ctx context.Context, u proxier.Update) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	defer t.publish()
	order := t.take(&u)
	refilled, prepared := t.prepare(ctx, order)
	if prepared != nil {
		t.hold(order)
	}
	served := t.syncFast(ctx, &u, order)
	if prepared != nil {
		t.release(order)
	}
	moved := t.overflowing(ctx)
	if u.Full && !t.served {
		moved = append(moved, t.begin(ctx, served)...)
	}
	errs := []error{prepared, served}
	if len(moved) > 0 {
		filled, err := t.move(ctx, moved)
		errs = append(errs, err)
		refilled = refilled || filled
	}
	errs = append(errs, t.unguard(ctx), t.settle(ctx, &u, order, refilled))
	for _, index := range order {
		if p := t.ports[index]; p != nil && p.decision == nil && p.has == [sides]*proxier.Decision{} {
			delete(t.ports, index)
		}
	}
	return errors.Join(errs...)
}

// take notes what is wanted, and returns the service ports in the order in which they
// should become visible.
func (t *Tier) take(u *proxier.Update) []uint32 {
	if u.NodeRules != nil {
		t.rules = *u.NodeRules
	}
	order := make([]uint32, 0, len(u.Changes)+len(t.held))
	known := make(map[uint32]struct{}, len(u.Changes)+len(t.held))
	for i := range u.Changes {
		c := &u.Changes[i]
		p := t.ports[c.Index()]
		if p == nil {
			p = &port{}
			t.ports[c.Index()] = p
		}
		p.decision = c.New
		switch _, overflows := t.overflow[c.Index()]; {
		case c.New == nil:
			delete(t.overflow, c.Index())
		case overflows && u.Full && t.room: // it may fit now
			delete(t.overflow, c.Index())
			p.has[onFast] = nil
		}
		t.place(p)
		known[c.Index()] = struct{}{}
		order = append(order, c.Index())
	}
	if u.Full {
		t.room = false
		for index, p := range t.ports {
			if _, ok := known[index]; !ok {
				p.decision = nil
				delete(t.overflow, index)
				t.place(p)
				known[index] = struct{}{}
				order = append(order, index)
			}
		}
	}
	for _, index := range slices.Sorted(maps.Keys(t.held)) {
		if _, ok := known[index]; !ok && t.ports[index] != nil {
			order = append(order, index)
		}
	}
	clear(t.held)
	return order
}

// prepare gives the fallback what the fast tier is about to let go of. It says whether
// that was everything the fallback is to have.
func (t *Tier) prepare(ctx context.Context, order []uint32) (refilled bool, err error) {
	switch {
	case t.state == active:
		return false, t.sync(ctx, onFallback, nil, t.gains(order))
	case t.served && t.slow > 0:
		return true, t.fill(ctx)
	}
	return false, nil
}

// hold leaves with the fast tier what the fallback could not be given.
func (t *Tier) hold(order []uint32) {
	for _, index := range order {
		p := t.ports[index]
		if p.decision == nil {
			continue
		}
		p.held = true
		t.place(p)
	}
}

// release has them move with the next sync.
func (t *Tier) release(order []uint32) {
	for _, index := range order {
		p := t.ports[index]
		if !p.held {
			continue
		}
		p.held = false
		t.place(p)
		if p.want[onFast] != p.has[onFast] {
			t.held[index] = struct{}{}
		}
	}
}

// begin is told how it went when the fast tier was given everything for the first time.
// It returns the service ports that are to be in the fallback now.
func (t *Tier) begin(ctx context.Context, served error) (moved []uint32) {
	t.served = served == nil
	if stands := !t.served; stands != t.standsIn {
		t.standsIn = stands
		if stands {
			klog.FromContext(ctx).Error(served, "The fast path cannot serve everything; the fallback does until it can")
		}
	}
	t.placeAll()
	for index, p := range t.ports {
		if p.decision != nil && (t.standsIn || p.decision.OptedOut) {
			moved = append(moved, index)
		}
	}
	slices.Sort(moved)
	return moved
}

// move has the fallback carry what the fast tier does not, before that lets go of it.
func (t *Tier) move(ctx context.Context, moved []uint32) (refilled bool, err error) {
	if refilled = t.state != active; refilled {
		err = t.fill(ctx)
	} else {
		err = t.sync(ctx, onFallback, nil, t.diff(moved, onFallback, added))
	}
	if err != nil {
		for _, index := range moved {
			t.held[index] = struct{}{}
		}
		return refilled, err
	}
	// What is in the fast tier is old, and it alone would be seen.
	if changes := t.diff(moved, onFast, added|removed); len(changes) > 0 {
		err = t.sync(ctx, onFast, t.fastRules(), changes)
	}
	return refilled, err
}

// sync gives a tier its changes. What it owes after an error it tries again by itself.
func (t *Tier) sync(ctx context.Context, s side, rules *proxier.NodeRules, changes []proxier.PortChange) error {
	if rules == nil && len(changes) == 0 && !t.owes[s] {
		return nil
	}
	return t.give(ctx, s, proxier.Update{NodeRules: rules, Changes: changes})
}

func (t *Tier) give(ctx context.Context, s side, u proxier.Update) error {
	tier := t.fallback
	if s == onFast {
		tier = t.fast
	}
	err := tier.Sync(ctx, u)
	t.owes[s] = err != nil
	for i := range u.Changes {
		c := &u.Changes[i]
		if p := t.ports[c.Index()]; p != nil {
			p.has[s] = c.New
		}
	}
	if err != nil && s == onFallback {
		return fmt.Errorf("fallback: %w", err)
	}
	return err
}

// fastRules are the rules of the node as the fast tier is to have them, if that is news.
func (t *Tier) fastRules() *proxier.NodeRules {
	if t.guards || t.clusterIPs == 0 {
		return nil
	}
	t.guards = true
	return t.ownRules()
}

// unguard has the fast tier refuse what nobody serves, if that knows what is served.
func (t *Tier) unguard(ctx context.Context) error {
	if !t.guards || t.clusterIPs > 0 || !t.served || t.owes[onFast] {
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

func (t *Tier) syncFast(ctx context.Context, u *proxier.Update, order []uint32) error {
	rules := t.fastRules()
	if u.NodeRules != nil {
		rules = t.ownRules()
	}
	changes := t.diff(order, onFast, added|removed)
	for _, c := range changes {
		t.room = t.room || c.Old != nil
	}
	if !u.Full {
		return t.sync(ctx, onFast, rules, changes)
	}
	for _, index := range order {
		if p := t.ports[index]; p.want[onFast] == nil {
			p.has[onFast] = nil
		}
	}
	return t.give(ctx, onFast, proxier.Update{Full: true, NodeRules: rules, Changes: t.all(order, onFast)})
}

// overflowing are the service ports that the fast tier has just had no room for.
func (t *Tier) overflowing(ctx context.Context) (moved []uint32) {
	for index, why := range t.fast.Unplaced() {
		p := t.ports[index]
		if p == nil || p.decision == nil || t.overflow[index] != nil {
			continue
		}
		t.overflow[index] = why
		t.place(p)
		moved = append(moved, index)
		klog.FromContext(ctx).Info("A service port does not fit into the fast path; the fallback carries it", "servicePort", p.decision.Name, "reason", why.Error())
	}
	slices.Sort(moved)
	if len(moved) > 0 {
		t.room = false
	}
	return moved
}

// fill gives the fallback all it is to have: it removes what else there is of its kind.
// What the fast tier is still to get it has until then, as others may have served it.
func (t *Tier) fill(ctx context.Context) error {
	t.cleaning.end()
	rules := t.rules
	u := proxier.Update{Full: true, NodeRules: &rules}
	for _, index := range slices.Sorted(maps.Keys(t.ports)) {
		p := t.ports[index]
		d := p.want[onFallback]
		if d != p.decision && p.has[onFast] != p.want[onFast] {
			d = p.decision
		}
		if d == nil {
			p.has[onFallback] = nil
			continue
		}
		u.Changes = append(u.Changes, proxier.PortChange{Old: p.has[onFallback], New: d})
	}
	t.state = unknown
	if err := t.give(ctx, onFallback, u); err != nil {
		return err
	}
	t.state = active
	return nil
}

// settle takes out of the fallback what the fast tier has had for a while. A fallback
// that carries nothing leaves nothing in the kernel, also not what others of its kind left
// there, once the fast tier serves.
func (t *Tier) settle(ctx context.Context, u *proxier.Update, order []uint32, refilled bool) error {
	if t.cleaning.failed.Swap(false) {
		t.state = unknown
	}
	if t.state == active {
		if err := t.sync(ctx, onFallback, u.NodeRules, t.leave(order)); err != nil {
			return err
		}
	}
	switch {
	case len(t.leaving) > 0 || refilled:
		return nil
	case t.slow > 0 && (u.Full || t.state != active):
		return t.fill(ctx)
	case t.slow > 0 || t.state == idle || t.state == unknown && !u.Full:
		return nil
	}
	t.state = idle
	for _, p := range t.ports {
		p.has[onFallback] = nil
	}
	t.cleaning.begin(ctx, t.grace, t.fallback)
	return nil
}

// leave is what goes from the fallback: at once what nobody wants any more, and what the
// fast tier has got after a while.
func (t *Tier) leave(order []uint32) (list []proxier.PortChange) {
	now := time.Now()
	for _, index := range order {
		p := t.ports[index]
		if p == nil || p.has[onFallback] == p.want[onFallback] {
			delete(t.leaving, index)
			continue
		}
		if _, known := t.leaving[index]; !known && p.decision != nil {
			t.leaving[index] = now
		}
		if p.decision == nil {
			list = append(list, proxier.PortChange{Old: p.has[onFallback]})
		}
	}
	for index, since := range t.leaving {
		p := t.ports[index]
		if p == nil || p.decision == nil || p.has[onFallback] == p.want[onFallback] {
			delete(t.leaving, index)
			continue
		}
		if t.owes[onFast] {
			t.leaving[index] = now // it may not be there
			continue
		}
		if now.Sub(since) >= t.grace {
			list = append(list, proxier.PortChange{Old: p.has[onFallback], New: p.want[onFallback]})
			delete(t.leaving, index)
		}
	}
	return list
}

// Wait returns when what goes on in the background has ended. No Sync may follow.
func (t *Tier) Wait() { t.cleaning.Wait() }

// Supports implements proxier.Tier.
func (t *Tier) Supports(d *proxier.Decision, f *proxier.Frontend) error {
	why := t.Why(d, f)
	if why == nil {
		return nil
	}
	if err := t.fallback.Supports(d, f); err != nil {
		return errors.Join(why, err)
	}
	return nil
}

func (t *Tier) publish() { t.seen.Store(&placed{maps.Clone(t.overflow), t.served}) }

// Overflow counts the service ports that the fast tier has no room for.
func (t *Tier) Overflow() int { return len(t.seen.Load().overflow) }

// Why returns nil if the fast tier carries a frontend, and else why it does not.
func (t *Tier) Why(d *proxier.Decision, f *proxier.Frontend) error {
	seen := t.seen.Load()
	if why := seen.overflow[d.Index()]; why != nil {
		return why
	}
	if d.OptedOut && seen.served {
		return errOptedOut
	}
	return t.fast.Supports(d, f)
}

// FallbackHas returns a function that says whether the fallback, as things are, translates
// what comes to an address: that of a frontend, or one with the number of a NodePort.
func (t *Tier) FallbackHas(protocol proxier.Protocol) func(netip.AddrPort) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	has := map[netip.AddrPort]struct{}{}
	for _, p := range t.ports {
		d := p.has[onFallback]
		if d == nil || d.Name.Protocol != protocol {
			continue
		}
		for i := range d.Frontends {
			if f := &d.Frontends[i]; f.Conflict == nil {
				has[f.Addr] = struct{}{}
			}
		}
	}
	return func(a netip.AddrPort) bool {
		unspecified := netip.IPv4Unspecified()
		if a.Addr().Is6() {
			unspecified = netip.IPv6Unspecified()
		}
		_, frontend := has[a]
		_, nodePort := has[netip.AddrPortFrom(unspecified, a.Port())]
		return frontend || nodePort
	}
}

// Cleanup implements proxier.Tier.
func (t *Tier) Cleanup(ctx context.Context) error {
	return errors.Join(t.fast.Cleanup(ctx), t.fallback.Cleanup(ctx))
}
