// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"time"

	"github.com/cilium/ebpf/ringbuf"
)

// bindInterval is the time between two looks at the sockets that were bound. A process can bind as often as it likes.
const bindInterval = 50 * time.Millisecond

// FollowBinds calls fn soon after a process of the host has bound a socket of TCP or UDP to a port that some frontend has, until ctx is
// done. A socket of TCP does not listen yet. fn must be quick.
func (t *Tier) FollowBinds(ctx context.Context, fn func()) error {
	t.gen.RLock() // larger maps have the same buffer
	m, err := t.maps["tdm_bound"].Clone()
	t.gen.RUnlock()
	if err != nil {
		return fmt.Errorf("open map tdm_bound: %w", err)
	}
	defer m.Close()
	reader, err := ringbuf.NewReader(m)
	if err != nil {
		return fmt.Errorf("read map tdm_bound: %w", err)
	}
	defer reader.Close()
	// Close would take the buffer away from AvailableBytes.
	defer context.AfterFunc(ctx, func() { reader.Flush() })()
	var record ringbuf.Record
	for ctx.Err() == nil {
		if err := reader.ReadInto(&record); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("read map tdm_bound: %w", err)
		}
		fn()
		if reader.AvailableBytes() > 0 {
			continue // fn is quick, and the buffer is small
		}
		select {
		case <-ctx.Done():
		case <-time.After(bindInterval):
		}
	}
	return nil
}
