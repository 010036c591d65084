// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
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
// Service ports are kept densely, by Decision.Index: with tens of thousands of them, a record
// per key as in package delta would cost memory and time in each sync.
type Writer struct {
	tables *lbmap.Tables
	report func(proxier.Problem)
	clock  clock.PassiveClock
	grace  grace
	guard  func() error // see Options

	// mu guards everything below and the stores to the tables against those
	// who read them beside Sync.
	mu       sync.RWMutex
	services *ids
	backends *ids
	slots    *extents
	ports    []port                   // by proxier.Decision.Index
	gone     []port                   // to be removed from the tables
	retry    map[uint32]struct{}      // indexes whose frontends could not be written
	unplaced map[uint32]lbmap.Refusal // indexes that are not fully programmed
	orphans  []lbmap.FrontendKey      // frontends that could not be deleted
	adopted  map[string]adoptedService
	// room says that capacity was released since the unplaced were tried.
	room          bool
	usedFrontends int
	usedRanges    int
	rules         *proxier.NodeRules // what the tables say of this node; nil before the first
	locals        map[[4]uint32]uint32
	echo          echoAddrs
	writes        uint64 // stores and map operations, ever

	queue queue
	stale bool // the current sync removed a UDP backend
}

// port is one service port in the tables.
type port struct {
	id        uint32 // service id; 0 for none
	want      *proxier.Decision
	frontends []lbmap.FrontendEntry
	backends  []uint32 // ids, sorted by address
	ranges    []lbmap.RangeKey
	described description
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
	// Report is told what does not fit.
	Report func(proxier.Problem)
}

// New makes a Writer for tables that are new (see Format) or were left by a process (see Load).
func New(t *lbmap.Tables, o Options) *Writer {
	if o.Guard == nil {
		o.Guard = func() error { return nil }
	}
	s, c, g := o.Sizes, o.Clock, grace(o.Wait)
	return &Writer{
		tables: t, report: o.Report, clock: c, grace: g, guard: o.Guard,
		services: newIDs(1, s.Services, c, g), // id 0 stands for none
		backends: newIDs(1, s.Backends, c, g),
		slots:    newExtents(s.Slots, c, g),
		echo:     newEchoAddrs(t.VIPs),
		retry:    map[uint32]struct{}{},
		unplaced: map[uint32]lbmap.Refusal{},
	}
}

// Format marks empty tables as those of this version. Generations of backends begin with
// that one: it is not to be one that older tables gave out.
func (w *Writer) Format(generation uint32) {
	w.tables.Meta.Generation = generation
	w.tables.Meta.Layout = lbmap.LayoutVersion
	w.tables.Meta.Magic = lbmap.LayoutMagic
}

// Close unmaps the tables. No method may be called afterwards.
func (w *Writer) Close() { w.tables.Unmap() }

// Sync writes the update into the tables. It says whether UDP backends serve no
// longer, so that flows to them have to be closed.
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
		// The first one is what nodes start by: it does not wait.
		if i == 0 || len(w.queue.keys) >= queueLength {
			err = errors.Join(err, w.flush())
		}
	}
	err = errors.Join(err, w.flush(), w.deleteOrphans(todo))
	if u.Full {
		err = errors.Join(err, w.prune())
	}
	if w.room && len(w.unplaced) > 0 {
		again := sortedKeys(w.unplaced)
		for _, index := range again {
			err = errors.Join(err, w.apply(index))
		}
		err = errors.Join(err, w.flush(), w.deleteOrphans(again))
	}
	w.room = false
	if len(w.adopted) == 0 {
		n, verr := w.echo.write()
		w.writes += uint64(n)
		err = errors.Join(err, verr)
	}
	w.gauges(w.writes != before)
	return w.stale, err
}

// plan records what is wanted and returns the indexes to bring about.
func (w *Writer) plan(u proxier.Update) []uint32 {
	most, going := uint32(0), 0
	for i := range u.Changes {
		most = max(most, u.Changes[i].Index()+1)
		if u.Changes[i].New == nil {
			going++
		}
	}
	if n := int(most) - len(w.ports); n > 0 {
		w.ports = append(w.ports, make([]port, n)...)
	}
	w.gone = slices.Grow(w.gone, going)
	todo := make([]uint32, 0, len(u.Changes)-going)
	for i := range u.Changes {
		c := &u.Changes[i]
		index := c.Index()
		p := &w.ports[index]
		if c.New == nil {
			if p.id != 0 {
				w.gone = append(w.gone, *p)
				w.echo.replace(p.frontends, nil)
			}
			*p = port{}
			delete(w.retry, index)
			delete(w.unplaced, index)
			continue
		}
		p.want = c.New
		todo = append(todo, index)
	}
	if len(w.retry) > 0 {
		planned := make(map[uint32]struct{}, len(todo))
		for _, index := range todo {
			planned[index] = struct{}{}
		}
		for _, index := range sortedKeys(w.retry) {
			if _, ok := planned[index]; !ok {
				todo = append(todo, index)
			}
		}
	}
	return todo
}

// apply brings one service port about. What does not fit is reported and kept
// waiting, and is no error: trying again would not help.
func (w *Writer) apply(index uint32) error {
	err := w.program(index)
	if why := refusal(nil); errors.As(err, &why) {
		w.refuse(index, why)
		return nil
	}
	if err == nil && len(w.unplaced) > 0 {
		delete(w.unplaced, index)
	}
	return err
}

// enqueue has the port's frontends written with the next flush, and those it no
// longer has deleted when all are written.
func (w *Writer) enqueue(index uint32, p *port, list []lbmap.FrontendEntry, fresh int) {
	_, again := w.retry[index]
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
	w.echo.replace(p.frontends, list)
	p.frontends = list
	delete(w.retry, index)
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
			errs = append(errs, fmt.Errorf("write frontend %s of %s: %w", keys[n].String(), w.ports[owners[n]].want.Name, err))
			w.retry[owners[n]] = struct{}{}
			n++
		}
		keys, values, owners = keys[n:], values[n:], owners[n:]
	}
	q.keys, q.values, q.owners = q.keys[:0], q.values[:0], q.owners[:0]
	return errors.Join(errs...)
}

func sortedKeys[V any](m map[uint32]V) []uint32 {
	keys := make([]uint32, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
