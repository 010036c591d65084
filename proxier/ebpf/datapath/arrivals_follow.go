// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/kernel/packetsocket"
)

// After arrivalBurst packets, nothing is read for arrivalPause, so that a flood costs little.
const (
	arrivalBurst = 64
	arrivalPause = 10 * time.Millisecond
)

// Follow calls serve, from several goroutines, with each packet that the filter selects in a network
// namespace, until ctx is done.
func (f *ArrivalFilter) Follow(ctx context.Context, in netns.Namespace, serve func(context.Context, packetsocket.Arrival) error) {
	logger := klog.FromContext(ctx)
	var listeners []*packetsocket.Listener
	err := in.Do(func() (err error) {
		listeners, err = packetsocket.Listen(f.Program)
		return err
	})
	if err != nil {
		logger.Info("Cannot detect pods that send packets without sockets of this kernel, such as sandboxes and virtual machines; their devices have to be named (--ebpf-pod-devices)", "reason", err.Error())
		return
	}
	var reading sync.WaitGroup
	for _, l := range listeners {
		reading.Go(func() {
			for n := 1; ; n++ {
				a, err := l.Next()
				if err != nil {
					if ctx.Err() == nil {
						logger.Error(err, "Cannot detect more pods that send packets without sockets of this kernel")
					}
					return
				}
				if err := serve(ctx, a); err != nil && ctx.Err() == nil {
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
	<-ctx.Done()
	for _, l := range listeners {
		_ = l.Close() // ends Next
	}
	reading.Wait()
}
