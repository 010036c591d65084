// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	k8smetrics "k8s.io/component-base/metrics"
)

// Table is how full a table in the kernel is.
type Table struct {
	Used, Max int
}

// Tables is what a tier knows of its tables when asked.
type Tables struct {
	ByName map[string]Table
	// Unplaced counts service ports that did not fit; negative if unknown.
	Unplaced int
	// ClosedSockets counts sockets closed since the start; negative if unknown.
	ClosedSockets int64
}

// TableSource answers at each scrape. It returns false while there is no tier.
type TableSource func() (Tables, bool)

var (
	entriesDesc  = k8smetrics.NewDesc("tandem_map_entries", "Entries in use in each table of the fast path.", []string{"map"}, nil, k8smetrics.ALPHA, "")
	capacityDesc = k8smetrics.NewDesc("tandem_map_capacity", "Entries each table of the fast path has room for.", []string{"map"}, nil, k8smetrics.ALPHA, "")
	unplacedDesc = k8smetrics.NewDesc("tandem_unplaced_service_ports", "Service ports that did not fit into the tables and are not served.", nil, nil, k8smetrics.ALPHA, "")
	closedDesc   = k8smetrics.NewDesc("tandem_closed_udp_sockets_total", "UDP sockets closed because their backend was removed.", nil, nil, k8smetrics.ALPHA, "")
)

// tables is a collector: the tier knows, and copying it after each sync would
// only make it late.
type tables struct {
	k8smetrics.BaseStableCollector
	source TableSource
}

// DescribeWithStability implements metrics.StableCollector.
func (t *tables) DescribeWithStability(ch chan<- *k8smetrics.Desc) {
	ch <- entriesDesc
	ch <- capacityDesc
	ch <- unplacedDesc
	ch <- closedDesc
}

// CollectWithStability implements metrics.StableCollector.
func (t *tables) CollectWithStability(ch chan<- k8smetrics.Metric) {
	now, ok := t.source()
	if !ok {
		return
	}
	for name, table := range now.ByName {
		ch <- k8smetrics.NewLazyConstMetric(entriesDesc, k8smetrics.GaugeValue, float64(table.Used), name)
		ch <- k8smetrics.NewLazyConstMetric(capacityDesc, k8smetrics.GaugeValue, float64(table.Max), name)
	}
	if now.Unplaced >= 0 {
		ch <- k8smetrics.NewLazyConstMetric(unplacedDesc, k8smetrics.GaugeValue, float64(now.Unplaced))
	}
	if now.ClosedSockets >= 0 {
		ch <- k8smetrics.NewLazyConstMetric(closedDesc, k8smetrics.CounterValue, float64(now.ClosedSockets))
	}
}
