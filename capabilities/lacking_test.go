// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"slices"
	"testing"
)

// What is in a module that is not loaded yet is not
// lacking: the kernel loads it with its first use.
func TestLacking(t *testing.T) {
	report := func(states ...any) *Report {
		r := &Report{}
		for _, f := range append([]Feature{TCX, Clsact, ConntrackLookup, SetRetval,
			Getpeername4, Getpeername6, FIBSource}, neededForPackets...) {
			state := Yes
			if at := slices.Index(states, any(f)); at >= 0 {
				state = states[at+1].(State)
			}
			r.Results = append(r.Results, Result{Feature: f, State: state})
		}
		return r
	}
	const no, unsure = No, Inconclusive
	for _, test := range []struct {
		name   string
		report *Report
		want   Lacking
	}{
		{"everything", report(), Lacking{}},
		{"no tcx", report(TCX, no), Lacking{TCX: true}},
		{"modules not loaded", report(TCX, no, Clsact, unsure, ConntrackLookup, unsure), Lacking{TCX: true}},
		{"neither", report(TCX, no, Clsact, no), Lacking{TCX: true, Packets: true}},
		{"no kfunc", report(ConntrackLookup, no), Lacking{Conntrack: true}},
		{"one of a pair", report(Getpeername6, no), Lacking{Getpeername: true}},
		{"not probed", report(SetRetval, unsure), Lacking{SetRetval: true}},
		{"no atomics", report(Atomics, no), Lacking{Packets: true}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := test.report.Lacking(); got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}
