// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"

	"github.com/tandem-proxy/tandem/proxier/ebpf"
)

// runningProxy tells which kube-proxy serves this node, ours or another; empty for none. It
// finds one by the lock of mode ebpf, or by its servers. One that is to stay beside this one does
// not count.
func runningProxy(ctx context.Context, h *host) string {
	if root, err := h.cgroupRoot(); err == nil && root != "" {
		if busy, err := ebpf.Busy(root); err == nil && busy {
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
