// SPDX-License-Identifier: Apache-2.0

// Package placement has two tiers carry the frontends of one node: each is carried by
// the fast tier if that can, and else by the other one.
package placement

import (
	"context"
	"errors"
	"fmt"
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
	// leaving are service ports that the fast tier has got, and since when: what was
	// sent before it had them is still to be translated by the fallback.
	leaving map[uint32]time.Time
	// cleaning is the fallback's, which nobody waits for.
	cleaning sync.WaitGroup
	failed   atomic.Bool // it did
	grace    time.Duration
	rules    proxier.NodeRules
	// slow counts the service ports that the fallback is to have something of, and
	// clusterIPs those of them with a ClusterIP. While there are such, the fallback
	// refuses what nobody serves, since the fast tier does not know what that serves.
	slow, clusterIPs int
	guards           bool
	state            state
	owes             [sides]bool // a tier tries again with its next sync
	// served says that the fast tier has had everything once. Until then it is not known
	// which tier serves what, and Services cannot leave it.
	served bool
	// room says that the fast tier let go of something since it last had no room.
	room bool
}

// state is how much of the fallback there is in the kernel.
type state uint8

const (
	unknown state = iota // as a process before this one left it
	idle                 // nothing
	active
)

// port is a service port, what each tier is to have of it, and what it has.
type port struct {
	decision *proxier.Decision
	want     [sides]*proxier.Decision
	has      [sides]*proxier.Decision
	overflow error // why the fast tier has no room for it
}

// side is one of the tiers.
type side int

const (
	onFast side = iota
	onFallback
	sides
)

// place says which tier is to have what of a service port.
func (t *Tier) place(p *port) {
	t.count(p, -1)
	p.want = [sides]*proxier.Decision{}
	switch {
	case p.decision == nil:
	case p.overflow != nil:
		p.want[onFallback] = p.decision
	default:
		carries := func(f *proxier.Frontend) bool { return t.refuses(p.decision, f) == nil }
		p.want[onFast] = p.decision.Only(carries)
		if t.served && p.decision.OptedOut && p.decision.Name.Protocol == proxier.UDP {
			// Sockets that are connected to its backends are to be told only of
			// those that really go.
			p.want[onFast] = p.decision.Unserved()
		}
		switch {
		case t.both:
			p.want[onFallback] = p.decision
		case p.want[onFast] != p.decision:
			p.want[onFallback] = p.decision.Only(func(f *proxier.Frontend) bool { return !carries(f) })
		}
	}
	t.count(p, 1)
}

// errOptedOut is why the fast tier has nothing of a Service that wants it so.
var errOptedOut = errors.New("the Service opts out: " + proxier.AnnotationFastPath + "=" + proxier.FastPathDisabled)

// refuses says why the fast tier is not to have a frontend.
func (t *Tier) refuses(d *proxier.Decision, f *proxier.Frontend) error {
	if d.OptedOut && t.served {
		return errOptedOut
	}
	return t.fast.Supports(d, f)
}

func (t *Tier) count(p *port, by int) {
	d := p.want[onFallback]
	if d == nil {
		return
	}
	t.slow += by
	if slices.ContainsFunc(d.Frontends, func(f proxier.Frontend) bool { return f.Kind == proxier.ClusterIP }) {
		t.clusterIPs += by
	}
}

var _ proxier.Tier = (*Tier)(nil)

// grace is how long a packet may take from the socket that was not translated to the
// rules that do it, on a busy machine.
const grace = time.Second

// New joins two tiers. With both, the fallback has everything, too: for clients that
// the fast tier does not see.
func New(fast Fast, fallback proxier.Tier, both bool) *Tier {
	return &Tier{fast: fast, fallback: fallback, both: both, ports: map[uint32]*port{}, leaving: map[uint32]time.Time{}, grace: grace}
}

// Sync implements proxier.Tier. What moves is there before it goes: for a moment both
// tiers have it, and both do the same.
func (t *Tier) Sync(ctx context.Context, u proxier.Update) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	order := t.take(&u)
	var errs []error
	switch {
	case t.state == active:
		errs = append(errs, t.sync(ctx, onFallback, nil, t.gains(order)))
	case t.served && t.slow > 0:
		errs = append(errs, t.fill(ctx))
	}
	errs = append(errs, t.syncFast(ctx, &u, order))
	moved := t.overflowing(ctx)
	if u.Full && !t.served {
		t.served = true
		moved = append(moved, t.optedOut()...)
	}
	if len(moved) > 0 {
		var err error
		if t.state == active {
			err = t.sync(ctx, onFallback, nil, t.diff(moved, onFallback, added))
		} else {
			err = t.fill(ctx)
		}
		// What is in the fast tier is old, and it alone would be seen.
		if err == nil {
			err = t.sync(ctx, onFast, t.fastRules(), t.diff(moved, onFast, added|removed))
		}
		errs = append(errs, err)
	}
	errs = append(errs, t.settle(ctx, &u, order))
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
	order := make([]uint32, 0, len(u.Changes))
	for i := range u.Changes {
		c := &u.Changes[i]
		p := t.ports[c.Index()]
		if p == nil {
			p = &port{}
			t.ports[c.Index()] = p
		}
		p.decision = c.New
		if c.New == nil || u.Full && t.room {
			p.overflow = nil // it may fit now
		}
		t.place(p)
		order = append(order, c.Index())
	}
	if !u.Full {
		return order
	}
	t.room = false
	known := make(map[uint32]struct{}, len(order))
	for _, index := range order {
		known[index] = struct{}{}
	}
	for index, p := range t.ports {
		if _, ok := known[index]; !ok {
			p.decision, p.overflow = nil, nil
			t.place(p)
			order = append(order, index)
		}
	}
	return order
}

