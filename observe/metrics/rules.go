// SPDX-License-Identifier: Apache-2.0

package metrics

import k8smetrics "k8s.io/component-base/metrics"

// RulePackets are packets that rules have counted.
type RulePackets struct {
	InvalidDropped, LoopbackNodePorts uint64
}

// RuleSource answers at each scrape. It returns false while no rules count: upstream, too, has
// these metrics only where the kernel has the counters.
type RuleSource func() (RulePackets, bool)

var (
	invalidDesc  = k8smetrics.NewDesc("kubeproxy_iptables_ct_state_invalid_dropped_packets_total", "Packets that rules dropped because conntrack found them invalid.", nil, nil, k8smetrics.ALPHA, "")
	loopbackDesc = k8smetrics.NewDesc("kubeproxy_iptables_localhost_nodeports_accepted_packets_total", "First packets of connections to NodePorts at loopback addresses that rules led on.", nil, nil, k8smetrics.ALPHA, "")
)

// rulePackets is a collector: the kernel knows.
type rulePackets struct {
	k8smetrics.BaseStableCollector
	source RuleSource
}

// DescribeWithStability implements k8smetrics.StableCollector.
func (r *rulePackets) DescribeWithStability(ch chan<- *k8smetrics.Desc) {
	ch <- invalidDesc
	ch <- loopbackDesc
}

// CollectWithStability implements k8smetrics.StableCollector.
func (r *rulePackets) CollectWithStability(ch chan<- k8smetrics.Metric) {
	now, ok := r.source()
	if !ok {
		return
	}
	ch <- k8smetrics.NewLazyConstMetric(invalidDesc, k8smetrics.CounterValue, float64(now.InvalidDropped))
	ch <- k8smetrics.NewLazyConstMetric(loopbackDesc, k8smetrics.CounterValue, float64(now.LoopbackNodePorts))
}
