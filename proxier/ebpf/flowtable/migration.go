// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"context"
	"errors"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Migration copies flows out of the maps of earlier programs into others.
type Migration struct {
	to       lbmap.Maps
	wait     func()
	renumber Renumber
	copiers  []*Copier
}

// Renumber returns a function that gives a flow the ids that its service and its backend have in the tables beside it.
type Renumber func() func(*lbmap.Flow)

// NewMigration copies into these maps; wait returns when all programs that run at the call
// have ended. renumber is for flows that may have been made beside other tables, and nil where none was.
func NewMigration(to lbmap.Maps, wait func(), renumber Renumber) *Migration {
	return &Migration{to: to, wait: wait, renumber: renumber}
}

// Add opens the flows of an earlier program, unless they are known, or in the same maps.
func (m *Migration) Add(earlier lbmap.Maps) error {
	if earlier["tdm_flow"] == nil {
		return nil
	}
	for _, c := range m.copiers {
		if same, err := c.from.is(earlier["tdm_flow"]); same || err != nil {
			return err
		}
	}
	c, err := NewCopier(earlier, m.to)
	if c != nil && err == nil {
		m.copiers = append(m.copiers, c)
	}
	return err
}

// Active reports whether flows of earlier programs are in other maps.
func (m *Migration) Active() bool { return len(m.copiers) > 0 }

// CopyAll copies every flow.
func (m *Migration) CopyAll() error { return m.each((*Copier).CopyAll) }

// CopyNew copies the flows created since the last copy.
func (m *Migration) CopyNew() error { return m.each((*Copier).CopyNew) }

// Finish copies new flows, and updates copies with the state that their flows have got since. It waits
// until no program uses the earlier maps any more. Then it renumbers all flows: programs of earlier tables
// would not know what these get.
func (m *Migration) Finish(ctx context.Context) error {
	var err error
	if len(m.copiers) > 0 {
		m.wait()
		err = errors.Join(m.CopyNew(), m.each((*Copier).Finish))
		for _, c := range m.copiers {
			klog.FromContext(ctx).Info("Copied connections into maps of other sizes", "connections", c.Copied, "lost", c.Lost)
		}
	}
	if m.renumber == nil || err != nil {
		return err
	}
	if err := renumberIn(m.to, m.renumber()); err != nil {
		return err
	}
	m.renumber = nil
	return nil
}

func (m *Migration) each(step func(*Copier) error) error {
	var errs []error
	for _, c := range m.copiers {
		errs = append(errs, step(c))
	}
	return errors.Join(errs...)
}

// Close releases the earlier maps.
func (m *Migration) Close() {
	for _, c := range m.copiers {
		c.Close()
	}
	m.copiers = nil
}
