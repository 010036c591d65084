// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/apiserver"
	"github.com/tandem-proxy/tandem/sources/optouts"
)

// followOptOuts tells which pods of this node opt out of socket load balancing, until ctx is done. Without access
// to Pods it tells nothing.
func (p *proxy) followOptOuts(ctx context.Context, tell func(proxier.OptOuts)) {
	source := apiserver.NewPods(p.client, optouts.New(p.problems, tell), apiserver.PodOptions{
		NodeName: p.opts.nodeName, Annotations: optouts.PodAnnotations, Labels: optouts.NamespaceLabels,
		PodConsequence:       "annotations of pods and labels of namespaces cannot opt out of socket load balancing; 'tandemctl optout' can",
		NamespaceConsequence: "labels of namespaces cannot opt out of socket load balancing; annotations of pods can",
	})
	if err := source.Run(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot read opt-outs of pods and namespaces")
	}
}
