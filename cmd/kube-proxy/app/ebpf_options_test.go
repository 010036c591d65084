// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"reflect"
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// The defaults of the configuration are those of the eBPF tier, and every size and timeout
// of the tier can be configured.
func TestEBPFDefaults(t *testing.T) {
	c := config.New()
	opts, err := (&host{config: c}).ebpfOptions()
	if err != nil {
		t.Fatal(err)
	}
	defaults := lbmap.DefaultSizes()
	defaults.TCPFlows, defaults.UDPFlows, defaults.YoungFlows = opts.Sizes.TCPFlows, opts.Sizes.UDPFlows, opts.Sizes.YoungFlows // TestDeriveFlowSizes
	if opts.Sizes != defaults {
		t.Errorf("sizes %+v, want %+v", opts.Sizes, defaults)
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
	report := reportOf
	const no, unsure = capabilities.No, capabilities.Inconclusive
	for _, test := range []struct {
		name   string
		report *capabilities.Report
		want   ebpf.Options
	}{
		{"everything", report(), ebpf.Options{}},
		{"no tcx", report(capabilities.TCX, no), ebpf.Options{TC: tc.Clsact}},
		{"modules not loaded", report(capabilities.TCX, no, capabilities.Clsact, unsure, capabilities.ConntrackLookup, unsure), ebpf.Options{TC: tc.Clsact}},
		{"no kfunc", report(capabilities.ConntrackLookup, no), ebpf.Options{NoConntrack: true}},
		{"Linux 5.15", report(capabilities.Loop, no, capabilities.NetfilterHook, no), ebpf.Options{NoLoop: true, NoHold: true}},
		{"one of a pair", report(capabilities.Getpeername6, no), ebpf.Options{NoGetpeername: true}},
		{"probe without answer", report(capabilities.SetRetval, unsure), ebpf.Options{NoSetRetval: true}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got ebpf.Options
			disableMissing(&got, test.report)
			if !reflect.DeepEqual(got, test.want) {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

// reportOf has every feature, but for those that are followed by another state.
func reportOf(states ...any) *capabilities.Report {
	r := &capabilities.Report{}
	for _, f := range append([]capabilities.Feature{capabilities.TCX, capabilities.Clsact, capabilities.ConntrackLookup, capabilities.SetRetval,
		capabilities.Getpeername4, capabilities.Getpeername6, capabilities.FIBSource, capabilities.Loop, capabilities.NetfilterHook}, packetFeatures...) {
		state := capabilities.Yes
		if at := slices.Index(states, any(f)); at >= 0 {
			state = states[at+1].(capabilities.State)
		}
		r.Results = append(r.Results, capabilities.Result{Feature: f, State: state})
	}
	return r
}

// Clients are left to others for the first of several reasons.
func TestLeftClients(t *testing.T) {
	const no = capabilities.No
	shared := func(preset string) func(*config.Config) {
		return func(c *config.Config) { c.Tandem.Coexistence.Preset = preset }
	}
	for _, test := range []struct {
		name     string
		change   func(*config.Config)
		report   *capabilities.Report
		hasIPsec bool
		want     [proxier.Origins]error
	}{
		{"nothing", func(*config.Config) {}, reportOf(), false, [proxier.Origins]error{}},
		{"no tcx and no clsact", func(*config.Config) {}, reportOf(capabilities.TCX, no, capabilities.Clsact, no), false, [proxier.Origins]error{proxier.FromOutside: errNoPackets}},
		{"no atomics", func(*config.Config) {}, reportOf(capabilities.Atomics, no), false, [proxier.Origins]error{proxier.FromOutside: errNoPackets}},
		{"sockets of the host alone", func(c *config.Config) { c.Tandem.EBPF.SocketLB = config.SocketLBHost }, reportOf(), false, [proxier.Origins]error{proxier.FromPod: errPodsLeftOut}},
		{"IPsec", func(*config.Config) {}, reportOf(), true, [proxier.Origins]error{proxier.FromOutside: errIPsec}},
		{"socket-lb and IPsec", shared(config.CoexistSocketLB), reportOf(), true, [proxier.Origins]error{proxier.FromOutside: errClients}},
		{"socket-lb", shared(config.CoexistSocketLB), reportOf(capabilities.Atomics, no), false, [proxier.Origins]error{proxier.FromOutside: errClients}},
		{"north-south", shared(config.CoexistNorthSouth), reportOf(), false, [proxier.Origins]error{proxier.FromPod: errClients, proxier.FromHost: errClients}},
		{"a list", func(c *config.Config) {
			c.Tandem.Coexistence.Clients = []string{config.CoexistHost, config.CoexistExternal}
		}, reportOf(capabilities.Atomics, no), false,
			[proxier.Origins]error{proxier.FromPod: errClients, proxier.FromOutside: errNoPackets}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := config.New()
			test.change(c)
			h := &host{config: c, report: *test.report, hasIPsec: test.hasIPsec}
			got := h.leftClients()
			opts, err := h.ebpfOptions()
			if err != nil {
				t.Fatal(err)
			}
			for o := range proxier.Origins {
				if !errors.Is(got[o], test.want[o]) || opts.Left[o] != (test.want[o] != nil) {
					t.Errorf("%s: %v, left %v; want %v", o, got[o], opts.Left[o], test.want[o])
				}
			}
		})
	}
}
