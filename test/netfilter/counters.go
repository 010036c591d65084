// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/tandem-proxy/tandem/kernel/nfacct"
)

// Counters are the named packet counters of a network namespace, like those of nfacct.Kernel.
type Counters struct {
	tables []*Tables

	mu      sync.Mutex // locked after that of tables
	packets map[string]uint64
}

// NewCounters makes an empty set of counters for rules of these tables. Tables without counters
// reject such rules, as a kernel does.
func NewCounters(tables ...*Tables) *Counters {
	c := &Counters{tables: tables, packets: map[string]uint64{}}
	for _, t := range tables {
		t.mu.Lock()
		t.counters = c
		t.mu.Unlock()
	}
	return c
}

// Ensure creates a counter unless it exists.
func (c *Counters) Ensure(name string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.packets[name] += 0
	return nil
}

// Packets returns the number of packets of a counter.
func (c *Counters) Packets(name string) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, ok := c.packets[name]
	if !ok {
		return 0, fmt.Errorf("read counter %s: %w", name, nfacct.ErrNotFound)
	}
	return n, nil
}

// Delete deletes a counter that no rule uses.
func (c *Counters) Delete(name string) error {
	if slices.ContainsFunc(c.tables, func(t *Tables) bool { return t.counts(name) }) {
		return fmt.Errorf("delete counter %s: %w", name, nfacct.ErrInUse)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.packets, name)
	return nil
}

func (c *Counters) count(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.packets[name]++
}

// counts reports whether a rule uses a counter.
func (t *Tables) counts(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, table := range t.tables {
		for _, c := range table.chains {
			for _, r := range c.rules {
				if slices.ContainsFunc(r.matches, func(m match) bool { n, ok := m.(*counter); return ok && n.name == name }) {
					return true
				}
			}
		}
	}
	return false
}

// find returns why a rule cannot use a counter; nil if it can.
func (t *Tables) find(name string) error {
	if t.counters == nil {
		return nfacct.ErrNotSupported
	}
	_, err := t.counters.Packets(name)
	return err
}

// counter is -m nfacct: it counts packets and always matches.
type counter struct{ name string }

func (m *counter) option(name string, not bool, w *words) (err error) {
	if name != "--nfacct-name" {
		return errNotMine
	}
	if m.name, err = w.value(name); len(m.name) > nfacct.MaxNameLen {
		err = fmt.Errorf("name %q is longer than %d characters", m.name, nfacct.MaxNameLen)
	}
	return errors.Join(noNot(not), err)
}

func (m *counter) finish(*rule) error {
	if m.name == "" {
		return errors.New("nfacct without --nfacct-name")
	}
	return nil
}

func (m *counter) matches(w *walk) bool {
	if !w.rehearsal {
		w.tables.counters.count(m.name)
	}
	return true
}

// String includes the trailing space that the tools print.
func (m *counter) String() string { return "-m nfacct --nfacct-name  " + m.name }
