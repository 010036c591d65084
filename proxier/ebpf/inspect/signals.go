// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// SignalsView is what TCP connections of sockets of this node to a service port came to.
type SignalsView struct {
	Established uint64 `json:"established"`
	Refused     uint64 `json:"refused"`
	Unanswered  uint64 `json:"unanswered"`
	// Of connections that ended.
	SentBytes     uint64 `json:"sentBytes"`
	ReceivedBytes uint64 `json:"receivedBytes"`
	// Connect is the time until they are established, RTT the smoothed round-trip time when they end.
	Connect TimesView `json:"connect"`
	RTT     TimesView `json:"rtt"`
}

// TimesView sums up a histogram. Quantiles are the upper bounds of buckets in seconds, and null where they are above all bounds or
// there are no times.
type TimesView struct {
	Count         uint64   `json:"count"`
	SumSeconds    float64  `json:"sumSeconds"`
	MedianSeconds *float64 `json:"medianSeconds"`
	P99Seconds    *float64 `json:"p99Seconds"`
}

// signals are those of a service port; nil if it has none.
func (i *Inspector) signals(service uint32) (*SignalsView, error) {
	m := i.Maps["tdm_signals"]
	if m == nil {
		return nil, nil
	}
	s, err := lbmap.NewSignalMap(m).Of(service)
	if err != nil || s.Established+s.Refused+s.Unanswered == 0 {
		return nil, err
	}
	return &SignalsView{
		Established: s.Established, Refused: s.Refused, Unanswered: s.Unanswered, SentBytes: s.Sent, ReceivedBytes: s.Received,
		Connect: viewTimes(&s.Connect), RTT: viewTimes(&s.Rtt),
	}, nil
}

func viewTimes(h *lbmap.Histogram) TimesView {
	const microseconds = 1e6 // in a second
	v := TimesView{SumSeconds: float64(h.SumUs) / microseconds}
	for _, n := range h.Buckets {
		v.Count += n
	}
	quantile := func(share float64) *float64 {
		var below uint64
		for i, bound := range lbmap.SignalBounds {
			if below += h.Buckets[i]; v.Count > 0 && float64(below) >= share*float64(v.Count) {
				seconds := float64(bound) / microseconds
				return &seconds
			}
		}
		return nil
	}
	v.MedianSeconds, v.P99Seconds = quantile(0.5), quantile(0.99)
	return v
}
