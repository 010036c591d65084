// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"time"

	"github.com/tandem-proxy/tandem/proxier/ebpf"
)

// runningProxy tells which kube-proxy serves this node, ours or another; empty for none. It
// finds one by the lock of mode ebpf, or by its servers. One that is to stay beside this one does
// not count.
func runningProxy(ctx context.Context, h *host) string {
	if root, err := h.cgroupRoot(); err == nil && root != "" {
		if isLocked(ctx, root) {
			return "a process in mode ebpf holds the lock of " + root
		}
	}
	f := newFinder(h.config)
	f.Own = ""
	if h.isShared() {
		f.Ports = serverPorts(h.config)
	}
	if p, err := f.Find(ctx); err == nil && p != nil {
		return p.String()
	}
	return ""
}

// isLocked reports whether a process holds the lock of mode ebpf. A child that a killed process had just
// forked, and that runs no program yet, still has it for a moment.
func isLocked(ctx context.Context, root string) bool {
	for deadline := time.Now().Add(3 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		busy, err := ebpf.Busy(root)
		if err != nil || !busy {
			return false
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			return true
		}
	}
}
