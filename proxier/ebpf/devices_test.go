// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"maps"
	"testing"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/test/kernel"
)

// TestProgramsKeepConntrack: programs are loaded without calls to the kernel's conntrack only if
// those calls are why they cannot be loaded.
func TestProgramsKeepConntrack(t *testing.T) {
	kernel.Needs(t, capabilities.ConntrackLookup)
	p := newPath(t, Options{})
	all := maps.Clone(p.maps)
	packets := datapath.NewDevices(all, deviceOptionsOf(t, p.tier))
	defer packets.Close()
	delete(all, "tdm_backend")
	if _, err := packets.Programs(t.Context(), datapath.Variant{}); err == nil {
		t.Fatal("programs without a map that they use were loaded")
	}
	all["tdm_backend"] = p.maps["tdm_backend"]
	if _, err := packets.Programs(t.Context(), datapath.Variant{}); err != nil || packets.NoConntrack {
		t.Errorf("conntrack not used: %v, error %v", packets.NoConntrack, err)
	}
}

func deviceOptionsOf(t *testing.T, tier *Tier) datapath.DeviceOptions {
	t.Helper()
	opts, err := tier.deviceOptions(tier.sizes, tier.flowTable)
	if err != nil {
		t.Fatal(err)
	}
	return opts
}
