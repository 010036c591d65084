// SPDX-License-Identifier: Apache-2.0

// Package placement assigns the frontends of one node to tiers. Assign divides those of a
// service port among an ordered list of candidates, without side effects. Tier has two
// tiers serve by it, a fast one and a fallback, and moves service ports between them: what
// moves is in its new place before it leaves the old one.
package placement

import (
	"cmp"
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
	"github.com/tandem-proxy/tandem/proxier/delta"
)

// Fast is a tier that may have no room for a service port.
type Fast interface {
	proxier.Tier
	// Unplaced are the service ports that the last Sync had no room for, by index, with
	// the reason.
	Unplaced() map[uint32]error
}

// Tier is both of them. Package delta keeps, for each, what it is to have of every service
// port and what it was given; a tier tries again by itself what it was given and failed at.
type Tier struct {
	fast     Fast
	fallback proxier.Tier
	// both says that the fast tier serves some clients alone, and the fallback all
	// others: it has everything then.
	both       bool
	candidates [tiers]Candidate

	mu    sync.Mutex
	ports map[uint32]*port // by Decision.Index
	round uint32           // counts updates
	parts [tiers]*parts
	// failed says that a tier failed, and tries again with its next sync.
	failed [tiers]bool
	// overflow are service ports that the fast tier has no room for, and why.
	overflow map[uint32]error
	// leaving are service ports that the fast tier has got, and since when: what was
	// sent before it had them is still to be translated by the fallback.
	leaving map[uint32]time.Time
	grace   time.Duration
	rules   proxier.NodeRules
	// slow counts the service ports that the fallback is to have something of, and
	// clusterIPs those of them with a ClusterIP. While there are such, the fallback
	// rejects connections to unallocated ClusterIPs, since the fast tier does not know
	// what that serves: guards says that the fast tier rejects nothing. It does not
	// before it is known what it has no room for.
	slow, clusterIPs int
	guards           bool
	state            state
	cleaning         cleaning
	// served says that the fast tier has had everything once. Until then it is not known
	// which tier serves what, and Services cannot opt out. If it fails at that, the
	// fallback stands in: it has everything, too.
	served, standsIn bool
	// room says that the fast tier let go of something since it last had no room.
	room bool
	// seen is for readers while a Sync goes on.
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
		ports: map[uint32]*port{}, overflow: map[uint32]error{}, leaving: map[uint32]time.Time{},
	}
	t.candidates = t.newCandidates()
	for i := range t.parts {
		t.parts[i] = delta.New[uint32, *proxier.Decision, *proxier.Decision](cmp.Compare[uint32])
	}
	t.publish()
	return t
}

// Sync implements proxier.Tier. What moves is there before it goes: for a moment both
// tiers have it, and both do the same. In order:
//
//   - the fallback gets what the fast tier is about to let go of;
//   - the fast tier gets, and lets go of, what is its own;
//   - what turned out not to fit there moves to the fallback;
//   - the fallback lets go of what the fast tier has had for a while.
func (t *Tier) Sync(ctx context.Context, u proxier.Update) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	defer t.publish()
	order := t.record(&u)
	refilled, prepared := t.prepare(ctx, order)
	if prepared != nil {
		t.hold(order, true)
	}
	served := t.syncFast(ctx, &u, order)
	if prepared != nil {
		t.hold(order, false)
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
	errs = append(errs, t.unguard(ctx), t.syncFallback(ctx, &u, refilled))
	for _, index := range order {
		if p := t.ports[index]; p != nil && p.decision == nil && t.has(onFast, index) == nil && t.has(onFallback, index) == nil {
			delete(t.ports, index)
		}
	}
	return errors.Join(errs...)
}

