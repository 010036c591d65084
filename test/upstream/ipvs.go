// SPDX-License-Identifier: Apache-2.0

//go:build linux

package upstream

import (
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier/ipvs"
	"github.com/tandem-proxy/tandem/test/lab"
)

// NeedsIPVS skips a test if the kernel has no IPVS.
func NeedsIPVS(tb lab.TB, n *lab.Node) {
	tb.Helper()
	tools, err := xtables.New(xtables.NFT)
	if err != nil {
		lab.SkipOrFail(tb, err)
	}
	if err := n.Do(func() error { return ipvs.CanUse(tb.Context(), ipvs.Options{Tools: tools}) }); err != nil {
		lab.SkipOrFailModule(tb, err)
	}
}
