// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier/ebpf/drain"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
)

// retrySwitch is the number of looks at the flows before programs that could not be switched
// to draining are tried again.
const retrySwitch = 8

// Drain hands over to a proxy that serves already. The programs accept no new connections, but
// still translate established ones from outside. When the last one has ended, Drain removes all
// kernel state of the proxy and returns, unless the flows of some programs cannot be read. It also
// returns when ctx is done, and another process may continue. Only Adopted may have been called before.
//
// It works on the maps of the attached programs, whether Open adopted those or not.
func (t *Tier) Drain(ctx context.Context) error { return t.drain(ctx, flowtable.CollectInterval) }

func (t *Tier) drain(ctx context.Context, interval time.Duration) error {
	devices, err := t.deviceOptions(t.sizes, t.flowTable)
	if err != nil {
		return err
	}
	var d *drain.Drain
	if err := t.netns.Do(func() (err error) {
		d, err = drain.Begin(drain.Options{Cgroup: t.cgroup, Maps: t.maps, Devices: devices, Timeouts: t.opts.Timeouts})
		return err
	}); err != nil {
		return err
	}
	defer d.Close()
	logger := klog.FromContext(ctx)
	if len(d.Unreadable) > 0 {
		logger.Info("Cannot read the flows of eBPF programs of another layout; they stay for their connections until 'tandemctl detach' removes them", "programs", d.Unreadable)
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	draining := false
	for tick := 0; ; tick++ {
		// A device that rejects the draining programs may always do so. Its current programs
		// then continue to serve the established connections.
		if !draining && tick%retrySwitch == 0 {
			err := t.netns.Do(func() error { return d.Switch(ctx) })
			if draining = err == nil; !draining {
				logger.Error(err, "Cannot switch all packet programs to draining; trying again")
			}
		}
		left, err := d.Sweep(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			logger.Error(err, "Cannot remove flows that timed out; trying again", "interval", interval)
		case left == 0 && len(d.Unreadable) == 0:
			return t.Cleanup(ctx)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.closing:
			return nil
		case <-ticker.C:
		}
	}
}
