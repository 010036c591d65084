// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"cmp"
	"context"
	"reflect"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/delta"
)

// family writes the rules of one IP family.
type family struct {
	name     proxier.Family
	opts     *Options
	watch    *watch
	renderer *renderer
	loopback bool // NodePorts are served at loopback addresses
	extra    Extra
	// counts says that rules can count, and counting that the counters exist.
	counts, counting bool
	ports            *ports
	shared           [sharedCount]*sharedChain
	// kernel has the chains of service ports that exist.
	kernel chainStamps
	// referenced are chains of the proxy that foreign rules lead to. They cannot be deleted,
	// and are emptied instead.
	referenced map[string]struct{}
	// uses counts the service ports that have a chain. A deleted one and its successor may
	// both have it for a while.
	uses map[string]int
	// rendered are the rules of pending service ports, during a full sync.
	rendered map[uint32]portRules
	whole    bool // the last full sync succeeded
	tracked  bool // conntrack has entries for the connections of this host
	// wrote counts the rules that this sync has written, by table.
	wrote map[string]int

	// For audits: sizes of the tables when they were last read or written, where there is no
	// generation; else the uses of important chains, and the generation at which they were
	// noted; the chains that an audit has written; when the next one may be; when rules were
	// repaired.
	sizes      string
	noted      string
	usesAt     uint32
	restored   map[string]struct{}
	auditAfter time.Time
	repairs    []time.Time
}

// ports are the service ports, by Decision.Index. They are pending in the order in which they
// should become visible.
type ports = delta.Delta[uint32, *proxier.Decision, portState]

// portState is what the kernel has of a service port.
type portState struct {
	chains  []string
	entries []entry
	// reported is the decision whose refusal was reported.
	reported *proxier.Decision
}

func newFamily(name proxier.Family, opts *Options, w *watch) *family {
	f := &family{
		name: name, opts: opts, watch: w, ports: delta.New[uint32, *proxier.Decision, portState](cmp.Compare[uint32]),
		kernel: newChainStamps(), referenced: map[string]struct{}{}, uses: map[string]int{}, wrote: map[string]int{},
	}
	f.renderer = newRenderer(name, &proxier.NodeRules{}, true)
	for s := range sharedCount {
		f.shared[s] = newSharedChain(s, name)
	}
	return f
}

// sync writes an update. A full one compares everything with the kernel, unless nothing else
// has changed rules there. So does any other whose changes affect everything.
func (f *family) sync(ctx context.Context, u proxier.Update) error {
	clear(f.wrote)
	defer f.observe()
	changed := f.setNodeRules(u.NodeRules)
	f.setDesired(u)
	if changed || !f.whole || u.Full && !f.watch.unchanged(f.name) ||
		slices.ContainsFunc(f.shared[:], (*sharedChain).hasOutgrownShape) || u.Full && f.chooseComments() {
		return f.syncAll(ctx)
	}
	if u.Full {
		f.ports.Retry()
	}
	if err := f.writePending(ctx, false); err != nil {
		return err
	}
	return f.writeShared(ctx)
}

// syncAll compares everything with the kernel, and writes what differs.
func (f *family) syncAll(ctx context.Context) error {
	f.whole = false
	f.ensureCounters(ctx)
	f.watch.begin(f.name)
	f.sizes, _ = f.readSizes()
	tables, err := f.opts.Tools.SaveAll(ctx, f.name, tableOrder...)
	if err != nil {
		return err
	}
	f.chooseComments()
	adopting := f.compare(tables)
	defer func() { f.rendered = nil }()
	if err := f.restore(ctx, f.base(tables)); err != nil {
		return err
	}
	f.trackSockets(ctx)
	if !adopting {
		if err := f.writeShared(ctx); err != nil {
			return err
		}
	}
	// Shared chains that were held are written when no service port is pending any more.
	if err := f.writePending(ctx, adopting); err != nil {
		return err
	}
	for _, s := range f.shared {
		s.unlinkEmpty()
	}
	if err := f.writeShared(ctx); err != nil {
		return err
	}
	if err := f.deleteUnused(ctx, tables); err != nil {
		return err
	}
	for _, s := range f.shared {
		s.lastFit = s.fitsSplit(s.size)
	}
	f.whole = true
	return nil
}

