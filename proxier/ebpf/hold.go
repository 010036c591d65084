// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
)

// startHold holds back packets that programs on devices miss, until this process ends. It is called
// with mu held, once the programs are attached.
//
// Beside another kube-proxy, netfilter may give a port of the node to another connection, so
// that a packet of a known flow can be for the stack.
func (t *Tier) startHold(ctx context.Context) {
	if t.hold != nil || t.opts.Shared || !t.opts.packets() || t.opts.NoHold {
		return
	}
	err := t.netns.Do(func() (err error) {
		t.hold, err = datapath.AttachHold(ctx, t.maps)
		return err
	})
	if err != nil {
		klog.FromContext(ctx).Info("Connections of clients outside may be reset when another process detaches eBPF programs, until they are attached again. Netfilter programs would prevent this (Linux 6.4)", "reason", err.Error())
	}
}

// replaceHold has the present maps decide which packets are held back. It is called with mu held.
func (t *Tier) replaceHold(ctx context.Context) {
	if t.hold == nil {
		return
	}
	earlier := t.hold
	t.hold = nil
	t.startHold(ctx)
	_ = earlier.Close() // releases descriptors
}

func (t *Tier) stopHold() {
	if t.hold != nil {
		_ = t.hold.Close() // releases descriptors
		t.hold = nil
	}
}
