// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/apiserver"
)

// podHandler passes the Pods of this node to the proxier.
type podHandler struct {
	*proxier.Proxier
	known  func() // called when all Pods are known, or cannot be
	report func(proxier.Problem)
}

func (h *podHandler) OnPodsSynced() { h.known() }

func (h *podHandler) OnPodsDenied(err error) {
	h.report(proxier.Problem{
		Kind: "Node", Field: "hostPort", Reason: proxier.ReasonUnsupported,
		Message: "hostPorts are not served by this proxy: " + err.Error() + "; allow its ServiceAccount to list and watch pods, or unset hostPort",
	})
	h.known()
}

var _ apiserver.HostPortHandler = &podHandler{}

// followHostPorts tells the proxier of the Pods of this node, until ctx is done.
func (p *proxy) followHostPorts(ctx context.Context, px *proxier.Proxier, known func()) {
	source := apiserver.NewHostPorts(p.client, &podHandler{Proxier: px, known: known, report: p.problems.Report}, apiserver.HostPortOptions{
		NodeName: p.opts.nodeName, Consequence: "hostPorts of pods are not served by this proxy",
	})
	if err := source.Run(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot read hostPorts of pods")
	}
}
