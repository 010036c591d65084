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

// cleaning is the background clean-up of a fallback that serves nothing.
type cleaning struct {
	sync.WaitGroup
	stop context.CancelFunc
	// due says that the kernel may have something of the fallback again: this failed, or another proxy ran.
	due atomic.Bool
}

// begin cleans up after a while.
func (c *cleaning) begin(ctx context.Context, after time.Duration, tier proxier.Tier) {
	c.end()
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
			c.due.Store(true)
			klog.FromContext(ctx).Error(err, "Cannot clean up the unused fallback; retrying with the next full sync")
		}
	})
}

// end stops the clean-up and waits for it. The next sync of the fallback removes the rest.
func (c *cleaning) end() {
	if c.stop != nil {
		c.stop()
	}
	c.Wait()
	c.due.Store(false)
}
