// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// optOutInterval is the time between two looks at the opt-outs.
const optOutInterval = time.Second

// SetUplinks sets the devices by which node traffic comes in; all others are left
// alone. It may be called at any time before Close. It has no effect if clients outside are
// left to others: what an earlier process attached to devices then serves the connections
// that it has.
func (t *Tier) SetUplinks(ctx context.Context, list []devices.Device) error {
	if !t.opts.packets() {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.uplinks = list
	// Programs of an earlier process serve until these maps hold everything.
	if !t.attached || t.waiting {
		return nil
	}
	return t.serveDevices(ctx)
}

// startDevices attaches programs to devices for the first time. It is called after the first
// sync, since they take longer to load than sockets can wait for their frontends.
func (t *Tier) startDevices(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.waiting {
		return nil
	}
	t.waiting = false
	if t.opts.packets() {
		_ = t.findPodDevices(ctx) // followOptOuts tries again soon
	}
	return t.serveDevices(ctx)
}

// ensureDevices attaches again what another process detached from devices.
func (t *Tier) ensureDevices(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.waiting {
		return nil
	}
	return t.netns.Do(func() error {
		return errors.Join(t.devices.Reattach(ctx), t.devices.Serve(ctx, t.uplinks, t.podDevices.Served))
	})
}

// serveDevices is called with mu held.
func (t *Tier) serveDevices(ctx context.Context) error {
	return t.netns.Do(func() error { return t.devices.Serve(ctx, t.uplinks, t.podDevices.Served) })
}

// followOptOuts serves the packets of pods that opt out, until ctx is done.
func (t *Tier) followOptOuts(ctx context.Context) {
	logger := klog.FromContext(ctx)
	ticker := time.NewTicker(optOutInterval)
	defer ticker.Stop()
	for {
		if err := t.syncPodDevices(ctx); err != nil && ctx.Err() == nil {
			logger.Error(err, "Cannot attach programs to the devices of some pods that opted out; trying again", "interval", optOutInterval)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// syncPodDevices finds the devices of pods that opted out, and attaches programs.
func (t *Tier) syncPodDevices(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := t.podDevices.Served
	err := t.findPodDevices(ctx)
	if !t.attached || t.waiting || maps.Equal(was, t.podDevices.Served) {
		return err
	}
	return errors.Join(err, t.serveDevices(ctx))
}

// findPodDevices finds the devices of pods. It is called with mu held.
func (t *Tier) findPodDevices(ctx context.Context) error {
	if t.opts.Shared && t.opts.Left[proxier.FromPod] {
		return nil
	}
	cookies, err := lbmap.Keys[uint64, uint8](t.maps["tdm_optout"])
	if err != nil {
		return fmt.Errorf("read the opt-outs: %w", err)
	}
	pods := t.writer.PodDetector()
	return t.netns.Do(func() error {
		return t.podDevices.Update(ctx, cookies, t.opts.PodDevices, t.uplinks, pods, t.opts.ProcRoot)
	})
}
