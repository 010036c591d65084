// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"

	"k8s.io/klog/v2"
)

// Migration copies flows out of the maps of earlier programs into others.
type Migration struct {
	to      Maps
	sizes   Sizes
	wait    func()
	copiers []*carrier
}

// NewMigration copies into these maps; wait returns when all programs that run at the call
// have come to their end.
func NewMigration(to Maps, sizes Sizes, wait func()) *Migration {
	return &Migration{to: to, sizes: sizes, wait: wait}
}

// Add opens the flows of an earlier program, unless they are known, or in the same maps.
func (m *Migration) Add(earlier Maps) error {
	for _, c := range m.copiers {
		if same, err := sameMap(c.from.flows, earlier["tdm_flow"]); same || err != nil {
			return err
		}
	}
	c, err := newCarrier(earlier, m.to, &m.sizes)
	if c != nil && err == nil {
		m.copiers = append(m.copiers, c)
	}
	return err
}

// CopyAll copies every flow.
func (m *Migration) CopyAll() error { return m.each((*carrier).all) }

// CopyNew copies the flows that began since the last look.
func (m *Migration) CopyNew() error { return m.each((*carrier).fresh) }

// Finish copies what is new, and what flows have seen since they were copied, when no
// program uses the earlier maps any more.
func (m *Migration) Finish(ctx context.Context) error {
	if len(m.copiers) == 0 {
		return nil
	}
	m.wait()
	err := errors.Join(m.CopyNew(), m.each((*carrier).settle))
	for _, c := range m.copiers {
		klog.FromContext(ctx).Info("Copied connections into maps of other sizes", "connections", c.carried, "lost", c.lost)
	}
	return err
}

// Copied counts the flows that were copied.
func (m *Migration) Copied() (n int) {
	for _, c := range m.copiers {
		n += c.carried
	}
	return n
}

func (m *Migration) each(step func(*carrier) error) error {
	var errs []error
	for _, c := range m.copiers {
		errs = append(errs, step(c))
	}
	return errors.Join(errs...)
}

// Close releases the earlier maps.
func (m *Migration) Close() {
	for _, c := range m.copiers {
		c.close()
	}
	m.copiers = nil
}
