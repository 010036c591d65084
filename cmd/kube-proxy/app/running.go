// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/rootlock"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/sources/otherproxy"
)

// servingLock is the number of the lock that a process of a mode without eBPF programs holds in the network
// namespace of the node, whichever ports its servers have. Mode ebpf has a lock of its own.
const servingLock = 0x7d0b

// holdServingLock takes the lock, once a process before this one has ended, and keeps it until ctx is done.
func holdServingLock(ctx context.Context) {
	for ctx.Err() == nil {
		lock, err := rootlock.Acquire(servingLock)
		switch {
		case err == nil:
			<-ctx.Done()
			_ = lock.Close()
		case errors.Is(err, rootlock.ErrHeld):
			select {
			case <-ctx.Done():
			case <-time.After(busyInterval):
			}
		default:
			klog.FromContext(ctx).V(2).Info("Cannot take the serving lock; 'kube-proxy --cleanup' finds this process by the ports of its servers alone", "reason", err.Error())
			return
		}
	}
}

func isServingLockHeld() (bool, error) {
	lock, err := rootlock.Acquire(servingLock)
	if errors.Is(err, rootlock.ErrHeld) {
		return true, nil
	}
	return false, errors.Join(err, lock.Close())
}

// runningProxy tells which kube-proxy serves this node, ours or another; empty for none. It
// finds one by its lock, or by its servers, which need not answer. One that is to stay beside this one
// does not count.
func runningProxy(ctx context.Context, h *host) string {
	if root, err := h.cgroupRoot(); err == nil && root != "" {
		if stays(ctx, func() (bool, error) { return removal.Busy(root) }) {
			return "a process in mode ebpf holds the lock of " + root
		}
	}
	if !h.isShared() && stays(ctx, isServingLockHeld) {
		return "a process in mode iptables or ipvs holds the lock of this network namespace"
	}
	f := newFinder(h.config)
	f.Own = ""
	if h.isShared() {
		f.Ports = serverPorts(h.config)
	}
	switch p, err := f.Find(ctx); {
	case p != nil:
		return p.String()
	case errors.Is(err, otherproxy.ErrSilent):
		return "one that is suspended or gets no CPU, if it is a kube-proxy: " + strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return ""
}

// stays reports whether a lock is held, and remains so. A child that a killed process had just forked, and that
// runs no program yet, still has it for a moment.
func stays(ctx context.Context, isHeld func() (bool, error)) bool {
	for deadline := time.Now().Add(3 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		held, err := isHeld()
		if err != nil || !held {
			return false
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			return true
		}
	}
}
