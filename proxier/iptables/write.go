// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
)

// batchSize is how many chains go to the kernel at once. With the nft variant, the
// time that takes grows with the square of it, and each time the kernel walks all that
// is there; the legacy variant reads and writes the whole table however little there is
// to change.
func (f *family) batchSize() int {
	if f.opts.Tools.Variant() == xtables.Legacy {
		return 1 << 20
	}
	return 2000
}

// firstBatch is how many service ports the first one has, for nodes that start.
const firstBatch = 50

// writeOwed writes the service ports that are owed. While what is there serves until
// all is written, hubs wait.
func (f *family) writeOwed(ctx context.Context, holdHubs bool) error {
	first := len(f.owed) > 10*firstBatch
	for len(f.owed) > 0 {
		n, chains := 0, 0
		for n < len(f.owed) && chains < f.batchSize() && (!first || n < firstBatch) {
			if p := f.ports[f.owed[n]]; p != nil {
				chains += len(p.chains)
				if p.decision != nil {
					chains += len(p.decision.Backends) + 2
				}
			}
			n++
		}
		first = false
		if err := f.writePorts(ctx, f.owed[:n], holdHubs); err != nil {
			return err
		}
		for _, index := range f.owed[:n] {
			delete(f.owes, index)
			delete(f.rendered, index)
		}
		f.owed = f.owed[n:]
	}
	f.owed = nil
	return nil
}

// writePorts writes some service ports at once. If the kernel refuses that, it writes
// each half, down to the one that is at fault, which costs the others nothing.
func (f *family) writePorts(ctx context.Context, list []uint32, holdHubs bool) error {
	d := f.delta(list, holdHubs)
	err := f.restore(ctx, d.text)
	if err == nil {
		d.commit()
		for name := range d.emptied {
			f.leave(ctx, name)
		}
		return nil
	}
	d.undo()
	var refused *xtables.RestoreError
	switch {
	case !errors.As(err, &refused) || ctx.Err() != nil:
		return err
	case f.boundBy(err, d.text) != "":
		return f.writePorts(ctx, list, holdHubs)
	case len(list) > 1:
		half := len(list) / 2
		return errors.Join(f.writePorts(ctx, list[:half], holdHubs), f.writePorts(ctx, list[half:], holdHubs))
	}
	f.fail(ctx, list[0], err)
	return nil
}

// fail tells, once, of a service port that the kernel refused.
func (f *family) fail(ctx context.Context, index uint32, err error) {
	p := f.ports[index]
	before, again := f.failed[index]
	f.failed[index] = p.decision
	if p.decision == nil {
		klog.FromContext(ctx).Error(err, "Cannot remove rules of a service port that is gone; trying again with the next full sync", "family", f.name)
		return
	}
	if f.opts.Reporter != nil && (!again || before != p.decision) {
		f.opts.Reporter.Report(proxier.Problem{
			Kind: "Service", Object: p.decision.Name.NamespacedName, UID: p.decision.UID, Reason: "RulesRefused",
			Message: fmt.Sprintf("port %s over %s: %v; rules that were there stay, and others are not concerned", p.decision.Name.Port, f.name, err),
		})
	}
}

// delta is what writing some service ports changes.
type delta struct {
	f     *family
	text  *text
	ports []portDelta
	// chains that are written, with a hash of their rules, that are deleted, and that
	// are emptied because they cannot be.
	written          map[string]stamp
	deleted, emptied map[string]struct{}
	// hubs by what is done to their chains.
	hubs map[hubChain]*hubDelta
	held bool
}

type portDelta struct {
	index  uint32
	port   *port
	before []entry
	want   portRules
}

type hubChain struct {
	hub  hubName
	slot slot
}

type hubDelta struct {
	added   []string
	removed bool
}

// delta works out a change, and counts it in.
func (f *family) delta(list []uint32, holdHubs bool) *delta {
	ports, chains := make([]portDelta, 0, len(list)), 0
	for _, index := range list {
		if p := f.ports[index]; p != nil {
			want := f.render(index)
			ports = append(ports, portDelta{index, p, p.entries, want})
			chains += len(want.chains)
		}
	}
	d := &delta{
		f: f, text: newText(), ports: ports, written: make(map[string]stamp, chains), deleted: map[string]struct{}{}, emptied: map[string]struct{}{},
		hubs: map[hubChain]*hubDelta{}, held: holdHubs,
	}
	nat := d.text.table("nat")
	nat.grow(chains)
	for i := range ports {
		p, want := ports[i].port, &ports[i].want
		for _, c := range want.chains {
			if !f.kernel.is(c.name, c.stamp) {
				nat.write(c.name, c.rules)
				d.written[c.name] = c.stamp
			}
		}
		d.use(p.chains, want.names)
		d.change(without(p.entries, want.entries), -1)
		d.change(without(want.entries, p.entries), 1)
	}
	if holdHubs {
		d.try() // what is there may still lead to chains that nobody has any more
		return d
	}
	d.writeHubs()
	for _, p := range d.ports {
		for _, name := range without(p.port.chains, p.want.names) {
			switch {
			case f.uses[name] > 0 || has(d.deleted, name) || has(d.emptied, name):
			case has(f.bound, name):
				nat.declare(name)
				d.emptied[name] = struct{}{}
			default:
				nat.drop(name)
				d.deleted[name] = struct{}{}
			}
		}
	}
	return d
}

