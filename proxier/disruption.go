// SPDX-License-Identifier: Apache-2.0

package proxier

import "time"

// Disruption is what a change of a Maglev table means for connections whose state a node does not have.
type Disruption struct {
	Name  ServicePortName
	Set   Set
	Slots int // of the new table
	// Moved is the share of connections, 0 to 1, that the new table leads to another backend than the one before.
	Moved float64
	At    time.Time
}
