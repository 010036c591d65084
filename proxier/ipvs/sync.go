// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/delta"
)

// Sync implements proxier.Tier. It first adds to virtual servers, then changes rules, and finally
// removes from virtual servers. Rules translate before IPVS, so frontends that move between them
// are served all the time.
func (t *Tier) Sync(ctx context.Context, u proxier.Update) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	full := u.Full || !t.whole
	t.record(&u, full)
	if full {
		var err error
		if t.links, err = t.system.links(); err != nil {
			return err
		}
	}
	var order []uint32
	for index, item := range t.ports.Pending() {
		order = append(order, index)
		t.divide(item)
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
		// Nothing is served yet, and the first connection is to be masqueraded.
		errs = append(errs, t.syncRules(ctx, true, order))
	}
	errs = append(errs, t.writePending(ctx))
	err := t.syncRules(ctx, full && !fresh, order)
	errs = append(errs, err)
	if err == nil { // else what has moved may be missing there
		errs = append(errs, t.removeUnused(ctx))
	}
	err = errors.Join(errs...)
	t.whole = t.whole || err == nil
	return err
}

// record stores the desired state.
func (t *Tier) record(u *proxier.Update, full bool) {
	if u.NodeRules != nil {
		t.nodeRules, t.rulesKnown = *u.NodeRules, false
	}
	t.ports.Begin()
	for i := range u.Changes {
		c := &u.Changes[i]
		if c.New == nil {
			t.ports.Drop(c.Index())
			continue
		}
		if item := t.ports.Want(c.Index(), c.New); item.Applied == nil {
			item.Applied = &port{}
		}
	}
	if u.Full {
		t.ports.DropOthers()
	}
	if full || u.NodeRules != nil {
		t.ports.TouchAll()
	}
}

// divide says what rules are to have of a service port, if the kernel takes the rest.
func (t *Tier) divide(item *delta.Item[*proxier.Decision, *port]) {
	p := item.Applied
	p.share = nil
	if d := item.Desired(); d != nil {
		p.share = t.assign(d)
		if p.share != nil && d.HealthCheckNodePort != 0 && t.unusable == [proxier.Families]error{} {
			share := *p.share
			share.HealthCheckNodePort = 0 // which is in the sets of both families
			p.share = &share
		}
	}
}

// read compares everything with the kernel, and reports whether nothing is served yet.
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

// writePending writes service ports. One that the kernel refuses holds up no other: rules
// serve it then.
func (t *Tier) writePending(ctx context.Context) error {
	var errs []error
	for index, item := range t.ports.Pending() {
		p, d := item.Applied, item.Desired()
		if !item.Wanted() {
			t.swap(p, nil)
			continue // the rules are still to be told
		}
		next := t.plan(d)
		t.swap(p, next)
		err := t.write(ctx, next)
		if err == nil {
			t.ports.Done(index, p)
			continue
		}
		t.swap(p, nil)
		p.share = d
		t.ports.Failed(index, err)
		if refuses(err) {
			t.ports.Refused(index, err)
			t.report(p, d, err)
			continue
		}
		errs = append(errs, fmt.Errorf("%s: %w", d.Name.String(), err))
	}
	return errors.Join(errs...)
}

// swap counts a plan in, and the one before out.
func (t *Tier) swap(p *port, next *plan) {
	if next != nil {
		t.servers.claim(next.servers)
		t.addrs.Use(next.addrs, 1)
		t.members.Use(next.members, 1)
	}
	if p.plan != nil {
		t.servers.release(p.plan.servers)
		t.addrs.Use(p.plan.addrs, -1)
		t.members.Use(p.plan.members, -1)
	}
	p.plan = next
}

// write programs a plan into the kernel: addresses last, as they make it visible.
func (t *Tier) write(ctx context.Context, p *plan) error {
	if p == nil {
		return nil
	}
	if err := t.members.ensure(p.members); err != nil {
		return err
	}
	for _, s := range p.servers {
		if err := t.servers.ensure(ctx, s.key); err != nil {
			return err
		}
	}
	return t.addrs.ensure(p.addrs)
}

// refuses reports whether an error is the kernel's answer to what was asked, rather than one
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

// report tells, once, of a service port that virtual servers cannot serve.
func (t *Tier) report(p *port, d *proxier.Decision, why error) {
	if t.opts.Reporter == nil || p.reported == d {
		return
	}
	p.reported = d
	problem := d.Problem(proxier.ReasonServerRefused)
	problem.Message = fmt.Sprintf("port %s: %v; iptables rules serve it instead, other Services are not affected", d.Name.Port, why)
	t.opts.Reporter.Report(problem)
}

// syncRules passes to the rules what they must serve.
func (t *Tier) syncRules(ctx context.Context, full bool, order []uint32) error {
	u := proxier.Update{Full: full}
	if full {
		order = order[:0:0]
		for index := range t.ports.All() {
			order = append(order, index)
		}
		slices.Sort(order)
	}
	for _, index := range order {
		item := t.ports.Get(index)
		if item == nil {
			continue // gone
		}
		p := item.Applied
		if full && p.share != nil || p.share != p.rules {
			u.Changes = append(u.Changes, proxier.PortChange{Old: p.rules, New: p.share})
		}
		p.rules = p.share
		if !item.Wanted() && p.plan == nil {
			t.ports.Removed(index)
		}
	}
	if !t.rulesKnown {
		// One by one, or those of kube-ipvs0 would be among them.
		own := t.nodeRules
		own.AllNodePortAddrs = [proxier.Families]bool{}
		u.NodeRules, t.rulesKnown = &own, true
	}
	if !full && !t.rulesFailed && u.NodeRules == nil && len(u.Changes) == 0 {
		return nil
	}
	t.rulesTold = t.rulesTold || full
	err := t.rules.Sync(ctx, u)
	t.rulesFailed = err != nil
	return err
}

// removeUnused removes kernel objects that are not desired any more, except those with open
// connections.
func (t *Tier) removeUnused(ctx context.Context) error {
	err := errors.Join(t.servers.ensureChanged(ctx), t.servers.removeUnused())
	kept := t.servers.draining()
	for _, a := range t.nodeRules.LocalAddrs {
		delete(kept, a) // it is this node's without kube-ipvs0
	}
	return errors.Join(err,
		t.addrs.removeUnused(func(a netip.Addr) bool { return has(kept, a) }),
		t.members.removeUnused(func(m member) bool { return m.name == boundIPs && t.addrs.isThere(m.addr) }))
}

func has[K comparable, V any](m map[K]V, key K) bool { _, ok := m[key]; return ok }
