// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/tap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
)

// After arrivalBurst packets, nothing is read for arrivalPause, so that a flood costs little.
const (
	arrivalBurst = 64
	arrivalPause = 10 * time.Millisecond
)

// followArrivals serves the packets of pods that send them without a socket of this kernel, such as
// sandboxes and virtual machines, until ctx is done. The first packet for a frontend that comes in by a
// device has programs attached there. It is lost, and its sender sends it again.
func (t *Tier) followArrivals(ctx context.Context) {
	logger := klog.FromContext(ctx)
	var listeners []*tap.Listener
	err := t.netns.Do(func() (err error) {
		listeners, err = tap.Listen(t.arrivals.Program)
		return err
	})
	if err != nil {
		logger.Info("Cannot detect pods that send packets without sockets of this kernel, such as sandboxes and virtual machines; their devices have to be named (--ebpf-pod-devices)", "reason", err.Error())
		return
	}
	for _, l := range listeners {
		t.runs.Go(func() {
			<-ctx.Done()
			_ = l.Close() // ends Next
		})
		t.runs.Go(func() {
			for n := 1; ; n++ {
				a, err := l.Next()
				if err != nil {
					if ctx.Err() == nil {
						logger.Error(err, "Cannot detect more pods that send packets without sockets of this kernel")
					}
					return
				}
				if err := t.serveArrival(ctx, a); err != nil && ctx.Err() == nil {
					logger.Error(err, "Cannot serve the packets of a pod that sends them without sockets of this kernel; trying again with the next full sync", "ifindex", a.Device)
				}
				if n%arrivalBurst == 0 {
					select {
					case <-ctx.Done():
					case <-time.After(arrivalPause):
					}
				}
			}
		})
	}
}

// serveArrival serves the device by which an untranslated packet came in.
func (t *Tier) serveArrival(ctx context.Context, a tap.Arrival) error {
	if to, protocol, ok := datapath.ParseArrival(a.Packet); !ok || !t.writer.Serves(to, protocol) {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.attached || t.waiting {
		return nil // rules may still serve
	}
	var name string
	err := t.netns.Do(func() (err error) {
		name, err = t.podDevices.See(a.Device, a.Source, t.uplinks)
		return err
	})
	if name == "" || err != nil {
		return err
	}
	err = errors.Join(t.findPodDevices(ctx), t.serveDevices(ctx))
	klog.FromContext(ctx).V(2).Info("A pod sends packets to Services without sockets of this kernel; programs on its device serve them", "device", name)
	return err
}
