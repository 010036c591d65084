// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/tandem-proxy/tandem/kernel/xtables"
)

func TestProgram(t *testing.T) {
	for _, tt := range []struct {
		name    string
		variant xtables.Variant
		want    string
	}{
		{"iptables", xtables.NFT, "iptables-nft"},
		{"iptables-save", xtables.NFT, "iptables-nft-save"},
		{"ip6tables-restore", xtables.Legacy, "ip6tables-legacy-restore"},
	} {
		if got := program(tt.name, tt.variant); got != tt.want {
			t.Errorf("%s of %s: %s, want %s", tt.name, tt.variant, got, tt.want)
		}
	}
}
