// SPDX-License-Identifier: Apache-2.0

package staleudp

import (
	"context"
	"errors"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
)

// tier is another one, and what conntrack remembers of rules that were there before it.
type tier struct {
	proxier.Tier
	flows  *Reconciler
	failed bool // the last time
}

// Beside keeps conntrack right beside a tier that does not need it: flows that rules
// translated once go on while their backends are there, and no longer. Where conntrack
// cannot be read that is logged, and does not fail the sync.
func Beside(next proxier.Tier, flows *Reconciler) proxier.Tier {
	return &tier{Tier: next, flows: flows}
}

// Sync implements proxier.Tier.
func (t *tier) Sync(ctx context.Context, update proxier.Update) error {
	t.flows.Observe(&update)
	// Where that has rules and fails, old ones may make the same entries again.
	failed := t.Tier.Sync(ctx, update)
	reconcile := t.flows.Reconcile
	if failed != nil {
		reconcile = t.flows.Try
	}
	var errs []error
	for f := range proxier.Families {
		_, err := reconcile(ctx, f)
		errs = append(errs, err)
	}
	err := errors.Join(errs...)
	if err != nil && !t.failed {
		klog.FromContext(ctx).Error(err, "Cannot clean up stale UDP conntrack entries: flows may keep going to removed endpoints; retrying with each sync")
	}
	t.failed = err != nil
	return failed
}
