// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
)

// cleaning is that of a fallback that carries nothing; nobody waits for it.
type cleaning struct {
	sync.WaitGroup
	stop   context.CancelFunc
	failed atomic.Bool
}

// begin cleans up after a while.
func (c *cleaning) begin(ctx context.Context, after time.Duration, tier proxier.Tier) {
	ctx, c.stop = context.WithCancel(ctx)
	c.Go(func() {
		timer := time.NewTimer(after)
		defer timer.Stop()
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if err := tier.Cleanup(ctx); err != nil && ctx.Err() == nil {
			c.failed.Store(true)
			klog.FromContext(ctx).Error(err, "Cannot remove the rules of the fallback, which carries nothing; trying again with the next full sync")
		}
	})
}

// end returns when nothing is cleaned any more. What is left is for who comes next.
func (c *cleaning) end() {
	if c.stop != nil {
		c.stop()
	}
	c.Wait()
	c.failed.Store(false)
}
