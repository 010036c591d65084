// SPDX-License-Identifier: Apache-2.0

package app

import (
	"reflect"
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// The defaults of the configuration are those of the eBPF tier, and every size and timeout
// of the tier can be configured.
func TestEBPFDefaults(t *testing.T) {
	c := config.New()
	opts, err := ebpfOptions(c, &capabilities.Report{})
	if err != nil {
		t.Fatal(err)
	}
	if want := lbmap.DefaultSizes(); opts.Sizes != want {
		t.Errorf("sizes %+v, want %+v", opts.Sizes, want)
	}
	// Timeouts that are 0 in the configuration leave the tier's default in force.
	want := flowtable.DefaultTimeouts()
	want.UDP, want.UDPStream = 0, 0
	if opts.Timeouts != want {
		t.Errorf("timeouts %+v, want %+v", opts.Timeouts, want)
	}
	if want := (datapath.PortRange{First: 30000, Last: 32767}); opts.NodePortRange != want {
		t.Errorf("node port range %v, want %v", opts.NodePortRange, want)
	}
	sizes := reflect.ValueOf(opts.Sizes)
	for i := range sizes.NumField() {
		if sizes.Field(i).IsZero() {
			t.Errorf("size %s is not in the configuration", sizes.Type().Field(i).Name)
		}
	}
}

// What a kernel lacks is turned off. What is in a module that is not loaded is not
// missing: the kernel loads it on first use.
func TestDisableMissing(t *testing.T) {
	report := func(states ...any) *capabilities.Report {
		r := &capabilities.Report{}
		for _, f := range append([]capabilities.Feature{capabilities.TCX, capabilities.Clsact, capabilities.ConntrackLookup, capabilities.SetRetval,
			capabilities.Getpeername4, capabilities.Getpeername6, capabilities.FIBSource}, packetFeatures...) {
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
		want   ebpf.Options
	}{
		{"everything", report(), ebpf.Options{}},
		{"no tcx", report(capabilities.TCX, no), ebpf.Options{TC: tc.Clsact}},
		{"modules not loaded", report(capabilities.TCX, no, capabilities.Clsact, unsure, capabilities.ConntrackLookup, unsure), ebpf.Options{TC: tc.Clsact}},
		{"neither", report(capabilities.TCX, no, capabilities.Clsact, no), ebpf.Options{TC: tc.Clsact, NoPackets: true}},
		{"no kfunc", report(capabilities.ConntrackLookup, no), ebpf.Options{NoConntrack: true}},
		{"one of a pair", report(capabilities.Getpeername6, no), ebpf.Options{NoGetpeername: true}},
		{"probe without answer", report(capabilities.SetRetval, unsure), ebpf.Options{NoSetRetval: true}},
		{"no atomics", report(capabilities.Atomics, no), ebpf.Options{NoPackets: true}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got ebpf.Options
			disableMissing(&got, test.report)
			got.NoLoop = false // this kernel was asked
			if !reflect.DeepEqual(got, test.want) {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}
