// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

func TestGoName(t *testing.T) {
	for c, want := range map[string]string{
		"FLOW_YOUNG": "FlowYoung", "FLOW_KEPT_TCP": "FlowKeptTCP", "SET_V4_LOCAL": "SetV4Local",
		"KIND_CLUSTER_IP": "KindClusterIP", "REJECT": "Reject", "SNAT_RANGES": "SNATRanges",
	} {
		if got := goName(c); got != want {
			t.Errorf("goName(%s) = %s, want %s", c, got, want)
		}
	}
}
