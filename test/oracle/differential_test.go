// SPDX-License-Identifier: Apache-2.0

package oracle

import "testing"

// TestDifferential plays random histories on the table and compares it with the oracle:
// flows, frontends, health checks, and reported changes. To run it for a night:
//
//	go test ./test/oracle -timeout=0 -oracle.flows=1000000000
func TestDifferential(t *testing.T) {
	t.Parallel()
	Worlds{Share: 1, Steps: 15, Flows: 60, Events: Small}.Run(t)
}

// TestDifferentialLarge uses a Service with thousands of endpoints, for which the table
// keeps a merged list of the endpoints of all slices.
func TestDifferentialLarge(t *testing.T) {
	t.Parallel()
	Worlds{Share: 200, Steps: 30, Flows: 3, Events: Large}.Run(t)
}
