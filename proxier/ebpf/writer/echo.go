// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// echoAddrs are the addresses at which programs answer echo requests. An address usually has
// several frontends.
type echoAddrs struct{ mirror[[4]uint32, uint8] }

func newEchoAddrs(table lbmap.SmallMap[[4]uint32, uint8]) echoAddrs {
	return echoAddrs{newMirror(table, func(addr [4]uint32) string { return "enable echo replies of " + lbmap.ToAddr(addr).String() })}
}

func answersEcho(f lbmap.FrontendEntry) bool {
	return proxier.Kind(f.Value.Flags >> lbmap.FrontendKindShift).AnswersEcho()
}

// replace updates the number of frontends per address, after those of a service port changed.
func (e *echoAddrs) replace(before, after []lbmap.FrontendEntry) {
	for _, f := range after {
		if answersEcho(f) {
			e.use(f.Key.Addr, 1, 1)
		}
	}
	for _, f := range before {
		if answersEcho(f) {
			e.use(f.Key.Addr, 1, -1)
		}
	}
}
