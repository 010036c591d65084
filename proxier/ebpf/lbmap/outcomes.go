// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"sync/atomic"

	"github.com/tandem-proxy/tandem/proxier"
)

// Outcomes for clients on this node and outside, while programs count.
func (s *ServiceStats) Outcomes() (node, outside proxier.Outcomes) {
	return proxier.Outcomes{Connections: atomic.LoadUint64(&s.Connections), Rejected: atomic.LoadUint64(&s.Rejected), Dropped: atomic.LoadUint64(&s.Dropped)},
		proxier.Outcomes{Connections: atomic.LoadUint64(&s.OutsideConnections), Rejected: atomic.LoadUint64(&s.OutsideRejected), Dropped: atomic.LoadUint64(&s.OutsideDropped)}
}
