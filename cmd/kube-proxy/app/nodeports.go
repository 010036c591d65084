// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
)

// reservesNodePorts reports whether reserveNodePortRange changes a setting.
func reservesNodePorts(h *host) bool { return *h.config.Tandem.EBPF.ReserveNodePorts && !h.isShared() }

// reserveNodePortRange keeps outgoing connections of this host from using NodePorts as source
// ports, where that is configured.
func reserveNodePortRange(ctx context.Context, h *host) error {
	if !reservesNodePorts(h) {
		return nil
	}
	e := &h.config.Tandem.EBPF
	nodePorts, err := config.ParsePortRange(e.NodePortRange)
	if err != nil {
		return err // validated before
	}
	return reserveNodePorts(klog.FromContext(ctx), nodePorts)
}

// reservedPorts is a sysctl of the network namespace.
const reservedPorts = "proc/sys/net/ipv4/ip_local_reserved_ports"

// reserveNodePorts adds the range to the reserved ports if it overlaps with the ephemeral
// ports.
func reserveNodePorts(logger klog.Logger, nodePorts config.PortRange) error {
	list, err := withNodePorts(nodePorts)
	if err != nil || list == "" {
		return err
	}
	if _, err := kernelSettings.Ensure(reservedPorts, list); err != nil {
		return fmt.Errorf("reserve ports: %w", err)
	}
	logger.Info("Reserved the NodePort range, which overlaps with the ephemeral ports (--ebpf-reserve-node-ports)", "nodePortRange", nodePorts)
	return nil
}

// withNodePorts returns the reserved ports and the range, if that overlaps with the ephemeral ports
// and is not reserved yet; else nothing.
func withNodePorts(nodePorts config.PortRange) (string, error) {
	ephemeral, err := datapath.EphemeralPorts()
	if err != nil || !ephemeral.Overlaps(datapath.PortRange(nodePorts)) {
		return "", err
	}
	text, err := kernelSettings.Get(reservedPorts)
	if err != nil {
		return "", fmt.Errorf("read reserved ports: %w", err)
	}
	list := strings.FieldsFunc(text, func(r rune) bool { return r == ',' })
	// The kernel shows neighbouring ranges as one.
	if slices.ContainsFunc(list, func(s string) bool {
		r, err := config.ParsePortRange(s)
		return err == nil && r.First <= nodePorts.First && nodePorts.Last <= r.Last
	}) {
		return "", nil
	}
	return strings.Join(append(list, nodePorts.String()), ","), nil
}
