// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/tc"
)

// What a kernel lacks is left out. What is in a module that nobody needed yet is not
// lacking: the kernel loads it with its first use.
func TestSuit(t *testing.T) {
	report := func(states ...any) *capabilities.Report {
		r := &capabilities.Report{}
		for _, f := range append([]capabilities.Feature{capabilities.TCX, capabilities.Clsact, capabilities.ConntrackLookup, capabilities.SetRetval,
			capabilities.Getpeername4, capabilities.Getpeername6, capabilities.FIBSource}, neededForPackets...) {
			state := capabilities.Yes
			if at := slices.Index(states, any(f)); at >= 0 {
				state = states[at+1].(capabilities.State)
			}
			r.Results = append(r.Results, capabilities.Result{Feature: f, State: state})
		}
		return r
	}
	const no, unsure = capabilities.No, capabilities.Inconclusive
	for _, test := range []struct {
		name   string
		report *capabilities.Report
		want   Options
	}{
		{"everything", report(), Options{}},
		{"no tcx", report(capabilities.TCX, no), Options{TC: tc.Clsact}},
		{"modules not loaded", report(capabilities.TCX, no, capabilities.Clsact, unsure, capabilities.ConntrackLookup, unsure), Options{TC: tc.Clsact}},
		{"neither", report(capabilities.TCX, no, capabilities.Clsact, no), Options{TC: tc.Clsact, NoPackets: true}},
		{"no kfunc", report(capabilities.ConntrackLookup, no), Options{NoConntrack: true}},
		{"one of a pair", report(capabilities.Getpeername6, no), Options{NoGetpeername: true}},
		{"nobody could ask", report(capabilities.SetRetval, unsure), Options{NoSetRetval: true}},
		{"no atomics", report(capabilities.Atomics, no), Options{NoPackets: true}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got Options
			got.Suit(test.report)
			got.NoLoop = false // this kernel was asked
			if got.TC != test.want.TC || got.NoPackets != test.want.NoPackets || got.NoConntrack != test.want.NoConntrack ||
				got.NoGetpeername != test.want.NoGetpeername || got.NoSetRetval != test.want.NoSetRetval || got.NoFIBSource {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}
