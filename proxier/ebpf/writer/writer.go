// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"

	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/delta"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Writer writes decisions into the tables. Programs rely on the order of its writes:
//
//   - a frontend is written after all that it refers to, and removed before that;
//   - a backend set is written to slots that no program reads, then published by one
//     store; the slots that it replaces are not reused while programs may read them;
//   - a service's name is written before its first frontend and cleared after its last, so
//     that the successor of a process that died can tell what belongs to which service.
//
// What is desired of service ports and what the tables have of them is in ports. A service
// port whose frontends could not be written has failed there; one that does not fit is refused.
type Writer struct {
	tables    *lbmap.Tables
	report    func(proxier.Problem)
	disrupted func(proxier.Disruption) // see Options
	clock     clock.PassiveClock
	grace     grace
	guard     func() error // see Options
	forget    func(service uint32) error

	// mu guards everything below and the stores to the tables against those
	// who read them beside Sync.
	mu       sync.RWMutex
	services *ids
	backends *ids
	slots    *extents
	ports    *delta.Delta[uint32, *proxier.Decision, port] // by proxier.Decision.Index
	gone     []port                                        // to be removed; others may have their indexes
	orphans  []lbmap.FrontendKey                           // frontends that could not be deleted
	adopted  map[string]port                               // as the previous process left them
	// room says that capacity was released since the refused were tried.
	room          bool
	reach         lbmap.Sizes // see SetReach
	most          lbmap.Sizes // of all that reach was
	short         bool        // something was refused that fits into tables within reach
	hasAffinity   bool        // a service port had session affinity
	usedFrontends int
	usedRanges    int
	rules         *proxier.NodeRules // what the tables say of this node; nil before the first
	locals        map[[4]uint32]uint32
	echo          echoAddrs
	usedPorts     usedPorts
	direct        direct
	writes        uint64 // stores and map operations, ever

	frontendLists lists[lbmap.FrontendEntry]
	idLists       lists[uint32]

	queue queue
	stale bool // the current sync removed a UDP backend
}

// port is one service port in the tables.
type port struct {
	id        uint32 // service id; 0 for none
	described description
	frontends []lbmap.FrontendEntry
	backends  []uint32 // ids, sorted by address
	ranges    []lbmap.RangeKey
}

// queue collects frontends to be written in one call.
type queue struct {
	keys   []lbmap.FrontendKey
	values []lbmap.FrontendValue
	owners []uint32
}

// queueLength bounds how long the first frontends of a large sync wait for the
// last ones of their batch.
const queueLength = 4096

// Options are what a writer works with.
type Options struct {
	Sizes lbmap.Sizes
	Clock clock.PassiveClock
	// Wait returns when every program that runs at the call has come to its end.
	Wait func()
	// Guard is called before the first frontend is written that only the program at
	// sockets' egress can check; nil for none.
	Guard func() error
	// Forget removes what programs noted of a service port that is gone, by its id, before that is given to another one; nil
	// for nothing.
	Forget func(service uint32) error
	// Report is told what does not fit.
	Report func(proxier.Problem)
	// Disrupted is told of changes of Maglev tables; it may be nil.
	Disrupted func(proxier.Disruption)
}

// New makes a Writer for tables that are new (see Format) or were left by a process (see Load).
func New(t *lbmap.Tables, o Options) *Writer {
	if o.Guard == nil {
		o.Guard = func() error { return nil }
	}
	if o.Forget == nil {
		o.Forget = func(uint32) error { return nil }
	}
	s, c, g := o.Sizes, o.Clock, grace(o.Wait)
	return &Writer{
		tables: t, report: o.Report, disrupted: o.Disrupted, clock: c, grace: g, guard: o.Guard, forget: o.Forget,
		services: newIDs(1, s.Services, c, g), // id 0 stands for none
		backends: newIDs(1, s.Backends, c, g),
		slots:    newExtents(s.Slots, c, g),
		echo:     newEchoAddrs(t.VIPs), usedPorts: newUsedPorts(t.Ports), direct: newDirect(t.Targets),
		ports: delta.NewIndexed[*proxier.Decision, port](),
	}
}

// Format marks empty tables as those of this version. Generations of backends start with the given
// one, which must not have been used in older tables.
func (w *Writer) Format(generation uint32) {
	w.tables.Meta.Generation = generation
	w.tables.Meta.Layout = lbmap.LayoutVersion
	w.tables.Meta.Magic = lbmap.LayoutMagic
}

// Close unmaps the tables. No method may be called afterwards.
func (w *Writer) Close() { w.tables.Unmap() }

