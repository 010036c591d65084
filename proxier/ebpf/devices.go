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
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
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
	err := t.serveDevices(ctx)
	t.startHold(ctx)
	return err
}

// ensureDevices brings the programs on devices in line, whatever happened to them.
func (t *Tier) ensureDevices(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.waiting {
		return nil
	}
	return errors.Join(t.serveDevices(ctx), t.auditDevices(ctx))
}

// serveDevices is called with mu held.
func (t *Tier) serveDevices(ctx context.Context) error {
	defer t.publishUplinks()
	before := maps.Clone(t.devices.Served)
	err := t.netns.Do(func() error { return t.devices.Serve(ctx, t.uplinks, t.podDevices.Served) })
	if !maps.Equal(before, t.devices.Served) {
		t.probes.reset()
	}
	t.noteAcceleration(ctx)
	if t.arrivals != nil {
		// Their packets would be seen again only where new connections begin.
		t.podDevices.Keep(t.devices.InheritedPods)
		t.devices.InheritedPods = nil
	}
	return err
}

// noteAcceleration logs what came of the acceleration of uplinks, where that is another result than before. It is called with mu held.
func (t *Tier) noteAcceleration(ctx context.Context) {
	logger, now := klog.FromContext(ctx), t.devices.Accelerated()
	if t.opts.Acceleration != datapath.NoAcceleration {
		for _, d := range t.uplinks {
			why, known := now[d.Index]
			was, before := t.accelerated[d.Index]
			switch {
			case !known || before && fmt.Sprint(why) == fmt.Sprint(was):
			case why == nil:
				logger.Info("XDP forwards packets", "device", d.Name)
			default:
				logger.Info("XDP does not forward on a device; the other programs serve it", "device", d.Name, "reason", why.Error())
			}
		}
	}
	t.accelerated = now
}

// SetOptOuts sets the pods that opt out of socket load balancing, soon. Their established connections
// stay as they are. It has no effect where others serve the sockets of pods.
func (t *Tier) SetOptOuts(o proxier.OptOuts) {
	t.mu.Lock()
	t.optOuts.Want(o)
	t.mu.Unlock()
	select {
	case t.optOutsChanged <- struct{}{}:
	default: // it will be looked at
	}
}

// followOptOuts serves the packets of pods that opt out, until ctx is done.
func (t *Tier) followOptOuts(ctx context.Context) {
	logger := klog.FromContext(ctx)
	ticker := time.NewTicker(optOutInterval)
	defer ticker.Stop()
	for {
		if err := t.syncOptOuts(ctx); err != nil && ctx.Err() == nil {
			logger.Error(err, "Cannot serve some pods that opted out of socket load balancing; trying again", "interval", optOutInterval)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-t.optOutsChanged:
		}
	}
}

// syncOptOuts brings the opt-outs by pods in line, and attaches programs to the devices of all pods that opted
// out.
func (t *Tier) syncOptOuts(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	serving := t.attached && !t.waiting
	o, err := t.optOuts.Read(t.maps["tdm_optout"], t.netns.Do)
	if o == nil {
		return err
	}
	if serving {
		err = errors.Join(err, t.optOuts.Remove(ctx, o))
	}
	if t.opts.packets() {
		was := t.podDevices.Served
		failed := t.updatePodDevices(ctx, o.Cookies())
		if serving && !maps.Equal(was, t.podDevices.Served) {
			failed = errors.Join(failed, t.serveDevices(ctx))
		}
		if failed != nil {
			// Without programs on its device, what a pod sends to Services would be lost.
			return errors.Join(err, failed)
		}
	}
	if serving {
		err = errors.Join(err, t.optOuts.Add(ctx, o, t.podDevicesServed))
	}
	return err
}

// findPodDevices finds the devices of pods. It is called with mu held.
func (t *Tier) findPodDevices(ctx context.Context) error {
	o, err := t.optOuts.Read(t.maps["tdm_optout"], t.netns.Do)
	if o == nil {
		return err
	}
	return errors.Join(err, t.updatePodDevices(ctx, o.Cookies()))
}

// updatePodDevices finds the devices of pods whose network namespaces have these cookies, and of those that are
// served for another reason. It is called with mu held.
func (t *Tier) updatePodDevices(ctx context.Context, cookies []uint64) error {
	if t.opts.Shared && t.opts.Left[proxier.FromPod] {
		return nil
	}
	pods := t.writer.PodDetector()
	return t.netns.Do(func() error {
		return t.podDevices.Update(ctx, cookies, t.opts.PodDevices, t.uplinks, pods, t.opts.ProcRoot)
	})
}

// podDevicesServed reports whether the devices of a network namespace, as far as there are any, have
// programs.
func (t *Tier) podDevicesServed(cookie uint64) bool {
	if !t.opts.packets() {
		return true // rules serve
	}
	if t.podDevices.Unknown(cookie) {
		return false
	}
	for _, device := range t.podDevices.Of(cookie) {
		if _, served := t.devices.Served[device]; !served {
			return false
		}
	}
	return true
}
