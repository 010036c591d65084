// SPDX-License-Identifier: Apache-2.0

package proxier

// Outcomes counts connections to a service port by result; for UDP, flows and datagrams of unconnected sockets that need a backend.
// The proxy itself refuses those in Rejected (by a reset or an ICMP error) and Dropped (without an answer).
type Outcomes struct{ Connections, Rejected, Dropped uint64 }

// Plus is the sum of both.
func (o Outcomes) Plus(p Outcomes) Outcomes {
	return Outcomes{o.Connections + p.Connections, o.Rejected + p.Rejected, o.Dropped + p.Dropped}
}
