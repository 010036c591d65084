// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer"
	"github.com/tandem-proxy/tandem/proxier/placement"
)

// simulation is the fast path with maps of these sizes that are not in the kernel.
type simulation struct{ *writer.Writer }

var _ placement.Fast = simulation{}

func newSimulation(sizes lbmap.Sizes) simulation {
	sizes = sizes.WithDefaults()
	return simulation{writer.New(lbmap.NewFakeTables(sizes), writer.Options{
		Sizes: sizes, Clock: clock.RealClock{}, Wait: func() {}, Report: func(proxier.Problem) {},
	})}
}

func (s simulation) Sync(_ context.Context, u proxier.Update) error {
	_, err := s.Writer.Sync(u)
	return err
}

func (simulation) Cleanup(context.Context) error { return nil }

func (simulation) Supports(d *proxier.Decision, f *proxier.Frontend) error {
	return writer.Supports(d, f)
}

// elsewhere stands for what serves the frontends that the fast path does not.
type elsewhere struct{}

func (elsewhere) Sync(context.Context, proxier.Update) error          { return nil }
func (elsewhere) Cleanup(context.Context) error                       { return nil }
func (elsewhere) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

// simulate returns why the fast path would not serve a frontend, capacity included: it assigns all
// Services of a table as a process does when it starts. Alone, without another datapath, everything is for
// the fast path, also Services that opt out.
func (m *ebpfMode) simulate(table *proxier.Table, alone bool) func(*proxier.Decision, *proxier.Frontend) error {
	fast := newSimulation(ebpfSizes(&m.config.Tandem.EBPF))
	rules := table.NodeRules()
	update := proxier.Update{Full: true, NodeRules: &rules, Changes: table.All()}
	var placed *placement.Tier
	tier := proxier.Tier(fast)
	switch {
	case m.isShared():
		placed = placement.NewShared(fast, m.config.Tandem.Coexistence.Share())
		tier = placed
	case !alone:
		placed = placement.New(fast, elsewhere{}, false)
		tier = placed
	}
	// It would log what does not fit, as a process does.
	ctx := klog.NewContext(context.Background(), klog.Logger{})
	// Services cannot opt out before the first sync. With each further full one, the room that they left
	// is used.
	for range 3 {
		if err := tier.Sync(ctx, update); err != nil {
			return func(*proxier.Decision, *proxier.Frontend) error {
				return fmt.Errorf("find out what fits into the maps: %w", err)
			}
		}
	}
	if placed != nil {
		return placed.Why
	}
	full := fast.Unplaced()
	return func(d *proxier.Decision, f *proxier.Frontend) error {
		if err := fast.Supports(d, f); err != nil {
			return err
		}
		return full[d.Index()]
	}
}