// Sync writes the update into the tables. It reports whether UDP backends were removed, whose sockets
// must be closed.
func (w *Writer) Sync(u proxier.Update) (stale bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stale = false
	before := w.writes

	err = w.syncNode(u)
	todo := w.plan(u)
	err = errors.Join(err, w.retire(todo))
	for i, index := range todo {
		err = errors.Join(err, w.apply(index))
		// The first service port is written at once: a starting node waits for it.
		if i == 0 || len(w.queue.keys) >= queueLength {
			err = errors.Join(err, w.flush())
		}
	}
	err = errors.Join(err, w.flush(), w.deleteOrphans(todo))
	if u.Full {
		err = errors.Join(err, w.prune())
	}
	if w.room && w.ports.CountRefused() > 0 {
		again := keysOf(w.ports.AllRefused())
		w.ports.Retry()
		for _, index := range again {
			err = errors.Join(err, w.apply(index))
		}
		err = errors.Join(err, w.flush(), w.deleteOrphans(again))
	}
	w.room = false
	if len(w.adopted) == 0 {
		n, verr := w.echo.write()
		w.direct.update(w.clock.Now())
		m, terr := w.direct.targets.write()
		w.writes += uint64(n + m + w.usedPorts.write())
		err = errors.Join(err, verr, terr)
	}
	w.gauges(w.writes != before)
	return w.stale, err
}

// plan records the desired state, and returns the indexes of the service ports to write.
func (w *Writer) plan(u proxier.Update) []uint32 {
	going := 0
	for i := range u.Changes {
		if u.Changes[i].New == nil {
			going++
		}
	}
	w.gone = slices.Grow(w.gone, going)
	w.ports.Grow(len(u.Changes))
	for i := range u.Changes {
		c := &u.Changes[i]
		if c.New == nil {
			w.drop(c.Index())
			continue
		}
		w.ports.Want(c.Index(), c.New)
		if u.Full {
			w.ports.Touch(c.Index()) // to be compared with the tables
		}
	}
	if w.ports.CountRefused() > 0 {
		for index, item := range w.ports.AllRefused() {
			if item.Unsure() { // addresses of others wait for it
				w.ports.Touch(index)
			}
		}
	}
	todo := make([]uint32, 0, len(u.Changes)-going)
	for index := range w.ports.Pending() {
		todo = append(todo, index)
	}
	return todo
}

// drop moves a service port to those that are gone. Its index may be reused before all of its state is
// removed.
func (w *Writer) drop(index uint32) {
	item := w.ports.Get(index)
	if item == nil {
		return
	}
	if p := &item.Applied; p.id != 0 {
		w.gone = append(w.gone, *p)
		w.note(p.frontends, nil)
	}
	w.direct.set(index, nil, false)
	w.ports.Removed(index)
	w.ports.Drop(index)
}

// apply writes one service port. If it does not fit, it is reported and waits for capacity, and that is
// no error: trying again would not help.
func (w *Writer) apply(index uint32) error {
	err := w.program(index)
	if err == nil {
		return nil
	}
	if why := refusal(nil); errors.As(err, &why) {
		w.refuse(index, why)
		return nil
	}
	return err
}

// enqueue queues the port's frontends for the next flush. Those it no longer has are deleted after all
// writes. With again, frontends that exist already are written, too.
func (w *Writer) enqueue(index uint32, p *port, list []lbmap.FrontendEntry, fresh int, again bool) {
	if !again && len(list) == len(p.frontends) && (len(list) == 0 || &list[0] == &p.frontends[0]) {
		return
	}
	for _, f := range p.frontends {
		if !hasKey(list, f.Key) {
			w.orphans = append(w.orphans, f.Key)
		}
	}
	for _, f := range list {
		if !again && slices.Contains(p.frontends, f) {
			continue
		}
		w.queue.keys = append(w.queue.keys, f.Key)
		w.queue.values = append(w.queue.values, f.Value)
		w.queue.owners = append(w.queue.owners, index)
	}
	w.usedFrontends += fresh
	w.note(p.frontends, list)
	p.frontends = list
}

// note is called with the frontends of a service port before they change.
func (w *Writer) note(before, after []lbmap.FrontendEntry) {
	w.echo.replace(before, after)
	w.usedPorts.replace(before, after)
}

// flush writes the queued frontends.
func (w *Writer) flush() error {
	q := &w.queue
	var errs []error
	for keys, values, owners := q.keys, q.values, q.owners; len(keys) > 0; {
		n, err := w.tables.Frontends.Update(keys, values)
		w.writes += uint64(n)
		if err != nil {
			// One bad entry holds up no other: name it and go on behind it.
			err = fmt.Errorf("write frontend %s of %s: %w", keys[n].String(), w.ports.Get(owners[n]).Desired().Name, err)
			errs = append(errs, err)
			w.ports.Failed(owners[n], err)
			n++
		}
		keys, values, owners = keys[n:], values[n:], owners[n:]
	}
	q.keys, q.values, q.owners = q.keys[:0], q.values[:0], q.owners[:0]
	return errors.Join(errs...)
}

func keysOf[V any](all iter.Seq2[uint32, V]) (keys []uint32) {
	for k := range all {
		keys = append(keys, k)
	}
	return keys
}
