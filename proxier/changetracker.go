// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"slices"
	"sort"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// ChangeTracker keeps, for each Service, the newest state of it and of its
// EndpointSlices, and which Services changed since the table last took them.
// Repeated changes collapse, and a change back to the taken state vanishes.
// It is safe for concurrent use.
type ChangeTracker struct {
	nodeName string
	started  time.Time
	report   func(Problem)

	mu      sync.Mutex
	entries map[types.NamespacedName]*entry
	dirty   []*entry
	total   uint64

	zonesMu sync.Mutex
	zones   map[string]*[]string
}

// entry is one namespace and name: a Service, its slices, or both.
type entry struct {
	name    types.NamespacedName
	dirty   bool
	trigger [Families]int64 // oldest last-change-trigger-time not handed over yet, as in Change

	service *Service         // nil: none
	slices  []*EndpointSlice // sorted by name; the list is never changed in place

	oneSlice [1]*EndpointSlice // backs slices of the usual Service

	// What the table decided about it, as indexes, and of what. The table alone
	// changes these, in the goroutine that also takes the changes.
	ports   []uint32
	onePort [1]uint32
	decided struct {
		service *Service
		slices  []*EndpointSlice
	}
}

// Change is the newest truth about one Service. It is immutable.
type Change struct {
	Service *Service // nil: there is none (any more)
	Slices  []*EndpointSlice
	// Trigger is when the cluster saw what is changing in a family, in nanoseconds since 1970; 0 if unknown.
	Trigger [Families]int64

	entry *entry
}

// Name of the Service.
func (c *Change) Name() types.NamespacedName { return c.entry.name }

// NewChangeTracker makes a tracker for the node of that name. started is when
// the process began; older trigger times say nothing about its speed.
func NewChangeTracker(nodeName string, started time.Time, report Reporter) *ChangeTracker {
	t := &ChangeTracker{
		nodeName: nodeName, started: started, report: func(Problem) {},
		entries: map[types.NamespacedName]*entry{}, zones: map[string]*[]string{},
	}
	if report != nil {
		t.report = report.Report
	}
	return t
}

// Pending reports whether anything waits to be taken.
func (t *ChangeTracker) Pending() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.dirty) > 0
}

// Counts returns how many Services have changes to be taken, and how many
// changes there ever were.
func (t *ChangeTracker) Counts() (pending int, total uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.dirty), t.total
}

// Take hands over what changed since the last call, each exactly once. The
// same goroutine has to have a Table apply it before it takes more.
func (t *ChangeTracker) Take() []Change {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.take(t.dirty, false)
}

// TakeAll hands over everything, changed or not, sorted by name.
func (t *ChangeTracker) TakeAll() []Change {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]*entry, 0, len(t.entries))
	for _, e := range t.entries {
		all = append(all, e)
	}
	sort.Slice(all, func(i, j int) bool {
		a, b := all[i].name, all[j].name
		return a.Namespace < b.Namespace || a.Namespace == b.Namespace && a.Name < b.Name
	})
	return t.take(all, true)
}

func (t *ChangeTracker) take(from []*entry, all bool) []Change {
	changes := make([]Change, 0, len(from))
	for _, e := range from {
		e.dirty = false
		if all || !e.asDecided() {
			changes = append(changes, Change{Service: e.service, Slices: e.slices, Trigger: e.trigger, entry: e})
		}
		e.trigger = [Families]int64{}
		if e.service == nil && len(e.slices) == 0 {
			delete(t.entries, e.name)
		}
	}
	clear(t.dirty)
	t.dirty = t.dirty[:0]
	if cap(t.dirty) > 4096 {
		t.dirty = nil
	}
	return changes
}

// asDecided reports whether the entry is unchanged since the table last took it.
func (e *entry) asDecided() bool { return e.is(e.decided.service, e.decided.slices) }

// is reports whether the entry has this Service and these slices.
func (e *entry) is(service *Service, slices []*EndpointSlice) bool {
	if !e.service.equal(service) || len(e.slices) != len(slices) {
		return false
	}
	for i := range slices {
		if !e.slices[i].equal(slices[i]) {
			return false
		}
	}
	return true
}

func (e *entry) find(slice string) (int, bool) {
	i := sort.Search(len(e.slices), func(i int) bool { return e.slices[i].Name >= slice })
	return i, i < len(e.slices) && e.slices[i].Name == slice
}

func (t *ChangeTracker) add(name types.NamespacedName) *entry {
	e := &entry{name: name}
	t.entries[name] = e
	return e
}

func (t *ChangeTracker) mark(e *entry) bool {
	t.total++
	if !e.dirty {
		e.dirty = true
		if len(t.dirty) == cap(t.dirty) {
			t.dirty = slices.Grow(t.dirty, max(8, len(t.dirty))) // append is more frugal, and slower for it
		}
		t.dirty = append(t.dirty, e)
	}
	return true
}
