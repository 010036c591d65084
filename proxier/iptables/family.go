// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"hash/maphash"
	"maps"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
)

// family is what one family's tables hold of ours.
type family struct {
	name     proxier.Family
	opts     *Options
	watch    *watch
	renderer *renderer
	loopback bool // NodePorts are served at loopback addresses
	extra    Extra
	// counts says that rules can count, and counting that the counters are there.
	counts, counting bool
	ports            map[uint32]*port // by Decision.Index
	hubs             [hubs]*hub
	// kernel has the chains of service ports there, and a hash of their rules.
	kernel chainStamps
	// bound are chains of ours that rules of somebody else lead to, so that they cannot
	// go: they are emptied instead.
	bound map[string]struct{}
	// uses counts the service ports that have a chain: one that is gone and one that
	// came in its place may both have it for a while.
	uses map[string]int
	// owed are service ports that are to be written, in the order in which they should
	// become visible; owes has the same.
	owed []uint32
	owes map[uint32]struct{}
	// rendered is what is wanted of those that are owed, while everything is written.
	rendered map[uint32]portRules
	// failed are those that the kernel refused, and what it refused of them; they are
	// tried again with full syncs.
	failed map[uint32]*proxier.Decision
	whole  bool // the last full sync succeeded
	// wrote counts the rules that this sync has written, by table.
	wrote map[string]int
}

// port is a service port: what is wanted, and what was written of it.
type port struct {
	decision *proxier.Decision // nil when it is gone
	chains   []string
	entries  []entry
}

func newFamily(name proxier.Family, opts *Options, w *watch) *family {
	f := &family{
		name: name, opts: opts, watch: w, ports: map[uint32]*port{}, kernel: newChainStamps(), uses: map[string]int{},
		bound: map[string]struct{}{}, wrote: map[string]int{},
		owes: map[uint32]struct{}{}, failed: map[uint32]*proxier.Decision{},
	}
	f.renderer = newRenderer(name, &proxier.Detector{}, true)
	for h := range hubs {
		f.hubs[h] = newHub(h, name)
	}
	return f
}

var seed = maphash.MakeSeed()

func hashOf(rules []string) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	for _, r := range rules {
		_, _ = h.WriteString(r) // never fails
		_ = h.WriteByte('\n')
	}
	return h.Sum64()
}

// sync writes an update. Everything is compared with what is in the kernel in a full one,
// unless nobody else has changed anything there, and when what is known does not do.
func (f *family) sync(ctx context.Context, u proxier.Update) error {
	clear(f.wrote)
	defer f.tell()
	news := f.learn(u.NodeRules)
	f.take(u)
	if news || !f.whole || u.Full && !f.watch.unchanged(f.name) || slices.ContainsFunc(f.hubs[:], (*hub).wantsOtherShape) || u.Full && f.chooseComments() {
		return f.syncAll(ctx)
	}
	if u.Full {
		for index := range f.failed {
			f.owe(index)
		}
	}
	if err := f.writeOwed(ctx, false); err != nil {
		return err
	}
	return f.writeHubs(ctx)
}

// learn takes the rules of the node, and says whether anything is written otherwise now,
// so that everything is to be looked at again. Most addresses that come or go are in no
// rule.
func (f *family) learn(rules *proxier.NodeRules) (news bool) {
	if rules == nil {
		return false
	}
	// IPv6 has no route_localnet.
	loopback := f.name == proxier.IPv4 && len(rules.Loopback[f.name]) > 0
	renderer := newRenderer(f.name, &rules.Pods, f.renderer.comments)
	news = loopback != f.loopback || *renderer != *f.renderer
	f.loopback, f.renderer = loopback, renderer
	if f.opts.Extra != nil {
		extra := f.opts.Extra(f.name, rules)
		news = news || !reflect.DeepEqual(extra, f.extra)
		f.extra = extra
	}
	for name, tail := range map[hubName][]string{
		servicesNAT: nodePorts(f.name, rules, nodePortsChain, ""),
		// Behind all that is said of one address and port.
		firewallFilter:     append(nodePorts(f.name, rules, externalNodePortsChain, notTranslated), renderer.unserved(rules)...),
		healthChecksFilter: nil,
	} {
		h := f.hubs[name]
		tail = append(f.extra.before(h.table(), h.chain()), tail...)
		news = news || !slices.Equal(tail, h.tail)
		h.tail = tail
	}
	return news
}

