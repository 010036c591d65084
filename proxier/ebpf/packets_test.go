// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"maps"
	"testing"
)

// Programs do without the kernel's conntrack only if that is why they cannot be loaded.
func TestProgramsKeepConntrack(t *testing.T) {
	p := newPath(t, Options{})
	all := maps.Clone(p.maps)
	packets := newPackets(all, deviceOptionsOf(t, p.tier))
	defer packets.close()
	delete(all, "tdm_backend")
	if _, err := packets.programs(t.Context(), variant{}); err == nil {
		t.Fatal("programs without a map that they use were loaded")
	}
	all["tdm_backend"] = p.maps["tdm_backend"]
	if _, err := packets.programs(t.Context(), variant{}); err != nil || packets.noConntrack {
		t.Errorf("without conntrack: %v, %v", packets.noConntrack, err)
	}
}

func deviceOptionsOf(t *testing.T, tier *Tier) DeviceOptions {
	t.Helper()
	opts, err := tier.deviceOptions()
	if err != nil {
		t.Fatal(err)
	}
	return opts
}
