// SPDX-License-Identifier: Apache-2.0

package app

import (
	"net"
	"strconv"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/successor"
)

// dispatches are the values of dsrDispatch.
var dispatches = map[string]lbmap.Dispatch{config.DispatchIPIP: lbmap.DispatchIPIP, config.DispatchGeneve: lbmap.DispatchGeneve, config.DispatchOpt: lbmap.DispatchOpt}

// ebpfOptions are what the configuration says, without what the kernel lacks.
func (h *host) ebpfOptions() (opts ebpf.Options, err error) {
	c := h.config
	e := &c.Tandem.EBPF
	opts = ebpf.Options{
		Sizes: ebpfSizes(e), Shared: c.Tandem.Coexistence.Enabled(), ProcRoot: e.ProcRoot,
		ResetRemoved: e.ResetRemovedBackends, Dispatch: dispatches[c.Tandem.LoadBalancer.DSRDispatch], PodDevices: e.PodDevices, ProtectNodePorts: *e.ProtectNodePorts, TCPPeerIsEndpoint: !*e.TCPPeerNames, Signals: e.ServiceSignals, Timeouts: flowTimeouts(c),
	}
	opts.Acceleration = map[string]datapath.Acceleration{config.AccelerationBestEffort: datapath.BestEffort, config.AccelerationNative: datapath.Native}[e.Acceleration]
	memory := machineMemory()
	deriveFlowSizes(&opts.Sizes, conntrackLimit(conntrackSettings(c)), memory)
	if !e.PreallocateMaps {
		if opts.Start, opts.MaxMemory, err = mapGrowth(opts.Sizes.WithDefaults(), e.MaxMapMemory, memory); err != nil {
			return opts, err // validated before
		}
	}
	nodePorts, err := config.ParsePortRange(e.NodePortRange)
	if err != nil {
		return opts, err // validated before
	}
	opts.NodePortRange = datapath.PortRange(nodePorts)
	if opts.DirectSources, err = config.ParseSourceCIDR(c.Tandem.LoadBalancer.DSRSourceCIDR); err != nil {
		return opts, err // validated before
	}
	opts.YieldGrace = e.YieldGracePeriod.Duration
	opts.Ports = successorPorts(c)
	for o, why := range h.leftClients() {
		opts.Left[o] = why != nil
	}
	disableMissing(&opts, &h.report)
	return opts, nil
}

// successorPorts are those of another kube-proxy that takes over when this process is gone: the same, as the
// configuration is, but beside one that stays.
func successorPorts(c *config.Config) successor.Ports {
	if c.Tandem.Coexistence.Enabled() {
		return successor.Ports{Health: config.HealthzPort, Metrics: config.MetricsPort}
	}
	return successor.Ports{Health: serverPort(c.KubeProxy.HealthzBindAddress), Metrics: serverPort(c.KubeProxy.MetricsBindAddress)}
}

// serverPort is the port of a server's address; 0 without one.
func serverPort(address string) uint16 {
	_, text, err := net.SplitHostPort(address)
	if err != nil {
		return 0 // empty; others are validated before
	}
	port, _ := strconv.ParseUint(text, 10, 16) // as above
	return uint16(port)
}

// ebpfSizes are the capacities of the maps.
func ebpfSizes(e *config.EBPFConfiguration) lbmap.Sizes {
	return lbmap.Sizes{
		Frontends: e.MaxFrontends, Services: e.MaxServices, Backends: e.MaxBackends, Slots: e.MaxSlots,
		Ranges: e.MaxRanges, Locals: e.MaxLocals, Affinity: e.MaxAffinity, UDPPeers: e.MaxUDPPeers,
		TCPFlows: e.MaxTCPFlows, UDPFlows: e.MaxUDPFlows, YoungFlows: e.MaxYoungFlows, OptOuts: e.MaxOptOuts,
	}
}

// flowTimeouts are those of connections from outside the node. The conntrack section has
// most of them, and the rest are of mode ebpf alone.
func flowTimeouts(c *config.Config) flowtable.Timeouts {
	e, k := &c.Tandem.EBPF, &c.KubeProxy.Conntrack
	t := flowtable.Timeouts{
		Opening: e.TCPOpeningTimeout.Duration, Closed: e.TCPClosedTimeout.Duration,
		UDP: k.UDPTimeout.Duration, UDPStream: k.UDPStreamTimeout.Duration,
	}
	if d := k.TCPEstablishedTimeout; d != nil {
		t.Established = d.Duration
	}
	if d := k.TCPCloseWaitTimeout; d != nil {
		t.CloseWait = d.Duration
	}
	return t
}

// packetFeatures are what the packet programs cannot run without.
var packetFeatures = []capabilities.Feature{capabilities.Atomics, capabilities.RedirectNeigh, capabilities.FIBLookup, capabilities.KtimeCoarse}

// missingForPackets is what a kernel lacks to have programs translate packets.
func missingForPackets(report *capabilities.Report) (missing []string) {
	for _, f := range packetFeatures {
		if !report.Has(f) {
			missing = append(missing, string(f))
		}
	}
	if !report.Has(capabilities.TCX) && isAbsent(report, capabilities.Clsact) {
		missing = append(missing, string(capabilities.TCX)+" or "+string(capabilities.Clsact))
	}
	return missing
}

// isAbsent is for features in modules, which the kernel loads on first use: a probe that
// got no answer does not count as absent.
func isAbsent(report *capabilities.Report, f capabilities.Feature) bool {
	result, known := report.Lookup(f)
	return !known || result.State == capabilities.No
}

// disableMissing turns off what the kernel lacks, and what no probe could confirm: a
// program that uses it might not load, and without it the program always does.
func disableMissing(o *ebpf.Options, report *capabilities.Report) {
	disable := func(off *bool, needs ...capabilities.Feature) {
		for _, f := range needs {
			*off = *off || !report.Has(f)
		}
	}
	disable(&o.NoSetRetval, capabilities.SetRetval)
	disable(&o.NoGetpeername, capabilities.Getpeername4, capabilities.Getpeername6)
	disable(&o.NoFIBSource, capabilities.FIBSource)
	disable(&o.NoLoop, capabilities.Loop)
	disable(&o.NoHold, capabilities.NetfilterHook)
	o.NoConntrack = o.NoConntrack || isAbsent(report, capabilities.ConntrackLookup)
	if o.TC == tc.TCX && !report.Has(capabilities.TCX) {
		o.TC = tc.Clsact
	}
}
