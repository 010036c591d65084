// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"
	"fmt"

	"github.com/tandem-proxy/tandem/proxier/delta"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// mirror is what a map is to have of keys that several objects use: an entry is there while one of them does.
type mirror[K, V comparable] struct {
	table lbmap.SmallMap[K, V]
	users map[K]int
	delta *delta.Delta[K, V, V]
	// text says in errors what an entry is for.
	text func(K) string
}

func newMirror[K, V comparable](table lbmap.SmallMap[K, V], text func(K) string) mirror[K, V] {
	return mirror[K, V]{table: table, users: map[K]int{}, delta: delta.New[K, V, V](nil), text: text}
}

// load reads what a previous process wrote.
func (m *mirror[K, V]) load() error {
	if err := m.table.Dump(func(key K, value V) { m.delta.Adopt(key, value) }); err != nil {
		return fmt.Errorf("read what an earlier process left: %w", err)
	}
	return nil
}

// use adds n users of an entry. Its value is that of the newest one.
func (m *mirror[K, V]) use(key K, value V, n int) {
	after := m.users[key] + n
	if after == 0 {
		delete(m.users, key)
		m.delta.Drop(key)
		return
	}
	m.users[key] = after
	if n > 0 {
		m.delta.Want(key, value)
	}
}

// write applies pending changes to the map, and returns the number of writes. Failed changes are
// tried again by the next call.
func (m *mirror[K, V]) write() (writes int, err error) {
	var puts, deletes []K
	var values []V
	for key, item := range m.delta.Pending() {
		switch {
		case !item.Wanted():
			deletes = append(deletes, key)
		case item.There() && !item.Unsure() && item.Applied == item.Desired(): // a previous process wrote it
			m.delta.Done(key, item.Applied)
		default:
			puts, values = append(puts, key), append(values, item.Desired())
		}
	}
	// What goes makes room.
	n, err := m.each(deletes, func(from int) (int, error) { return m.table.DeleteAll(deletes[from:]) }, func(i int) { m.delta.Removed(deletes[i]) })
	k, failed := m.each(puts, func(from int) (int, error) { return m.table.PutAll(puts[from:], values[from:]) }, func(i int) { m.delta.Done(puts[i], values[i]) })
	return n + k, errors.Join(err, failed)
}

// each writes keys, and goes on behind one that fails. It returns how many were written, and the first error.
func (m *mirror[K, V]) each(keys []K, write func(from int) (int, error), done func(i int)) (writes int, first error) {
	for at := 0; at < len(keys); {
		n, err := write(at)
		for i := range n {
			done(at + i)
		}
		writes, at = writes+n, at+n
		if err == nil {
			continue
		}
		m.delta.Failed(keys[at], err)
		if first == nil { // the others mostly fail for the same reason
			first = fmt.Errorf("%s: %w", m.text(keys[at]), err)
		}
		at++
	}
	return writes, first
}
