// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"time"

	k8smetrics "k8s.io/component-base/metrics"
)

// EventSource is called for each scrape. It returns when the API server last sent an event of each resource.
type EventSource func() map[string]time.Time

var lastEventDesc = k8smetrics.NewDesc("tandem_api_last_event_timestamp_seconds", "Unix time of the last event or bookmark that the API server sent for each watched resource. Bookmarks come each minute.", []string{"resource"}, nil, k8smetrics.ALPHA, "")

// lastEvents is a collector.
type lastEvents struct {
	k8smetrics.BaseStableCollector
	source EventSource
}

// DescribeWithStability implements k8smetrics.StableCollector.
func (l *lastEvents) DescribeWithStability(ch chan<- *k8smetrics.Desc) { ch <- lastEventDesc }

// CollectWithStability implements k8smetrics.StableCollector.
func (l *lastEvents) CollectWithStability(ch chan<- k8smetrics.Metric) {
	for resource, at := range l.source() {
		ch <- k8smetrics.NewLazyConstMetric(lastEventDesc, k8smetrics.GaugeValue, float64(at.UnixMilli())/1000, resource)
	}
}
