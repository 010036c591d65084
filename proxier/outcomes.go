// SPDX-License-Identifier: Apache-2.0

package proxier

// Outcomes are what became of connections to a service port, and of datagrams that needed a backend. Rejected and Dropped are those that
// the proxy itself refused.
type Outcomes struct{ Connections, Rejected, Dropped uint64 }

// Plus is the sum of both.
func (o Outcomes) Plus(p Outcomes) Outcomes {
	return Outcomes{o.Connections + p.Connections, o.Rejected + p.Rejected, o.Dropped + p.Dropped}
}
