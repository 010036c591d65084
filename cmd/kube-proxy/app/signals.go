// SPDX-License-Identifier: Apache-2.0

package app

import (
	"github.com/tandem-proxy/tandem/observe/metrics"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// signals are those of a service port, for metrics; nil if connections are not watched.
func (d *ebpfDatapath) signals(protocol string, s *lbmap.ServiceSignals) *metrics.Signals {
	if protocol != proxier.TCP.String() || !d.config.Tandem.EBPF.ServiceSignals {
		return nil
	}
	times := func(h *lbmap.Histogram) metrics.Histogram {
		return metrics.Histogram{SumMicroseconds: h.SumUs, Bounds: lbmap.SignalBounds[:], Counts: h.Buckets[:]}
	}
	return &metrics.Signals{
		Established: s.Established, Refused: s.Refused, Unanswered: s.Unanswered, Sent: s.Sent, Received: s.Received,
		Connect: times(&s.Connect), RTT: times(&s.Rtt),
	}
}
