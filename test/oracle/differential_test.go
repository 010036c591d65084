// SPDX-License-Identifier: Apache-2.0

package oracle

import "testing"

// TestDifferential plays random histories to the table and compares what it
// says with the oracle: about flows, frontends and health checks, and that what
// it reports as changed is what did. For a night of it:
//
//	go test ./test/oracle -timeout=0 -oracle.flows=1000000000
func TestDifferential(t *testing.T) {
	t.Parallel()
	Worlds{Share: 1, Steps: 15, Flows: 60, Events: Small}.Run(t)
}

// TestDifferentialLarge has a Service with thousands of endpoints, for which
// the table keeps the endpoints of all slices merged.
func TestDifferentialLarge(t *testing.T) {
	t.Parallel()
	Worlds{Share: 200, Steps: 30, Flows: 3, Events: Large}.Run(t)
}
