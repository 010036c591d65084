// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/tc"
)

// neededForPackets are what the packet programs cannot do without.
var neededForPackets = []capabilities.Feature{capabilities.Atomics, capabilities.RedirectNeigh, capabilities.FIBLookup, capabilities.KtimeCoarse}

// MissingForPackets is what a kernel lacks to have programs translate packets.
func MissingForPackets(report *capabilities.Report) (missing []string) {
	for _, f := range neededForPackets {
		if !report.Has(f) {
			missing = append(missing, string(f))
		}
	}
	if !report.Has(capabilities.TCX) && isLacking(report, capabilities.Clsact) {
		missing = append(missing, string(capabilities.TCX)+" or "+string(capabilities.Clsact))
	}
	return missing
}

// isLacking is for what is in modules that the kernel loads when they are used: whether
// it works is seen then.
func isLacking(report *capabilities.Report, f capabilities.Feature) bool {
	result, known := report.Lookup(f)
	return !known || result.State == capabilities.No
}

// Suit leaves out what a kernel does not have, and what nobody could ask it about: the
// programs that use it might not load, and without it they always do.
func (o *Options) Suit(report *capabilities.Report) {
	lacks := func(out *bool, list ...capabilities.Feature) {
		for _, f := range list {
			*out = *out || !report.Has(f)
		}
	}
	lacks(&o.NoSetRetval, capabilities.SetRetval)
	lacks(&o.NoGetpeername, capabilities.Getpeername4, capabilities.Getpeername6)
	lacks(&o.NoFIBSource, capabilities.FIBSource)
	o.NoConntrack = o.NoConntrack || isLacking(report, capabilities.ConntrackLookup)
	o.NoLoop = o.NoLoop || features.HaveProgramHelper(ebpf.SchedCLS, asm.FnLoop) != nil
	o.NoPackets = o.NoPackets || len(MissingForPackets(report)) > 0
	if o.TC == tc.TCX && !report.Has(capabilities.TCX) {
		o.TC = tc.Clsact
	}
}
