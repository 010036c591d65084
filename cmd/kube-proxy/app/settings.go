// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
)

// kernelSettings are those of this node.
const kernelSettings = sysctl.Root("/")

// tuneConntrack applies the conntrack section of the configuration to the kernel. What
// cannot be applied is reported, or is an error if the configured mode needs conntrack, as
// in upstream.
func tuneConntrack(ctx context.Context, h *host, report func(error)) error {
	if h.isShared() {
		return nil // the other kube-proxy does
	}
	conntrack.Ready(ctx, kernelSettings)
	skipped, err := conntrackSettings(h.config).Apply(ctx, kernelSettings)
	if err != nil {
		err = fmt.Errorf("set up conntrack: %w", err)
		if modeNamed(h, capabilities.Mode(h.config.KubeProxy.Mode)).needsConntrack() {
			return err
		}
		skipped = append(skipped, err)
	}
	if err := errors.Join(skipped...); err != nil {
		report(err)
	}
	return nil
}

// conntrackSettings are those of the conntrack section of the configuration.
func conntrackSettings(c *config.Config) *conntrack.Settings {
	ct := &c.KubeProxy.Conntrack
	return &conntrack.Settings{
		MaxPerCPU: int(*ct.MaxPerCore), Min: int(*ct.Min),
		TCPEstablished: ct.TCPEstablishedTimeout.Duration, TCPCloseWait: ct.TCPCloseWaitTimeout.Duration,
		UDP: ct.UDPTimeout.Duration, UDPStream: ct.UDPStreamTimeout.Duration, TCPBeLiberal: ct.TCPBeLiberal,
	}
}

// initialize changes the kernel settings that take more privileges than the proxy needs
// afterwards (--init-only). It does not connect to the API server, and serves no Service.
func initialize(ctx context.Context, o *Options) error {
	logger := klog.FromContext(ctx)
	h, err := probeHost(ctx, o)
	if err != nil {
		return err
	}
	m, decision, err := selectMode(ctx, h)
	if err != nil {
		return err
	}
	logMode(logger, h, decision)
	if err := tuneConntrack(ctx, h, func(err error) { logger.Error(err, "Conntrack settings differ from the configuration") }); err != nil {
		return err
	}
	if err := m.initialize(ctx); err != nil {
		return err
	}
	logger.Info("System initialized and --init-only specified", "mode", m.name())
	return nil
}