// trackSockets is called between the rules of base, which make conntrack see packets if nothing else did, and the first rule that
// has any masqueraded: no masqueraded connection gets the source port of one of this host's sockets. It does so once, in each
// process: the one before may have ended between the two.
func (f *family) trackSockets(ctx context.Context) {
	if f.opts.TrackSockets == nil || f.tracked {
		return
	}
	created, err := f.opts.TrackSockets(ctx, f.name)
	f.tracked = err == nil
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot create conntrack entries for all connections of this host; an idle one breaks if a masqueraded connection gets its source port", "family", f.name)
	} else if created > 0 {
		klog.FromContext(ctx).V(2).Info("Created conntrack entries for connections of this host", "family", f.name, "created", created)
	}
}

// setNodeRules takes over the rules of the node, and reports whether they change any rule in the
// kernel. Most addresses that come or go are in none.
func (f *family) setNodeRules(rules *proxier.NodeRules) (changed bool) {
	if rules == nil {
		return false
	}
	// IPv6 has no route_localnet.
	loopback := f.name == proxier.IPv4 && len(rules.Loopback[f.name]) > 0
	renderer := newRenderer(f.name, rules, f.renderer.comments)
	changed = loopback != f.loopback || *renderer != *f.renderer
	f.loopback, f.renderer = loopback, renderer
	if f.opts.Extra != nil {
		extra := f.opts.Extra(f.name, rules)
		changed = changed || !reflect.DeepEqual(extra, f.extra)
		f.extra = extra
	}
	for name, tail := range map[sharedName][]string{
		servicesNAT:    nodePorts(f.name, rules, nodePortsChain, ""),
		servicesFilter: {toExternal},
		// After the rules for single addresses and ports.
		firewallFilter:     append(nodePorts(f.name, rules, externalNodePortsChain, notTranslated), renderer.unserved(rules)...),
		healthChecksFilter: nil,
	} {
		s := f.shared[name]
		tail = append(f.extra.before(s.table(), s.root()), tail...)
		changed = changed || !slices.Equal(tail, s.tail)
		s.tail = tail
	}
	return changed
}

// setDesired takes over the decisions of an update.
func (f *family) setDesired(u proxier.Update) {
	f.ports.Begin()
	for i := range u.Changes {
		if c := &u.Changes[i]; c.New != nil {
			f.ports.Want(c.Index(), c.New)
		} else {
			f.ports.Drop(c.Index())
		}
	}
	if u.Full {
		f.ports.DropOthers()
	}
}

// manyEndpoints is where rules lose their comments, as upstream's do.
const manyEndpoints = 1000

// chooseComments decides by the number of endpoints, with hysteresis, whether rules have
// comments, and reports whether that has changed.
func (f *family) chooseComments() bool {
	before := f.renderer.comments
	n := 0
	for _, p := range f.ports.All() {
		if p.Wanted() {
			n += len(p.Desired().Backends)
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

// writeShared writes the stale chains of shared ones.
func (f *family) writeShared(ctx context.Context) error {
	t := newText()
	for _, s := range f.shared {
		if len(s.stale) == 0 {
			continue
		}
		chains := s.chains()
		for name := range s.stale {
			t.table(s.table()).write(name, chains[name])
		}
	}
	if err := f.restore(ctx, t); err != nil {
		return err
	}
	for _, s := range f.shared {
		if len(s.stale) > 0 {
			s.written()
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
	f.sizes, _ = f.readSizes()
	if err != nil {
		if f.opts.Observer != nil {
			f.opts.Observer.RestoreFailed(f.name, f.whole)
		}
		return err
	}
	for name, part := range t.tables {
		f.wrote[name] += part.rules()
	}
	f.noteRestored(t)
	return nil
}

// observe reports how many rules exist, and how many this sync has written.
func (f *family) observe() {
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
	for _, s := range f.shared {
		total[s.table()] += s.rules()
	}
	for table, n := range total {
		f.opts.Observer.Rules(f.name, table, f.wrote[table], n)
	}
}
