// SPDX-License-Identifier: Apache-2.0

package metrics

import k8smetrics "k8s.io/component-base/metrics"

// RulePackets are packet counters of iptables rules.
type RulePackets struct {
	InvalidDropped, LoopbackNodePorts uint64
}

// RuleSource is called for each scrape. It returns false if no rules count packets. As in
// upstream, these metrics exist only where the kernel has the counters.
type RuleSource func() (RulePackets, bool)

var (
	invalidDesc  = k8smetrics.NewDesc("kubeproxy_iptables_ct_state_invalid_dropped_packets_total", "Packets dropped by rules because conntrack found them invalid.", nil, nil, k8smetrics.ALPHA, "")
	loopbackDesc = k8smetrics.NewDesc("kubeproxy_iptables_localhost_nodeports_accepted_packets_total", "First packets of connections to NodePorts at loopback addresses that rules accepted.", nil, nil, k8smetrics.ALPHA, "")
)

// rulePackets is a collector that reads the counters from the kernel.
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
