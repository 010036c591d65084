// SPDX-License-Identifier: Apache-2.0

package ipvstest

import (
	"context"

	"github.com/tandem-proxy/tandem/proxier"
)

// Rules are a tier of rules beside the virtual servers of a kernel, which serves what it is
// given.
type Rules[M comparable] struct {
	kernel *Kernel[M]
	// There are decisions by index, Node the rules of the node, Syncs counts calls.
	There map[uint32]*proxier.Decision
	Node  *proxier.NodeRules
	Syncs int
}

// NewRules are none.
func NewRules[M comparable](k *Kernel[M]) *Rules[M] {
	return &Rules[M]{kernel: k, There: map[uint32]*proxier.Decision{}}
}

// Sync implements proxier.Tier. When the kernel fails, it has done what it was to do, like a
// tier that retries by itself.
func (r *Rules[M]) Sync(_ context.Context, u proxier.Update) error {
	r.Syncs++
	if u.NodeRules != nil {
		r.Node = u.NodeRules
	}
	if u.Full {
		clear(r.There)
	}
	for _, c := range u.Changes {
		if c.New == nil {
			delete(r.There, c.Index())
			continue
		}
		r.There[c.Index()] = c.New
	}
	r.kernel.removed()
	return r.kernel.message(func() error { return nil }, "rules")
}

// Cleanup implements proxier.Tier.
func (r *Rules[M]) Cleanup(context.Context) error {
	clear(r.There)
	return nil
}

// Supports implements proxier.Tier: everything.
func (r *Rules[M]) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

// Usable says that it serves both families.
func (r *Rules[M]) Usable(proxier.Family) error { return nil }

// Run implements ipvs.Rules.
func (r *Rules[M]) Run(context.Context) {}

// Close does nothing.
func (r *Rules[M]) Close() error { return nil }