// which changes of a tier.
type which uint8

const (
	added which = 1 << iota // or changed
	removed
)

// diff is what changes for a tier.
func (t *Tier) diff(order []uint32, s side, w which) (list []proxier.PortChange) {
	for _, index := range order {
		p := t.ports[index]
		if p == nil || p.has[s] == p.want[s] {
			continue
		}
		if p.want[s] != nil && w&added != 0 || p.want[s] == nil && w&removed != 0 {
			list = append(list, proxier.PortChange{Old: p.has[s], New: p.want[s]})
		}
	}
	return list
}

// gains is what the fallback gets, along with what it has: whatever is leaving it is not
// in the fast tier yet.
func (t *Tier) gains(order []uint32) []proxier.PortChange {
	list := t.diff(order, onFallback, added)
	for i := range list {
		c := &list[i]
		if c.Old == nil {
			continue
		}
		has := func(d *proxier.Decision, f *proxier.Frontend) bool {
			return slices.ContainsFunc(d.Frontends, func(o proxier.Frontend) bool { return o.Addr == f.Addr && o.Kind == f.Kind })
		}
		old, next := c.Old, c.New
		c.New = t.ports[c.Index()].decision.Only(func(f *proxier.Frontend) bool { return has(old, f) || has(next, f) })
	}
	return list
}

// all is what a tier is to have.
func (t *Tier) all(order []uint32, s side) (list []proxier.PortChange) {
	for _, index := range order {
		if p := t.ports[index]; p.want[s] != nil {
			list = append(list, proxier.PortChange{Old: p.has[s], New: p.want[s]})
		}
	}
	return list
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
	if s == onFallback {
		t.cleaning.Wait()
	}
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
	guards := t.clusterIPs > 0
	if guards == t.guards {
		return nil
	}
	t.guards = guards
	return t.ownRules()
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
		if p == nil || p.decision == nil || p.overflow != nil {
			continue
		}
		p.overflow = why
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

// optedOut are the service ports that the fast tier is not to have.
func (t *Tier) optedOut() (moved []uint32) {
	for index, p := range t.ports {
		if p.decision != nil && p.decision.OptedOut {
			t.place(p)
			moved = append(moved, index)
		}
	}
	slices.Sort(moved)
	return moved
}

// fill gives the fallback all it is to have: it removes what else there is of its kind.
func (t *Tier) fill(ctx context.Context) error {
	order := make([]uint32, 0, len(t.ports))
	for index, p := range t.ports {
		if p.want[onFallback] == nil {
			p.has[onFallback] = nil
			continue
		}
		order = append(order, index)
	}
	slices.Sort(order)
	rules := t.rules
	if err := t.give(ctx, onFallback, proxier.Update{Full: true, NodeRules: &rules, Changes: t.all(order, onFallback)}); err != nil {
		return err
	}
	t.state = active
	return nil
}

// settle takes out of the fallback what the fast tier has had for a while. A fallback
// that carries nothing leaves nothing in the kernel, also not what others of its kind left
// there.
func (t *Tier) settle(ctx context.Context, u *proxier.Update, order []uint32) error {
	if t.failed.Swap(false) {
		t.state = unknown
	}
	if t.state == active {
		if err := t.sync(ctx, onFallback, u.NodeRules, t.leave(order)); err != nil {
			return err
		}
	}
	switch {
	case len(t.leaving) > 0:
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
	t.cleaning.Go(func() {
		timer := time.NewTimer(t.grace)
		defer timer.Stop()
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if err := t.fallback.Cleanup(ctx); err != nil {
			t.failed.Store(true)
			klog.FromContext(ctx).Error(err, "Cannot remove the rules of the fallback, which carries nothing; trying again with the next full sync")
		}
	})
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
		if p == nil || p.decision == nil {
			delete(t.leaving, index)
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
	why := t.refuses(d, f)
	if why == nil {
		return nil
	}
	if err := t.fallback.Supports(d, f); err != nil {
		return errors.Join(why, err)
	}
	return nil
}

// Overflow counts the service ports that the fast tier has no room for.
func (t *Tier) Overflow() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.ports {
		if p.overflow != nil {
			n++
		}
	}
	return n
}

// Why returns nil if the fast tier carries a frontend, and else why it does not.
func (t *Tier) Why(d *proxier.Decision, f *proxier.Frontend) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.ports[d.Index()]; p != nil && p.overflow != nil {
		return p.overflow
	}
	return t.refuses(d, f)
}

// Cleanup implements proxier.Tier.
func (t *Tier) Cleanup(ctx context.Context) error {
	return errors.Join(t.fast.Cleanup(ctx), t.fallback.Cleanup(ctx))
}
