// SPDX-License-Identifier: Apache-2.0

// Package placement assigns the frontends of one node to tiers. Assign divides those of a
// service port among an ordered list of candidates, without side effects. Tier has two
// tiers serve by it, a fast one and a fallback, and moves service ports between them: what
// moves is in its new place before it leaves the old one.
package placement

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

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

// Tier combines both tiers. For each tier, package delta stores the desired part of every service
// port and the part that was passed to it. A tier retries its own failures.
type Tier struct {
	fast     Fast
	fallback proxier.Tier
	// both says that the fast tier serves only some clients, and the fallback all
	// others. The fallback then gets all service ports.
	both bool
	// share is what the fast tier may serve on a node where another proxy is the fallback; nil
	// for everything.
	share      *proxier.Share
	candidates [tiers]Candidate

	mu    sync.Mutex
	ports map[uint32]*port // by Decision.Index
	round uint32           // counts updates
	parts [tiers]*parts
	// failed says that a tier failed and retries with its next sync.
	failed [tiers]bool
	// overflow are service ports that the fast tier has no room for, and why.
	overflow map[uint32]error
	// leaving are service ports that moved to the fast tier, and when. The fallback must
	// still translate packets that were sent before that.
	leaving map[uint32]time.Time
	grace   time.Duration
	rules   proxier.NodeRules
	// slow counts the service ports that the fallback must serve in part or whole, and
	// clusterIPs those of them with a ClusterIP. If there are any, the fallback rejects
	// connections to unallocated ClusterIPs instead of the fast tier, which does not know
	// the ClusterIPs that the fallback serves; guards says so. It is also set until
	// it is known what the fast tier has no room for.
	slow, clusterIPs int
	guards           bool
	state            state
	cleaning         cleaning
	// served says that the fast tier has once completed a sync of all service ports. Before
	// that, the placement is unknown, and Services cannot opt out. If that sync fails,
	// the fallback stands in: it also gets all service ports.
	served, standsIn bool
	// room says that the fast tier has released something since it last had no room.
	room bool
	// seen is for readers during a Sync.
	seen atomic.Pointer[placed]
}

// placed is the placement after a Sync.
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
		t.parts[i] = delta.NewIndexed[*proxier.Decision, *proxier.Decision]()
	}
	t.publish()
	return t
}

// Sync implements proxier.Tier. Frontends that move are added before they are removed: for
// a moment, both tiers serve them in the same way. In order:
//
//   - the fallback gets what the fast tier is about to release;
//   - the fast tier gets its own changes, including removals;
//   - what exceeds its capacity moves to the fallback;
//   - the fallback releases what the fast tier has served for a while.
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

// record stores the desired state, and returns the service ports in the order in which
// they should become visible, including those that were held.
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

// sync gives a tier its changes, if there are any, or if it is to try again.
func (t *Tier) sync(ctx context.Context, to tier, rules *proxier.NodeRules, changes []proxier.PortChange) error {
	if rules == nil && len(changes) == 0 && !t.failed[to] {
		return nil
	}
	return t.give(ctx, to, proxier.Update{NodeRules: rules, Changes: changes})
}

func (t *Tier) give(ctx context.Context, to tier, u proxier.Update) error {
	receiver := t.fallback
	if to == onFast {
		receiver = t.fast
	}
	err := receiver.Sync(ctx, u)
	t.failed[to] = err != nil
	for i := range u.Changes {
		t.given(to, u.Changes[i].Index(), u.Changes[i].New)
	}
	if err != nil && to == onFallback {
		return fmt.Errorf("fallback: %w", err)
	}
	return err
}

// Wait returns when the background clean-up has ended. No Sync may follow.
func (t *Tier) Wait() { t.cleaning.Wait() }

func (t *Tier) publish() { t.seen.Store(&placed{maps.Clone(t.overflow), t.served}) }

// Cleanup implements proxier.Tier.
func (t *Tier) Cleanup(ctx context.Context) error {
	return errors.Join(t.fast.Cleanup(ctx), t.fallback.Cleanup(ctx))
}