// take notes what is wanted.
func (f *family) take(u proxier.Update) {
	kept := map[uint32]struct{}{}
	for i := range u.Changes {
		c := &u.Changes[i]
		kept[c.Index()] = struct{}{}
		p := f.ports[c.Index()]
		if p == nil {
			if c.New == nil {
				continue
			}
			p = &port{}
			f.ports[c.Index()] = p
		}
		if p.decision == c.New && c.New != nil && f.whole {
			continue
		}
		p.decision = c.New
		f.owe(c.Index())
	}
	if !u.Full {
		return
	}
	for index, p := range f.ports {
		if !has(kept, index) && p.decision != nil {
			p.decision = nil
			f.owe(index)
		}
	}
}

func (f *family) owe(index uint32) {
	if !has(f.owes, index) {
		f.owes[index] = struct{}{}
		f.owed = append(f.owed, index)
	}
}

func has[K comparable, V any](m map[K]V, key K) bool { _, ok := m[key]; return ok }

// render is what is wanted of a service port.
func (f *family) render(index uint32) portRules {
	if r, ok := f.rendered[index]; ok {
		return r
	}
	if p := f.ports[index]; p.decision != nil {
		return f.renderer.render(p.decision)
	}
	return portRules{}
}

// renderedAtOnce bounds the memory that is needed where all is as it should be.
const renderedAtOnce = 2048

// renderAll renders service ports on all CPUs: a node that starts waits for it.
func (f *family) renderAll(list []uint32) []portRules {
	all := make([]portRules, len(list))
	each := max(1, (len(list)+runtime.GOMAXPROCS(0)-1)/runtime.GOMAXPROCS(0))
	var wg sync.WaitGroup
	for from := 0; from < len(list); from += each {
		wg.Go(func() {
			for i := from; i < min(from+each, len(list)); i++ {
				if f.ports[list[i]] != nil {
					all[i] = f.render(list[i])
				}
			}
		})
	}
	wg.Wait()
	return all
}

// manyEndpoints is where rules lose their comments, as upstream's do.
const manyEndpoints = 1000

// chooseComments counts endpoints, and says whether that changes anything. In between
// it stays as it is.
func (f *family) chooseComments() bool {
	before := f.renderer.comments
	n := 0
	for _, p := range f.ports {
		if p.decision != nil {
			n += len(p.decision.Backends)
		}
	}
	switch {
	case n > manyEndpoints:
		f.renderer.comments = false
	case n <= manyEndpoints/2:
		f.renderer.comments = true
	}
	return f.renderer.comments != before
}

// syncAll compares everything with what is in the kernel, and writes what differs.
func (f *family) syncAll(ctx context.Context) error {
	f.whole = false
	f.ensureCounters(ctx)
	f.watch.begin(f.name)
	tables, err := f.opts.Tools.SaveAll(ctx, f.name, tableOrder...)
	if err != nil {
		return err
	}
	f.kernel.clear()
	for _, c := range tables["nat"].Chains {
		if isOwn(c.Name) {
			f.kernel.set(strings.Clone(c.Name), stampOf(c.Rules)) // else all that was read would be kept
		}
	}
	f.bind(tables)
	f.chooseComments()
	wanted := f.settle(tables)
	defer func() { f.rendered = nil }()
	adopting := f.compareHubs(tables, wanted)
	if err := f.restore(ctx, f.base(tables)); err != nil {
		return err
	}
	if !adopting {
		if err := f.writeHubs(ctx); err != nil {
			return err
		}
	}
	// Hubs that waited may be written only when nobody is owed any more.
	if err := f.writeOwed(ctx, adopting); err != nil {
		return err
	}
	for _, h := range f.hubs {
		h.letGo()
	}
	if err := f.writeHubs(ctx); err != nil {
		return err
	}
	if err := f.dropStale(ctx, tables); err != nil {
		return err
	}
	for _, h := range f.hubs {
		h.wished = h.wantsSplit(h.size)
	}
	f.whole = true
	return nil
}

