// SPDX-License-Identifier: Apache-2.0

package app

import (
	"testing"
	"time"
)

// TestResync: failed probes request full syncs at growing intervals, until one succeeds.
func TestResync(t *testing.T) {
	var r resync
	requests := 0
	now := time.Unix(1000, 0)
	r.probed(t.Context(), true, now) // nothing runs yet
	r.use(func() { requests++ })
	for _, step := range []struct {
		after  time.Duration
		failed bool
		want   int
	}{
		{0, false, 0},
		{0, true, 1},
		{4 * time.Second, true, 1},
		{time.Second, true, 2},
		{5 * time.Second, true, 2}, // now twice as long
		{5 * time.Second, true, 3},
		{time.Second, false, 3},
		{19 * time.Second, true, 4},
		{5 * time.Second, true, 5}, // from the beginning
	} {
		now = now.Add(step.after)
		r.probed(t.Context(), step.failed, now)
		if requests != step.want {
			t.Errorf("after %v: %d requests, want %d", now.Sub(time.Unix(1000, 0)), requests, step.want)
		}
	}
}
