// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

// Sync implements proxier.Tier. What comes to virtual servers is there first, then what
// comes to rules and goes from them, and what goes from virtual servers last: as rules
// translate before IPVS, nothing is missing in between.
func (t *Tier) Sync(ctx context.Context, u proxier.Update) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	full := u.Full || !t.whole
	t.take(&u, full)
	if full {
		var err error
		if t.links, err = t.system.links(); err != nil {
			return err
		}
	}
	order := t.owed
	for _, index := range order {
		t.place(t.ports[index])
	}
	fresh := false
	if full {
		t.whole = false
		var err error
		if fresh, err = t.read(ctx); err != nil {
			return err
		}
	}
	var errs []error
	if fresh {
		// Nobody is served yet, and the first one is to be masqueraded.
		errs = append(errs, t.syncRules(ctx, true, order))
	}
	errs = append(errs, t.writeOwed())
	err := t.syncRules(ctx, full && !fresh, order)
	errs = append(errs, err)
	if err == nil { // else what has moved may be missing there
		errs = append(errs, t.settle())
	}
	err = errors.Join(errs...)
	t.whole = t.whole || err == nil
	for _, index := range order {
		if p := t.ports[index]; p.decision == nil && p.plan == nil && p.rules == nil {
			delete(t.ports, index)
		}
	}
	return err
}

// place says what rules are to have of a service port, if the kernel takes the rest.
func (t *Tier) place(p *port) {
	p.refused, p.share = nil, nil
	if d := p.decision; d != nil {
		p.share = d.Only(func(f *proxier.Frontend) bool { return t.byRules(d, f) })
		if p.share != nil && d.HealthCheckNodePort != 0 && t.unusable == [proxier.Families]error{} {
			share := *p.share
			share.HealthCheckNodePort = 0 // which is in the sets of both families
			p.share = &share
		}
	}
}

// take notes what is wanted.
func (t *Tier) take(u *proxier.Update, full bool) {
	if u.NodeRules != nil {
		t.planner.rules, t.rulesKnown = *u.NodeRules, false
	}
	kept := make(map[uint32]struct{}, len(u.Changes))
	for i := range u.Changes {
		c := &u.Changes[i]
		p := t.ports[c.Index()]
		if p == nil {
			p = &port{}
			t.ports[c.Index()] = p
		}
		p.decision = c.New
		kept[c.Index()] = struct{}{}
		t.owe(c.Index())
	}
	if u.Full {
		for index, p := range t.ports {
			if _, ok := kept[index]; !ok {
				p.decision = nil
			}
		}
	}
	if full || u.NodeRules != nil {
		for _, index := range slices.Sorted(maps.Keys(t.ports)) {
			t.owe(index)
		}
	}
}

func (t *Tier) owe(index uint32) {
	if _, ok := t.owes[index]; !ok {
		t.owes[index] = struct{}{}
		t.owed = append(t.owed, index)
	}
}

// read compares everything with the kernel, and says whether nobody is served yet.
func (t *Tier) read(ctx context.Context) (fresh bool, err error) {
	if err := t.system.prepare(ctx); err != nil {
		return false, err
	}
	if err := errors.Join(t.servers.read(), t.addrs.read(), t.members.read()); err != nil {
		return false, err
	}
	if t.rulesTold {
		return false, nil
	}
	serving, err := t.system.serving(ctx)
	return !serving, err
}

// writeOwed writes the service ports that are owed. What the kernel refuses of one holds
// up no other: rules carry it then.
func (t *Tier) writeOwed() error {
	var errs []error
	list := t.owed
	t.owed = nil
	clear(t.owes)
	for _, index := range list {
		p := t.ports[index]
		var next *plan
		if p.decision != nil {
			next = t.plan(p.decision)
		}
		t.swap(p, next)
		err := t.write(next)
		if err == nil {
			continue
		}
		t.swap(p, nil)
		p.refused, p.share = err, p.decision
		if refuses(err) {
			t.report(p)
			continue
		}
		errs = append(errs, fmt.Errorf("%s: %w", p.decision.Name.String(), err))
		t.owe(index)
	}
	return errors.Join(errs...)
}

// swap counts a plan in, and the one before out.
func (t *Tier) swap(p *port, next *plan) {
	if next != nil {
		t.servers.claim(next.servers)
		t.addrs.count(next.addrs, 1)
		t.members.count(next.members, 1)
	}
	if p.plan != nil {
		t.servers.release(p.plan.servers)
		t.addrs.count(p.plan.addrs, -1)
		t.members.count(p.plan.members, -1)
	}
	p.plan = next
}

// write has the kernel hold what is in a plan: addresses last, by which it is seen.
func (t *Tier) write(p *plan) error {
	if p == nil {
		return nil
	}
	if err := t.members.ensure(p.members); err != nil {
		return err
	}
	for _, s := range p.servers {
		if err := t.servers.ensure(s.key); err != nil {
			return err
		}
	}
	return t.addrs.ensure(p.addrs)
}

// refuses says whether an error is the kernel's answer to what was asked, rather than one
// about the asking.
func refuses(err error) bool {
	var full nl.IPSetError
	if errors.As(err, &full) {
		return true
	}
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return false
	}
	switch errno {
	case unix.EINTR, unix.EAGAIN, unix.ENOBUFS, unix.ENOMEM, unix.EPERM, unix.EBADF, unix.ESRCH, unix.ENODEV:
		return false
	}
	return true
}

// report tells, once, of a service port that virtual servers cannot carry.
func (t *Tier) report(p *port) {
	if t.opts.Reporter == nil || p.told == p.decision {
		return
	}
	p.told = p.decision
	t.opts.Reporter.Report(proxier.Problem{
		Kind: "Service", Object: p.decision.Name.NamespacedName, UID: p.decision.UID, Reason: "VirtualServerRefused",
		Message: fmt.Sprintf("port %s: %v; rules carry it, and others are not concerned", p.decision.Name.Port, p.refused),
	})
}

// syncRules gives the rules what is theirs.
func (t *Tier) syncRules(ctx context.Context, full bool, order []uint32) error {
	u := proxier.Update{Full: full}
	if full {
		order = slices.Sorted(maps.Keys(t.ports))
	}
	for _, index := range order {
		p := t.ports[index]
		if full && p.share != nil || p.share != p.rules {
			u.Changes = append(u.Changes, proxier.PortChange{Old: p.rules, New: p.share})
		}
		p.rules = p.share
	}
	if !t.rulesKnown {
		// One by one, or those of kube-ipvs0 would be among them.
		own := t.planner.rules
		own.AllNodePortAddrs = [proxier.Families]bool{}
		u.NodeRules, t.rulesKnown = &own, true
	}
	if !full && !t.rulesOwe && u.NodeRules == nil && len(u.Changes) == 0 {
		return nil
	}
	t.rulesTold = t.rulesTold || full
	err := t.rules.Sync(ctx, u)
	t.rulesOwe = err != nil
	return err
}

// settle removes what nobody wants any more, but for what has open connections.
func (t *Tier) settle() error {
	err := errors.Join(t.servers.ensureChanged(), t.servers.settle())
	kept := t.servers.draining()
	for _, a := range t.planner.rules.LocalAddrs {
		delete(kept, a) // it is this node's without kube-ipvs0
	}
	return errors.Join(err,
		t.addrs.settle(func(a netip.Addr) bool { return has(kept, a) }),
		t.members.settle(func(m member) bool { return m.name == boundIPs && has(t.addrs.there, m.addr) }))
}

func has[K comparable, V any](m map[K]V, key K) bool { _, ok := m[key]; return ok }