// bind finds the chains of ours that rules of somebody else lead to.
func (f *family) bind(tables map[string]*xtables.Table) {
	clear(f.bound)
	for _, table := range tables {
		for _, c := range table.Chains {
			if isOurs(c.Name) {
				continue
			}
			for _, r := range c.Rules {
				if to := jumpOf(r); isOurs(to) {
					f.bound[strings.Clone(to)] = struct{}{}
				}
			}
		}
	}
}

// settle finds out which service ports are in the kernel as they should be; all others
// are owed. What is there of those counts as written, whoever wrote it. It counts what
// hubs are to hold in the end: a rule that several service ports share once.
func (f *family) settle(tables map[string]*xtables.Table) (wanted [hubs]int) {
	owed := f.owed
	for _, index := range slices.Sorted(maps.Keys(f.ports)) {
		if !has(f.owes, index) {
			owed = append(owed, index)
		}
	}
	f.owed = nil
	clear(f.owes)
	clear(f.uses)
	f.rendered = map[uint32]portRules{}
	there := f.entriesOf(tables)
	var rules [hubs]map[string]struct{}
	for h := range rules {
		rules[h] = map[string]struct{}{}
	}
	for list := range slices.Chunk(owed, renderedAtOnce) {
		for i, r := range f.renderAll(list) {
			index := list[i]
			p := f.ports[index]
			if p == nil {
				continue
			}
			for _, e := range r.entries {
				rules[e.hub][e.rule] = struct{}{}
			}
			f.count(p.entries, -1)
			p.entries = slices.DeleteFunc(union(p.entries, r.entries), func(e entry) bool { return !has(there[e.hub], e.rule) })
			f.count(p.entries, 1)
			p.chains = slices.DeleteFunc(union(p.chains, r.names), func(name string) bool { return !has(f.kernel.chains, name) })
			for _, name := range p.chains {
				f.uses[name]++
			}
			if !f.isWritten(p, r) {
				f.owe(index)
				f.rendered[index] = r
			}
		}
	}
	for h := range rules {
		wanted[h] = len(rules[h])
	}
	return wanted
}

// entriesOf are the rules in the hubs of the kernel.
func (f *family) entriesOf(tables map[string]*xtables.Table) (there [hubs]map[string]struct{}) {
	for i, h := range f.hubs {
		there[i] = map[string]struct{}{}
		for _, c := range tables[h.table()].Chains {
			if !h.owns(c.Name) {
				continue
			}
			for _, r := range c.Rules {
				there[i][r] = struct{}{}
			}
		}
	}
	return there
}

// isWritten says whether a port is in the kernel as it should be.
func (f *family) isWritten(p *port, r portRules) bool {
	return p.decision != nil && sameSet(p.entries, r.entries) && sameSet(p.chains, r.names) &&
		!slices.ContainsFunc(r.chains, func(c chain) bool { return !f.kernel.is(c.name, c.stamp) })
}

// union are the elements of both, each once.
func union[T comparable](a, b []T) []T { return append(slices.Clone(a), without(b, a)...) }

func sameSet[T comparable](a, b []T) bool { return len(without(a, b)) == 0 && len(without(b, a)) == 0 }

func (f *family) count(entries []entry, by int) {
	for _, e := range entries {
		f.hubs[e.hub].change(e.slot, e.rule, by)
	}
}

