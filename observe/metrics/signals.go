// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
	k8smetrics "k8s.io/component-base/metrics"
)

// Signals are what TCP connections of sockets of this node to a service port came to.
type Signals struct {
	Established, Refused, Unanswered uint64
	// Sent and Received are bytes of connections that ended.
	Sent, Received uint64
	// Connect is how long connections took to be established, and RTT the smoothed round-trip time of those that ended.
	Connect, RTT Histogram
}

// Histogram of times.
type Histogram struct {
	SumMicroseconds uint64
	// Bounds of the buckets in microseconds, and how many times are in each; the last one has no bound.
	Bounds []uint32
	Counts []uint64
}

// add adds other signals, whose histograms have the same buckets.
func (s *Signals) add(o *Signals) {
	s.Established += o.Established
	s.Refused += o.Refused
	s.Unanswered += o.Unanswered
	s.Sent += o.Sent
	s.Received += o.Received
	s.Connect.add(&o.Connect)
	s.RTT.add(&o.RTT)
}

func (h *Histogram) add(o *Histogram) {
	h.SumMicroseconds += o.SumMicroseconds
	h.Bounds = o.Bounds
	counts := make([]uint64, len(o.Counts))
	copy(counts, h.Counts)
	for i, n := range o.Counts {
		counts[i] += n
	}
	h.Counts = counts
}

var (
	connectsDesc    = k8smetrics.NewDesc("tandem_service_connects_total", "TCP connections that sockets of this node opened to a service port, by result: established, refused by a reset, or unanswered. Only with --ebpf-service-signals.", append(serviceLabels, "result"), nil, k8smetrics.ALPHA, "")
	socketBytesDesc = k8smetrics.NewDesc("tandem_service_socket_bytes_total", "Bytes of TCP connections of sockets of this node to a service port, as of when they end. Only with --ebpf-service-signals.", append(serviceLabels, "direction"), nil, k8smetrics.ALPHA, "")

	// The registry of Kubernetes has no histograms that are made for a scrape.
	connectTimeDesc = prometheus.NewDesc("tandem_service_connect_duration_seconds", "[ALPHA] Time until a TCP connection of a socket of this node to a service port is established. Only with --ebpf-service-signals.", serviceLabels, nil)
	rttDesc         = prometheus.NewDesc("tandem_service_rtt_seconds", "[ALPHA] Smoothed round-trip time of TCP connections of sockets of this node to a service port, as of when they end. Only with --ebpf-service-signals.", serviceLabels, nil)
)

// collect sends the signals of a service port.
func (s *Signals) collect(ch chan<- k8smetrics.Metric, labels ...string) {
	with := func(label string) []string { return append(append([]string{}, labels...), label) }
	for result, n := range map[string]uint64{"established": s.Established, "refused": s.Refused, "unanswered": s.Unanswered} {
		ch <- k8smetrics.NewLazyConstMetric(connectsDesc, k8smetrics.CounterValue, float64(n), with(result)...)
	}
	for direction, n := range map[string]uint64{"sent": s.Sent, "received": s.Received} {
		ch <- k8smetrics.NewLazyConstMetric(socketBytesDesc, k8smetrics.CounterValue, float64(n), with(direction)...)
	}
	ch <- s.Connect.metric(connectTimeDesc, labels)
	ch <- s.RTT.metric(rttDesc, labels)
}

const microseconds = 1e6 // in a second

func (h *Histogram) metric(desc *prometheus.Desc, labels []string) prometheus.Metric {
	buckets, count := map[float64]uint64{}, uint64(0)
	for i, n := range h.Counts {
		if count += n; i < len(h.Bounds) {
			buckets[float64(h.Bounds[i])/microseconds] = count
		}
	}
	return prometheus.MustNewConstHistogram(desc, count, float64(h.SumMicroseconds)/microseconds, buckets, labels...)
}
