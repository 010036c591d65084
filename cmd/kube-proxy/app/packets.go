// SPDX-License-Identifier: Apache-2.0

package app

import (
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
)

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
)

// leavesPackets says which clients programs do not serve, if there are such: rules have
// to.
func (p *proxy) leavesPackets() (whom string, leaves bool) {
	missing := missingForPackets(&p.report)
	switch {
	case len(missing) > 0:
		return "clients outside this node, since this kernel lacks " + strings.Join(missing, ", "), true
	case p.opts.Config.Tandem.EBPF.SocketLB == config.SocketLBHost:
		return "pods (ebpf.socketLB: host)", true
	}
	return "", false
}

// followUplinks has the tier serve on the devices that node traffic comes in
// by, until ctx is done.
func (p *proxy) followUplinks(ctx context.Context, tier *ebpf.Tier) {
	logger := klog.FromContext(ctx)
	p.facts.uplinks.Watch(ctx, func(u devices.Uplinks) {
		if len(u.Unmatched) > 0 {
			logger.Info("No device has a name as --ebpf-devices has it", "names", u.Unmatched)
		}
		if len(u.Devices) == 0 {
			logger.Info("No device is found by which traffic for this node comes in; --ebpf-devices can name them")
		}
		if err := tier.SetUplinks(ctx, u.Devices); err != nil {
			logger.Error(err, "Some devices are not served; trying again with the next full sync")
			return
		}
		logger.Info("Clients outside come in by these devices", "devices", deviceTexts(u.Devices))
	})
}

func deviceTexts(list []devices.Device) []string {
	texts := make([]string, len(list))
	for i, d := range list {
		texts[i] = d.String()
	}
	return texts
}

// keepNodePorts keeps NodePorts from being source ports, if it is to.
func (p *proxy) keepNodePorts(logger klog.Logger) error {
	e := &p.opts.Config.Tandem.EBPF
	if !*e.ReserveNodePorts {
		return nil
	}
	nodePorts, err := config.ParsePortRange(e.NodePortRange)
	if err != nil {
		return err // validated before
	}
	return reserveNodePorts(logger, nodePorts)
}

// reservedPorts is a sysctl of the network namespace.
const reservedPorts = "/proc/sys/net/ipv4/ip_local_reserved_ports"

// reserveNodePorts adds the range to the ports that the kernel does not give
// out, if it would.
func reserveNodePorts(logger klog.Logger, nodePorts config.PortRange) error {
	ephemeral, err := datapath.EphemeralPorts()
	if err != nil || !ephemeral.Overlaps(datapath.PortRange(nodePorts)) {
		return err
	}
	text, err := os.ReadFile(reservedPorts)
	if err != nil {
		return fmt.Errorf("read reserved ports: %w", err)
	}
	list := strings.FieldsFunc(string(text), func(r rune) bool { return r == ',' || r == '\n' })
	// The kernel shows neighbouring ranges as one.
	if slices.ContainsFunc(list, func(s string) bool {
		r, err := config.ParsePortRange(s)
		return err == nil && r.First <= nodePorts.First && nodePorts.Last <= r.Last
	}) {
		return nil
	}
	if err := os.WriteFile(reservedPorts, []byte(strings.Join(append(list, nodePorts.String()), ",")), 0o644); err != nil {
		return fmt.Errorf("write reserved ports: %w", err)
	}
	logger.Info("Reserved NodePorts, which the kernel would give out otherwise (--ebpf-reserve-node-ports)", "nodePortRange", nodePorts, "ephemeral", ephemeral)
	return nil
}
