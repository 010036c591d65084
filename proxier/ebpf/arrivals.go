// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/packetsocket"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
)

// serveArrival serves the device by which an untranslated packet of a pod came in that sends without a socket of this
// kernel, such as a sandbox or a virtual machine. The packet is lost, and its sender sends it again.
func (t *Tier) serveArrival(ctx context.Context, a packetsocket.Arrival) error {
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
	if err := errors.Join(t.findPodDevices(ctx), t.serveDevices(ctx)); err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Traffic of a pod bypasses the sockets of this kernel (VM, sandbox or raw socket); attached programs to its device", "device", name)
	return nil
}