// use counts chains of a service port in and out.
func (d *delta) use(before, after []string) {
	for _, name := range without(before, after) {
		d.f.uses[name]--
	}
	for _, name := range without(after, before) {
		d.f.uses[name]++
	}
}

// trialChain is there within a restore alone.
const trialChain = servicesChain + "-TRIAL"

// try writes to a chain of no consequence what waits for hubs to be written: a rule that
// the kernel refuses there must not hold up those of others.
func (d *delta) try() {
	rules := map[string][]string{}
	for _, p := range d.ports {
		for _, e := range without(p.want.entries, p.before) {
			table := hubChains[e.hub].table
			rules[table] = append(rules[table], e.rule)
		}
	}
	for name, list := range rules {
		part := d.text.table(name)
		part.write(trialChain, list)
		part.flush(trialChain)
		part.dropped = append(part.dropped, trialChain)
	}
}

// without are the elements of a that are not in b.
func without[T comparable](a, b []T) []T {
	if len(a) == 0 || slices.Equal(a, b) {
		return nil
	}
	if len(b) == 0 {
		return slices.Clone(a)
	}
	in := make(map[T]struct{}, len(b))
	for _, x := range b {
		in[x] = struct{}{}
	}
	return slices.DeleteFunc(slices.Clone(a), func(x T) bool { return has(in, x) })
}

// change counts entries in or out.
func (d *delta) change(entries []entry, by int) {
	for _, e := range entries {
		if !d.f.hubs[e.hub].change(e.slot, e.rule, by) {
			continue
		}
		at := hubChain{e.hub, e.slot}
		h := d.hubs[at]
		if h == nil {
			h = &hubDelta{}
			d.hubs[at] = h
		}
		switch {
		case by < 0:
			h.removed = true
		default:
			h.added = append(h.added, e.rule)
		}
	}
}

// writeHubs writes what changed in hubs: rules that come are put in front, which
// touches nothing else, and where one goes the chain is written anew.
func (d *delta) writeHubs() {
	done := map[*hub]string{} // a hub that is no tree has one chain for all slots
	for _, at := range slices.SortedFunc(maps.Keys(d.hubs), compareHubChain) {
		h, change := d.f.hubs[at.hub], d.hubs[at]
		name, table := h.chainOf(at.slot), d.text.table(h.table())
		if done[h] == name {
			continue
		}
		if d.removes(h, name) || has(h.stale, name) || !has(h.made, name) {
			table.write(name, h.rulesOf(name))
			done[h] = name
			if h.split && !has(h.made, name) && !has(h.stale, h.chain()) {
				table.insert(h.chain(), h.branch(at.slot))
			}
			continue
		}
		for _, rule := range change.added {
			table.insert(name, rule)
		}
	}
}

func compareHubChain(a, b hubChain) int {
	return cmp.Or(cmp.Compare(a.hub, b.hub), cmp.Compare(a.slot, b.slot))
}

// removes says whether a rule goes out of a chain of the hub.
func (d *delta) removes(h *hub, name string) bool {
	for at, change := range d.hubs {
		if change.removed && d.f.hubs[at.hub] == h && h.chainOf(at.slot) == name {
			return true
		}
	}
	return false
}

// commit notes that the kernel took it.
func (d *delta) commit() {
	f := d.f
	for name, s := range d.written {
		f.kernel.set(name, s)
	}
	for name := range d.deleted {
		f.kernel.forget(name)
	}
	for name := range d.emptied {
		f.kernel.set(name, stampOf(nil))
	}
	for at := range d.hubs {
		h := f.hubs[at.hub]
		name := h.chainOf(at.slot)
		if d.held {
			h.stale[name] = struct{}{}
			if h.split && !has(h.made, name) {
				h.stale[h.chain()] = struct{}{}
			}
			continue
		}
		h.made[name] = struct{}{}
		delete(h.stale, name)
	}
	for i := range d.ports {
		p := &d.ports[i]
		delete(f.failed, p.index)
		if p.port.decision == nil {
			delete(f.ports, p.index)
			continue
		}
		p.port.chains, p.port.entries = p.want.names, p.want.entries
	}
}

// undo counts it out again. What the kernel has of it is not known: a table may have
// been changed before another was refused.
func (d *delta) undo() {
	f := d.f
	for _, p := range d.ports {
		f.count(without(p.want.entries, p.before), -1)
		f.count(without(p.before, p.want.entries), 1)
		d.use(p.want.names, p.port.chains)
	}
	for name := range d.written {
		f.kernel.forget(name)
	}
	for _, names := range []map[string]struct{}{d.deleted, d.emptied} {
		for name := range names {
			f.kernel.forget(name)
		}
	}
	for at := range d.hubs {
		h := f.hubs[at.hub]
		name := h.chainOf(at.slot)
		h.stale[name] = struct{}{}
		if !has(h.made, name) {
			h.stale[h.chain()] = struct{}{}
		}
	}
}
