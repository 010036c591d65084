// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

// Attached says whether programs of ours serve a cgroup.
func Attached(cgroupRoot string) (bool, error) {
	cgroup, err := openCgroup2(cgroupRoot)
	if err != nil {
		return false, err
	}
	defer cgroup.Close()
	found, err := findAttached(cgroup)
	closeAttached(found)
	return len(found) > 0, err
}

// drainInterval is how often Drain asks whether there is a connection left.
const drainInterval = 5 * time.Second

// Drain hands over to a proxy that serves already: from now on no connection is
// translated that is not translated yet. Those from outside that are go on, and when
// the last one has ended, everything of ours goes. It returns then, or when ctx is done;
// what is left may be drained on by another process.
func (t *Tier) Drain(ctx context.Context) error {
	if err := t.takeFrontends(); err != nil {
		return fmt.Errorf("take the frontends away: %w", err)
	}
	t.packets.draining = true
	if err := t.startDevices(ctx); err != nil {
		return fmt.Errorf("tell the programs on devices: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	t.runs.Go(func() { t.flowTable.collect(ctx, t.opts.Timeouts) })
	ticker := time.NewTicker(drainInterval)
	defer ticker.Stop()
	for t.flowTable.used() > 0 {
		select {
		case <-ctx.Done():
			return nil
		case <-t.closing:
			return nil
		case <-ticker.C:
		}
	}
	return t.Cleanup(ctx)
}

// takeFrontends deletes what leads to backends, and leaves those: flows of UDP ask for
// theirs with each packet.
func (t *Tier) takeFrontends() error {
	if _, err := t.writer.sync(proxier.Update{NodeRules: &proxier.NodeRules{}}); err != nil {
		return err
	}
	var keys []frontendKey
	frontends := t.writer.tables.frontends
	if err := frontends.Dump(func(key frontendKey, _ frontendValue) { keys = append(keys, key) }); err != nil {
		return err
	}
	return frontends.Delete(keys)
}
