// SPDX-License-Identifier: Apache-2.0

package lbmap

import "sync/atomic"

// Outcomes are what became of connections, and of datagrams that needed a backend.
type Outcomes struct{ Connections, Rejected, Dropped uint64 }

// Plus is the sum of both.
func (o Outcomes) Plus(p Outcomes) Outcomes {
	return Outcomes{o.Connections + p.Connections, o.Rejected + p.Rejected, o.Dropped + p.Dropped}
}

// Outcomes for clients on this node and outside, while programs count.
func (s *ServiceStats) Outcomes() (node, outside Outcomes) {
	return Outcomes{atomic.LoadUint64(&s.Connections), atomic.LoadUint64(&s.Rejected), atomic.LoadUint64(&s.Dropped)},
		Outcomes{atomic.LoadUint64(&s.OutsideConnections), atomic.LoadUint64(&s.OutsideRejected), atomic.LoadUint64(&s.OutsideDropped)}
}