// compareHubs finds the chains of hubs that are not as they should be. It says whether
// there are rules of an earlier process, or of upstream, that serve until all of ours
// are there.
func (f *family) compareHubs(tables map[string]*xtables.Table, wanted [hubs]int) (adopting bool) {
	for i, h := range f.hubs {
		h.split = h.wantsSplit(wanted[i])
		clear(h.stale)
		table := tables[h.table()]
		for name, rules := range h.chains() {
			tail := 0
			if name == h.chain() {
				tail = len(h.tail)
			}
			there := table.Chain(name)
			if there != nil && holds(there.Rules, rules, tail) {
				continue
			}
			h.stale[name] = struct{}{}
			if there != nil && len(there.Rules) > 0 {
				adopting = true
			}
		}
		clear(h.made)
		if root := table.Chain(h.chain()); root != nil {
			h.made[h.chain()] = struct{}{}
			for _, r := range root.Rules {
				if to := jumpOf(r); table.Chain(to) != nil && h.owns(to) {
					h.made[strings.Clone(to)] = struct{}{} // as in syncAll
				}
			}
		}
	}
	return adopting
}

// dropStale deletes the chains that nobody wants, and empties those that cannot go.
func (f *family) dropStale(ctx context.Context, tables map[string]*xtables.Table) error {
	wanted := map[string]struct{}{} // besides those that service ports have
	for index := range f.failed {
		if p := f.ports[index]; p != nil {
			keep(wanted, tables["nat"], p.chains)
		}
	}
	text := newText()
	drop := func(table, name string, empty bool) {
		switch {
		case !has(f.bound, name):
			text.table(table).drop(name)
		case !empty:
			text.table(table).declare(name)
			f.leave(ctx, name)
		}
	}
	nothing := stampOf(nil)
	for name, s := range f.kernel.chains {
		if f.uses[name] == 0 && !has(wanted, name) {
			drop("nat", name, s == nothing)
		}
	}
	for _, h := range f.hubs {
		chains := h.chains()
		for _, c := range tables[h.table()].Chains {
			if h.owns(c.Name) && !has(chains, c.Name) {
				drop(h.table(), c.Name, len(c.Rules) == 0)
				delete(h.made, c.Name)
			}
		}
	}
	for part := range text.inParts(f.batchSize()) {
		if err := f.drop(ctx, part); err != nil {
			return err
		}
		nat := part.table("nat")
		for _, name := range nat.declared {
			if has(f.kernel.chains, name) {
				f.kernel.set(name, nothing)
			}
		}
		for _, name := range nat.dropped {
			f.kernel.forget(name)
		}
	}
	return nil
}

// drop writes a text that drops chains, but for those that cannot go.
func (f *family) drop(ctx context.Context, t *text) error {
	for {
		err := f.restore(ctx, t)
		name := f.boundBy(err, t)
		if name == "" {
			return err
		}
		f.leave(ctx, name)
		for _, part := range t.tables {
			part.dropped = slices.DeleteFunc(part.dropped, func(c string) bool { return c == name })
		}
	}
}

// boundBy is the chain that could not be deleted, if that is why a text was refused. What
// leads there came after the tables were read, or the tools do not show it.
func (f *family) boundBy(err error, t *text) string {
	var refused *xtables.RestoreError
	if !errors.As(err, &refused) {
		return ""
	}
	name := t.droppedAt(refused.Line)
	if !isOurs(name) || has(f.bound, name) {
		return ""
	}
	f.bound[name] = struct{}{}
	return name
}

// leave tells of a chain that is emptied in place of being deleted.
func (f *family) leave(ctx context.Context, name string) {
	klog.FromContext(ctx).Info("Leaving an empty chain that nobody wants: a rule of somebody else leads to it", "family", f.name, "chain", name)
}

// keep adds the chains that chains lead to.
func keep(wanted map[string]struct{}, nat *xtables.Table, chains []string) {
	for _, name := range chains {
		c := nat.Chain(name)
		if c == nil {
			continue
		}
		for _, r := range c.Rules {
			if to := jumpOf(r); isOwn(to) && !has(wanted, to) {
				wanted[to] = struct{}{}
				keep(wanted, nat, []string{to})
			}
		}
	}
}

