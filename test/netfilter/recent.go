// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

// hostBits are the bits of an address.
var hostBits = [proxier.Families]int{32, 128}

// listLength is how many addresses the kernel keeps in a list by default. When it is full, the
// least recently seen address is evicted.
const listLength = 100

// recentList is a list of -m recent, in the order in which addresses were last set.
type recentList []sighting

type sighting struct {
	addr bits128
	at   time.Time
}

// recent is -m recent: it checks whether the source was seen, or records it.
type recent struct {
	name       string
	mask       bits128
	set, check bool
	seconds    int64
	reap, not  bool
	family     proxier.Family
}

func (m *recent) option(name string, not bool, w *words) error {
	switch name {
	case "--set", "--rcheck":
		m.set, m.check, m.not = m.set || name == "--set", m.check || name == "--rcheck", not
		return nil
	case "--reap":
		m.reap = true
		return noNot(not)
	case "--rsource":
		return noNot(not)
	case "--name", "--seconds", "--mask":
	default:
		return errNotMine
	}
	value, err := w.value(name)
	if err != nil {
		return err
	}
	switch name {
	case "--name":
		m.name = value
		err = checkListName(value)
	case "--seconds":
		if m.seconds, err = strconv.ParseInt(value, 10, 32); err == nil && m.seconds < 1 {
			err = fmt.Errorf("%s seconds", value)
		}
	case "--mask":
		var a netip.Addr
		if a, err = netip.ParseAddr(value); err == nil && proxier.FamilyOf(a) != m.family {
			err = fmt.Errorf("mask %q", value)
		}
		if err == nil {
			m.mask = wordsOf(a).and(ones(m.family, hostBits[m.family]))
		}
	}
	return errors.Join(noNot(not), err)
}

// listNameLength is the maximum length of a list's name.
const listNameLength = 199

func checkListName(name string) error {
	if name == "" || name[0] == '.' || len(name) > listNameLength {
		return fmt.Errorf("list name %q", name)
	}
	return nil
}

func (m *recent) finish(*rule) error {
	switch {
	case m.set == m.check:
		return errors.New("recent takes one of --set and --rcheck")
	case m.reap && m.seconds == 0:
		return errors.New("--reap without --seconds")
	case m.set && m.seconds != 0:
		return errors.New("--seconds with --set")
	}
	return nil
}

func (m *recent) String() string {
	text := "-m recent " + negated(m.not)
	if m.set {
		text += "--set"
	} else {
		text += "--rcheck"
	}
	if m.seconds != 0 {
		text += fmt.Sprintf(" --seconds %d", m.seconds)
	}
	if m.reap {
		text += " --reap"
	}
	return text + fmt.Sprintf(" --name %s --mask %s --rsource", m.name, addrText(m.mask, m.family))
}

func (m *recent) matches(w *walk) bool {
	from, now := w.src.and(m.mask), w.tables.Now()
	list := w.tables.recent[m.name]
	if m.set {
		if !w.rehearsal {
			w.tables.recent[m.name] = list.note(from, now)
		}
		return !m.not
	}
	i := list.find(from)
	if i < 0 {
		return m.not
	}
	limit := now.Add(-time.Duration(m.seconds) * time.Second)
	seen := m.seconds == 0 || !list[i].at.Before(limit)
	// The kernel also removes one address at a time.
	if m.reap && !w.rehearsal && list[0].at.Before(limit) {
		w.tables.recent[m.name] = list[1:]
	}
	return seen != m.not
}

// find returns the index of the address, or a negative number.
func (l recentList) find(addr bits128) int {
	return slices.IndexFunc(l, func(s sighting) bool { return s.addr == addr })
}

func (l recentList) note(addr bits128, now time.Time) recentList {
	if i := l.find(addr); i >= 0 {
		l = slices.Delete(l, i, i+1)
	} else if len(l) == listLength {
		l = l[1:]
	}
	return append(l, sighting{addr, now})
}

// forgetLists deletes lists that no rule uses any more, as the kernel does.
func (t *Tables) forgetLists() {
	if len(t.recent) == 0 {
		return
	}
	named := map[string]bool{}
	for _, table := range t.tables {
		for _, c := range table.chains {
			for _, r := range c.rules {
				for _, m := range r.matches {
					if m, ok := m.(*recent); ok {
						named[m.name] = true
					}
				}
			}
		}
	}
	for name := range t.recent {
		if !named[name] {
			delete(t.recent, name)
		}
	}
}
