// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ipvs"
	"github.com/tandem-proxy/tandem/sources/nodefacts"
)

// kernelSettings are those of this node.
const kernelSettings = sysctl.Root("/")

// tuneConntrack changes the settings of the kernel's conntrack to what the
// configuration says. If that fails, modes that upstream has end, as they do there.
// Mode ebpf tracks its connections itself; what others have tracked may suffer.
func (p *proxy) tuneConntrack(ctx context.Context) error {
	k := &p.opts.Config.KubeProxy
	ct := &k.Conntrack
	settings := conntrack.Settings{
		MaxPerCPU: int(*ct.MaxPerCore), Min: int(*ct.Min),
		TCPEstablished: ct.TCPEstablishedTimeout.Duration, TCPCloseWait: ct.TCPCloseWaitTimeout.Duration,
		UDP: ct.UDPTimeout.Duration, UDPStream: ct.UDPStreamTimeout.Duration, TCPBeLiberal: ct.TCPBeLiberal,
	}
	conntrack.Ready(ctx, kernelSettings)
	skipped, err := settings.Apply(ctx, kernelSettings)
	if err != nil {
		err = fmt.Errorf("set up conntrack: %w", err)
		if k.Mode != config.ModeEBPF {
			return err
		}
		skipped = append(skipped, err)
	}
	if err := errors.Join(skipped...); err != nil {
		p.complain(ctx, "Settings of conntrack are not what the configuration says: "+strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return nil
}

// complain tells of something that goes on without.
func (p *proxy) complain(ctx context.Context, message string) {
	if p.problems == nil {
		klog.FromContext(ctx).Error(nil, message)
		return
	}
	p.problems.Report(proxier.Problem{Kind: "Node", Reason: proxier.ReasonUnsupported, Message: message})
}

// initialize changes the settings of the kernel that take more privileges than the proxy
// needs afterwards (--init-only). It asks no API server, and carries no Service.
func initialize(ctx context.Context, o *Options) error {
	p := &proxy{opts: o, families: families()}
	if err := p.selectMode(ctx); err != nil {
		return err
	}
	if err := p.tuneConntrack(ctx); err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	switch p.decision.Mode {
	case capabilities.ModeIPTables:
		if err := p.initRules(); err != nil {
			return err
		}
	case capabilities.ModeIPVS:
		if err := ipvs.Configure(ipvsOptions(o.Config)); err != nil {
			return fmt.Errorf("set up IPVS: %w", err)
		}
		if err := p.initRules(); err != nil { // which carry these NodePorts here, too
			return err
		}
	case capabilities.ModeEBPF:
		if err := p.keepNodePorts(logger); err != nil {
			return err
		}
		logger.Info("Mode ebpf loads its programs, and finds their maps, when it runs: it needs CAP_SYS_ADMIN then too, which --init-only cannot take off it")
	}
	logger.Info("System initialized and --init-only specified", "mode", p.decision.Mode)
	return nil
}

// initRules lets NodePorts be reached at loopback addresses, where they are to be.
func (p *proxy) initRules() error {
	settings, err := nodefacts.New(p.opts.Config, p.opts.gate)
	if err != nil {
		return err
	}
	if rules := settings.Policy.NodeRules(&proxier.Facts{}); len(rules.Loopback[proxier.IPv4]) == 0 {
		return nil
	}
	_, err = kernelSettings.Ensure("proc/sys/net/ipv4/conf/all/route_localnet", "1")
	return err
}