// record takes over what is desired, and returns the service ports in the order in which
// they should become visible. Those that were held are among them.
func (t *Tier) record(u *proxier.Update) []uint32 {
	if u.NodeRules != nil {
		t.rules = *u.NodeRules
	}
	order := make([]uint32, 0, len(u.Changes))
	t.round++
	visit := func(index uint32, p *port) {
		if p.round != t.round {
			p.round = t.round
			order = append(order, index)
		}
	}
	for i := range u.Changes {
		c := &u.Changes[i]
		index := c.Index()
		p := t.ports[index]
		if p == nil {
			p = &port{}
			t.ports[index] = p
		}
		p.decision = c.New
		switch _, overflows := t.overflow[index]; {
		case c.New == nil:
			delete(t.overflow, index)
		case overflows && u.Full && t.room: // it may fit now
			delete(t.overflow, index)
			t.forget(onFast, index)
		}
		t.assign(index, p)
		visit(index, p)
	}
	if u.Full {
		t.room = false
		var gone []uint32
		for index, p := range t.ports {
			if p.round != t.round {
				gone = append(gone, index)
			}
		}
		slices.Sort(gone)
		for _, index := range gone {
			p := t.ports[index]
			p.decision = nil
			delete(t.overflow, index)
			t.assign(index, p)
			visit(index, p)
		}
	}
	for index := range t.parts[onFast].Pending() {
		visit(index, t.ports[index])
	}
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

// hold leaves with the fast tier what the fallback could not be given. When it ends, what
// should have moved is pending, and moves with the next sync.
func (t *Tier) hold(order []uint32, held bool) {
	for _, index := range order {
		if p := t.ports[index]; p.held || p.decision != nil {
			p.held = held
			t.assign(index, p)
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
			klog.FromContext(ctx).Error(served, "First sync of the fast path failed; the fallback serves all Services until one succeeds")
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

// move has the fallback serve what the fast tier does not, before that lets go of it. If
// that fails, it is pending.
func (t *Tier) move(ctx context.Context, moved []uint32) (refilled bool, err error) {
	if refilled = t.state != active; refilled {
		err = t.fill(ctx)
	} else {
		err = t.sync(ctx, onFallback, nil, t.additions(moved))
	}
	if err != nil {
		return refilled, err
	}
	// What is in the fast tier is old, and it alone would be seen.
	if changes := t.changes(onFast, moved); len(changes) > 0 {
		err = t.sync(ctx, onFast, t.fastRules(), changes)
	}
	return refilled, err
}

// sync gives a tier its changes, if there are any, or if it is to try again.
func (t *Tier) sync(ctx context.Context, to tier, rules *proxier.NodeRules, changes []proxier.PortChange) error {
	if rules == nil && len(changes) == 0 && !t.failed[to] {
		return nil
	}
	return t.give(ctx, to, proxier.Update{NodeRules: rules, Changes: changes})
}

func (t *Tier) give(ctx context.Context, to tier, u proxier.Update) error {
	tier := t.fallback
	if to == onFast {
		tier = t.fast
	}
	err := tier.Sync(ctx, u)
	t.failed[to] = err != nil
	for i := range u.Changes {
		t.given(to, u.Changes[i].Index(), u.Changes[i].New)
	}
	if err != nil && to == onFallback {
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

// unguard has the fast tier reject connections to unallocated ClusterIPs, if it serves all
// ClusterIPs that there are.
func (t *Tier) unguard(ctx context.Context) error {
	if !t.guards || t.clusterIPs > 0 || !t.served || t.failed[onFast] {
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
		klog.FromContext(ctx).Info("Over capacity: the fallback serves a service port that does not fit into the fast path", "servicePort", p.decision.Name, "reason", why.Error())
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
		d := t.want(onFallback, index)
		if decision := t.ports[index].decision; d != decision && t.has(onFast, index) != t.want(onFast, index) {
			d = decision
		}
		if d == nil {
			t.forget(onFallback, index)
			continue
		}
		u.Changes = append(u.Changes, proxier.PortChange{Old: t.has(onFallback, index), New: d})
	}
	t.state = unknown
	if err := t.give(ctx, onFallback, u); err != nil {
		return err
	}
	t.state = active
	return nil
}

// syncFallback takes out of the fallback what the fast tier has had for a while. A fallback
// that serves nothing leaves nothing in the kernel, also not what others of its kind left
// there, once the fast tier serves.
func (t *Tier) syncFallback(ctx context.Context, u *proxier.Update, refilled bool) error {
	if t.cleaning.failed.Swap(false) {
		t.state = unknown
	}
	if t.state == active {
		if err := t.sync(ctx, onFallback, u.NodeRules, t.losses()); err != nil {
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
	for index := range t.ports {
		t.forget(onFallback, index)
	}
	t.cleaning.begin(ctx, t.grace, t.fallback)
	return nil
}

// losses are what goes from the fallback: at once what is not desired, and what
// the fast tier has got after a while.
func (t *Tier) losses() (list []proxier.PortChange) {
	now := time.Now()
	for index := range t.leaving {
		if !t.differs(onFallback, index) {
			delete(t.leaving, index)
		}
	}
	for index := range t.parts[onFallback].Pending() {
		if !t.differs(onFallback, index) {
			continue
		}
		old, next := t.has(onFallback, index), t.want(onFallback, index)
		if t.ports[index].decision == nil {
			delete(t.leaving, index)
			list = append(list, proxier.PortChange{Old: old})
			continue
		}
		since, known := t.leaving[index]
		if !known || t.failed[onFast] { // it may not be there
			since = now
			t.leaving[index] = now
		}
		if now.Sub(since) >= t.grace && !t.failed[onFast] {
			list = append(list, proxier.PortChange{Old: old, New: next})
			delete(t.leaving, index)
		}
	}
	return list
}

// Wait returns when the background clean-up has ended. No Sync may follow.
func (t *Tier) Wait() { t.cleaning.Wait() }

// Supports implements proxier.Tier.
func (t *Tier) Supports(d *proxier.Decision, f *proxier.Frontend) error {
	if chosen, reasons := t.choose(d, f); chosen == tiers {
		return errors.Join(reasons...)
	}
	return nil
}

func (t *Tier) publish() { t.seen.Store(&placed{maps.Clone(t.overflow), t.served}) }

// Overflow counts the service ports that the fast tier has no room for.
func (t *Tier) Overflow() int { return len(t.seen.Load().overflow) }

// Why returns nil if the fast tier serves a frontend, and else why it does not.
func (t *Tier) Why(d *proxier.Decision, f *proxier.Frontend) error {
	if chosen, reasons := t.choose(d, f); chosen != onFast {
		return reasons[onFast]
	}
	return nil
}

// choose says which tier serves a frontend, by what was known after the last Sync.
func (t *Tier) choose(d *proxier.Decision, f *proxier.Frontend) (chosen tier, reasons []error) {
	seen := t.seen.Load()
	list := [tiers]Candidate{
		onFast: {Refuses: func(d *proxier.Decision, f *proxier.Frontend) error {
			return t.fastRefuses(d, f, seen.overflow, seen.served)
		}},
		onFallback: {Refuses: t.fallback.Supports},
	}
	by, reasons := Choose(list[:], d, f)
	return tier(by), reasons
}

// FallbackHas returns a function that says whether the fallback currently translates
// what comes to an address: that of a frontend, or one with the number of a NodePort.
func (t *Tier) FallbackHas(protocol proxier.Protocol) func(netip.AddrPort) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	has := map[netip.AddrPort]struct{}{}
	for _, item := range t.parts[onFallback].All() {
		d := item.Applied
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