// base are the chains and jumps that all service ports need, as far as they are not
// there.
func (f *family) base(tables map[string]*xtables.Table) *text {
	t := newText()
	nat, filter := f.static()
	chains := slices.Clip(f.extra.Chains)
	for table, list := range map[string][]chain{"nat": nat, "filter": filter} {
		for _, c := range list {
			chains = append(chains, Chain{table, c.name, append(f.extra.before(table, c.name), c.rules...)})
		}
	}
	for _, c := range chains {
		if there := tables[c.Table].Chain(c.Name); there == nil || !slices.Equal(there.Rules, c.Rules) {
			t.table(c.Table).write(c.Name, c.Rules)
		}
	}
	for _, h := range f.hubs {
		if tables[h.table()].Chain(h.chain()) == nil {
			t.table(h.table()).write(h.chain(), h.tail)
			delete(h.stale, h.chain())
			h.made[h.chain()] = struct{}{}
			if len(h.chains()[h.chain()]) > len(h.tail) {
				h.stale[h.chain()] = struct{}{}
			}
		}
	}
	for name, table := range tables {
		if table.Chain(canaryChain) == nil {
			t.table(name).write(canaryChain, nil)
		}
	}
	f.jump(t, tables, append(jumps(f.loopback), f.extra.Jumps...))
	return t
}

// ensureCounters makes the counters again if somebody has deleted them: a rule that names one
// that is not there is refused. While a rule does, they cannot be deleted.
func (f *family) ensureCounters(ctx context.Context) {
	f.counting = f.counts
	if !f.counts {
		return
	}
	if err := ensureCounters(f.opts.Counters); err != nil {
		f.counting = false
		klog.FromContext(ctx).Error(err, "Rules do not count packets until the next full sync", "family", f.name)
	}
}

// jump has chains of the kernel's lead to ours.
func (f *family) jump(t *text, tables map[string]*xtables.Table, list []Jump) {
	type chainOf struct{ table, from string }
	wanted := map[chainOf][]string{}
	for _, j := range list {
		wanted[chainOf{j.Table, j.From}] = append(wanted[chainOf{j.Table, j.From}], j.Rule)
	}
	for at, rules := range wanted {
		var there []string
		if c := tables[at.table].Chain(at.from); c != nil {
			there = c.Rules
		} else {
			t.table(at.table).declare(at.from)
		}
		if inOrder(there, rules) {
			continue
		}
		for _, r := range slices.Backward(rules) {
			if slices.Contains(there, r) {
				t.table(at.table).delete(at.from, r)
			}
			t.table(at.table).insert(at.from, r)
		}
	}
}

// writeHubs writes the chains of hubs that are not as they should be.
func (f *family) writeHubs(ctx context.Context) error {
	t := newText()
	for _, h := range f.hubs {
		if len(h.stale) == 0 {
			continue
		}
		chains := h.chains()
		for name := range h.stale {
			t.table(h.table()).write(name, chains[name])
		}
	}
	if err := f.restore(ctx, t); err != nil {
		return err
	}
	for _, h := range f.hubs {
		if len(h.stale) > 0 {
			h.written()
		}
	}
	return nil
}

func (f *family) restore(ctx context.Context, t *text) error {
	input := t.bytes()
	if len(input) == 0 {
		return nil
	}
	klog.FromContext(ctx).V(5).Info("Restoring rules", "family", f.name, "bytes", len(input))
	f.watch.before()
	err := f.opts.Tools.Restore(ctx, f.name, input)
	f.watch.after(t.count(), err)
	if err != nil {
		if f.opts.Observer != nil {
			f.opts.Observer.RestoreFailed(f.name, f.whole)
		}
		return err
	}
	for name, part := range t.tables {
		f.wrote[name] += part.rules()
	}
	return nil
}

// tell tells how many rules there are, and how many were written just now.
func (f *family) tell() {
	if f.opts.Observer == nil {
		return
	}
	total := map[string]int{"nat": f.kernel.rules}
	nat, filter := f.static()
	for table, list := range map[string][]chain{"nat": nat, "filter": filter} {
		for _, c := range list {
			total[table] += len(c.rules)
		}
	}
	for _, h := range f.hubs {
		total[h.table()] += h.rules()
	}
	for table, n := range total {
		f.opts.Observer.Rules(f.name, table, f.wrote[table], n)
	}
}
