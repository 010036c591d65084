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
	"github.com/tandem-proxy/tandem/proxier"
)

// foreign stands where a mode does for what another kube-proxy on this node serves.
const foreign capabilities.Mode = "foreign"

// isShared says that another kube-proxy stays on this node. This one then writes no rules, no
// virtual servers and no kernel settings, and cleans up nothing but its own programs.
func (h *host) isShared() bool { return h.config.Tandem.Coexistence.Enabled() }

var (
	errNoPackets   = errors.New("the kernel lacks features that eBPF programs need to translate packets")
	errPodsLeftOut = errors.New("sockets of pods are not served (ebpf.socketLB: host)")
	errIPsec       = errors.New("this node has policies of IPsec, which packets that eBPF programs redirect would bypass")
	errClients     = errors.New("left to the other kube-proxy: the clients are not among coexistence.clients")
)

// leftClients are the reasons why programs do not serve clients, by origin; nil for those that
// they serve.
func (h *host) leftClients() (reasons [proxier.Origins]error) {
	c := h.config
	if x := &c.Tandem.Coexistence; x.Enabled() {
		for o, served := range x.Share().Clients {
			if !served {
				reasons[o] = errClients
			}
		}
	}
	if reasons[proxier.FromPod] == nil && c.Tandem.EBPF.SocketLB == config.SocketLBHost {
		reasons[proxier.FromPod] = errPodsLeftOut
	}
	if missing := missingForPackets(&h.report); reasons[proxier.FromOutside] == nil && len(missing) > 0 {
		reasons[proxier.FromOutside] = fmt.Errorf("%w: %s", errNoPackets, strings.Join(missing, ", "))
	}
	if reasons[proxier.FromOutside] == nil && h.hasIPsec {
		reasons[proxier.FromOutside] = errIPsec
	}
	return reasons
}

// logShare logs what is served beside the other kube-proxy.
func logShare(ctx context.Context, h *host, left [proxier.Origins]error) {
	logger, share := klog.FromContext(ctx), h.config.Tandem.Coexistence.Share()
	kinds, clients := []string{}, proxier.Clients{}
	for _, k := range proxier.Kinds() {
		if share.Has(k) {
			kinds = append(kinds, k.String())
		}
	}
	for o, why := range left {
		clients[o] = why == nil
		if why != nil && !errors.Is(why, errClients) {
			logger.Info("The other kube-proxy also serves these clients", "clients", proxier.Origin(o), "reason", why.Error())
		}
	}
	logger.Info("Serving a part of the traffic; another kube-proxy on this node has to serve the rest. No rules and no kernel settings are written", "frontends", kinds, "clients", clients.String(),
		"healthzBindAddress", h.config.KubeProxy.HealthzBindAddress, "metricsBindAddress", h.config.KubeProxy.MetricsBindAddress)
}
