// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/proxier"
)

// counted is a leftover that counts its removals.
type counted struct{ retired, failures int }

func (*counted) what() string                  { return "something" }
func (*counted) cleanup(context.Context) error { return nil }
func (c *counted) retire(context.Context, *parts) error {
	c.retired++
	if c.failures > 0 {
		c.failures--
		return context.DeadlineExceeded
	}
	return nil
}

// Leftovers are removed once this mode serves everything, again if that fails, and once more when another
// kube-proxy has ended.
func TestLeftovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &counted{failures: 1}
		h := &host{config: config.New()}
		l := leftoversOf(modeNamed(h, capabilities.ModeEBPF), h, &parts{}, func(string, time.Time) {})
		l.list = []leftover{c}
		go l.run(t.Context())
		removed := func(when string, want int) {
			t.Helper()
			time.Sleep(time.Minute)
			synctest.Wait()
			if c.retired != want {
				t.Errorf("%s: %d removals, want %d", when, c.retired, want)
			}
		}
		removed("before the first sync", 0)
		l.Synced(proxier.SyncInfo{Full: true, Err: context.Canceled})
		removed("after one that failed", 0)
		l.Synced(proxier.SyncInfo{Full: true})
		l.Synced(proxier.SyncInfo{Full: true})
		removed("after the first sync", 2)
		l.otherEnded()
		removed("after the end of another kube-proxy", 3)
	})
}
