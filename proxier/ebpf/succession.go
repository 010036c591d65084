// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"net/netip"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier/ebpf/successor"
)

// own makes this process the owner of the maps. Where programs left new connections to another
// kube-proxy, they do so until these maps hold everything.
func (t *Tier) own(ctx context.Context) (err error) {
	if t.successor, err = successor.Open(t.maps[successor.MapName]); err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	t.successor.Own(successor.SelfOrZero(logger), t.opts.Ports, t.opts.YieldGrace)
	if y, yielded := t.successor.Yielded(); yielded {
		t.setLastYield(y)
		logger.Info("Another kube-proxy took over while this one was not running; the eBPF programs leave new connections to it until the first sync",
			"since", y.Since.Format(time.RFC3339), "process", y.Process, "pid", y.PID)
	}
	return nil
}

// takeBack has the programs accept new connections again, now that the maps hold everything.
func (t *Tier) takeBack(ctx context.Context) {
	if y, yielded := t.successor.Yielded(); yielded {
		t.setLastYield(y)
		t.successor.TakeBack()
		klog.FromContext(ctx).Info("eBPF programs serve new connections again after yielding to another kube-proxy",
			"since", y.Since.Format(time.RFC3339), "process", y.Process, "pid", y.PID)
	}
}

// AwaitOther tells the programs where another kube-proxy listens that runs beside this process: when
// this process is gone for the grace period, they leave new connections to that one.
func (t *Tier) AwaitOther(listeners []netip.AddrPort) { t.successor.Await(listeners) }

func (t *Tier) setLastYield(y successor.Yield) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lastYield = y.Since
}

// LastYield is when programs began to leave new connections to another kube-proxy, as this
// process found them; zero if they did not.
func (t *Tier) LastYield() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.lastYield
}
