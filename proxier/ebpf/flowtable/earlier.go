// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"errors"
	"fmt"
	"sync/atomic"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// earlier are the flows of earlier programs, which may still use them.
type earlier interface {
	// count is the number of ids.
	count() int
	life(id uint32) uint64
	flags(id uint32) uint32
	// read copies a flow, of which the life was read before, and the progress of both directions.
	read(id uint32) (lbmap.Flow, [2]progress)
	// find returns the id of the flow that a request belongs to.
	find(request *lbmap.FlowKey) (id uint32, ok bool, err error)
	// ring are the young flows, and born is the number of those there were.
	ring() []uint64
	born() uint64
	// is reports whether they are in this map.
	is(flows *ciliumebpf.Map) (bool, error)
	close()
}

// progress is what an entry has seen of its direction.
type progress struct {
	Traffic
	acked uint32 // as Acked of lbmap.FlowEntry; 0 if it is not known
}

// openEarlier opens the flows in these maps, or returns nil if their layout is not known. The maps
// may be closed afterwards.
func openEarlier(maps lbmap.Maps) (earlier, error) {
	switch {
	case haveLayout[lbmap.Flow, lbmap.FlowEntry](maps, "tdm_flow_entry") && maps["tdm_flow_free"] != nil && maps["tdm_flow_filter"] != nil:
		return openEarlierTable(maps)
	case haveLayout[flow4, uint64](maps, "tdm_flow_key"):
		return openLayout4(maps)
	}
	return nil, nil
}

// haveLayout reports whether the maps have flows of type F, and elements of type E in another map.
func haveLayout[F, E any](maps lbmap.Maps, name string) bool {
	flows, others := maps["tdm_flow"], maps[name]
	return flows != nil && others != nil && maps["tdm_flow_young"] != nil && maps["tdm_flow_count"] != nil &&
		flows.ValueSize() == sizeOf[F]() && others.ValueSize() == sizeOf[E]()
}

// earlierTable are flows of the present layout.
type earlierTable struct {
	table  *Table
	index  *Index
	flows  []lbmap.Flow
	places []uint64
	memory [][]byte
}

func openEarlierTable(maps lbmap.Maps) (*earlierTable, error) {
	e := &earlierTable{}
	var err error
	if e.table, err = OpenClone(maps); err != nil {
		return nil, err
	}
	if e.index, err = OpenIndex(maps); err != nil {
		e.table.Release()
		return nil, err
	}
	if err := errors.Join(mapTo(&e.memory, &e.flows, maps["tdm_flow"]), mapTo(&e.memory, &e.places, maps["tdm_flow_young"])); err != nil {
		e.close()
		return nil, err
	}
	return e, nil
}

func (e *earlierTable) count() int             { return len(e.flows) }
func (e *earlierTable) life(id uint32) uint64  { return atomic.LoadUint64(&e.flows[id].Life) }
func (e *earlierTable) flags(id uint32) uint32 { return uint32(atomic.LoadUint64(&e.flows[id].Flags)) }
func (e *earlierTable) ring() []uint64         { return e.places }
func (e *earlierTable) born() uint64           { return e.table.Count(lbmap.FlowBorn) }

func (e *earlierTable) read(id uint32) (f lbmap.Flow, of [2]progress) {
	f = e.flows[id]
	for way, u := range usesOf(id, &f) {
		if !e.index.has(u.place) {
			continue
		}
		if at := e.index.at(u.place); at.Id == id && at.Generation == u.generation {
			of[way] = progress{Traffic{Packets: at.Packets, Bytes: at.Bytes}, at.Acked}
		}
	}
	return f, of
}

func (e *earlierTable) find(request *lbmap.FlowKey) (id uint32, ok bool, err error) {
	if at := e.index.Find(request); at != nil {
		return at.Id, true, nil
	}
	return 0, false, nil
}

func (e *earlierTable) is(flows *ciliumebpf.Map) (bool, error) {
	return lbmap.SameMap(e.table.Flows, flows)
}

func (e *earlierTable) close() {
	unmap(&e.memory)
	e.index.Close()
	e.table.Release()
}

// mapTo maps the memory of a map, and adds it to what unmap has to unmap.
func mapTo[T any](mapped *[][]byte, list *[]T, m *ciliumebpf.Map) error {
	view, memory, err := lbmap.Memory[T](m)
	if err != nil {
		return err
	}
	*list, *mapped = view, append(*mapped, memory)
	return nil
}

func unmap(mapped *[][]byte) {
	for _, b := range *mapped {
		_ = unix.Munmap(b) // fails only for what was never mapped
	}
	*mapped = nil
}

// OpenClone opens a table that lives on when these maps are closed.
func OpenClone(maps lbmap.Maps) (*Table, error) {
	t, err := Open(maps)
	if err != nil {
		return nil, err
	}
	t.Flows, err = t.Flows.Clone()
	entries, entriesErr := t.Entries.Clone()
	t.Entries = entries
	if err = errors.Join(err, entriesErr); err != nil {
		t.Release()
		return nil, fmt.Errorf("open the maps of flows again: %w", err)
	}
	return t, nil
}

// Release closes what OpenClone opened.
func (t *Table) Release() {
	t.Flows.Close()
	t.Entries.Close()
	t.Close()
}
