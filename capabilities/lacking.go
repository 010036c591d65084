// SPDX-License-Identifier: Apache-2.0

package capabilities

// neededForPackets are what the packet programs cannot do without.
var neededForPackets = []Feature{Atomics, RedirectNeigh, FIBLookup, KtimeCoarse}

// MissingForPackets is what the kernel lacks for programs that translate packets on devices.
func (r Report) MissingForPackets() (missing []string) {
	for _, f := range neededForPackets {
		if !r.Has(f) {
			missing = append(missing, string(f))
		}
	}
	if !r.Has(TCX) && r.lacks(Clsact) {
		missing = append(missing, string(TCX)+" or "+string(Clsact))
	}
	return missing
}

// Lacking says what eBPF programs have to do without on a kernel. What could not be probed
// is lacking too: programs that use it might not load, and without it they always do.
type Lacking struct {
	// Packets: no programs on devices at all.
	Packets bool
	// TCX: programs are attached to devices by clsact.
	TCX                                          bool
	SetRetval, Getpeername, FIBSource, Conntrack bool
}

// Lacking says what eBPF programs have to do without.
func (r Report) Lacking() Lacking {
	return Lacking{
		Packets:     len(r.MissingForPackets()) > 0,
		TCX:         !r.Has(TCX),
		SetRetval:   !r.Has(SetRetval),
		Getpeername: !r.Has(Getpeername4) || !r.Has(Getpeername6),
		FIBSource:   !r.Has(FIBSource),
		Conntrack:   r.lacks(ConntrackLookup),
	}
}

// lacks is for features in modules that the kernel loads when they are used: whether they
// work is seen then.
func (r Report) lacks(f Feature) bool {
	result, known := r.Lookup(f)
	return !known || result.State == No
}
