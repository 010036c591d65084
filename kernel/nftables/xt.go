// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"slices"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// The nft variant of iptables keeps some matches and targets in the binary form of the legacy one
// (include/uapi/linux/netfilter/xt_*.h).

// dropTargets end the way of a packet, or hand it to a process.
var dropTargets = []string{"DROP", "REJECT", "QUEUE", "NFQUEUE", "TPROXY", "TARPIT", "STEAL", "SYNPROXY"}

// IsDropTarget reports whether a target of iptables ends the way of a packet, or hands it to a process.
func IsDropTarget(name string) bool { return slices.Contains(dropTargets, name) }

// xtMatch reads a match. Status is set if it depends on whether connections were translated.
func xtMatch(name string, revision uint32, b []byte, status *bool) (m inet.Match, exact, some bool) {
	port := func(at int) uint16 { return binary.NativeEndian.Uint16(b[at:]) }
	switch {
	case name == "rpfilter":
		return m, false, false
	case name == "comment":
		return m, true, true
	case name == "tcp" && len(b) >= 12:
		// spts, dpts, option, flg_mask, flg_cmp, invflags
		const invertDestination, invertFlags = 0x02, 0x04
		if b[11]&invertDestination == 0 {
			m.Ports = portsBetween(port(4), port(6))
		}
		first := byte(firstTCPFlags)&b[9] == b[10]
		return m, false, first != (b[11]&invertFlags != 0)
	case name == "udp" && len(b) >= 9:
		const invertDestination = 0x02
		if b[8]&invertDestination == 0 {
			m.Ports = portsBetween(port(4), port(6))
		}
	case name == "multiport" && revision == 1 && len(b) >= 48:
		// flags, count, ports[15], pflags[15], invert
		const destination = 1
		count := int(b[1])
		if b[0] != destination || count > 15 || b[47] != 0 {
			break
		}
		for i := 0; i < count; i++ {
			r := inet.PortRange{First: port(2 + 2*i), Last: port(2 + 2*i)}
			if b[32+i] != 0 && i+1 < count { // the first of a range
				i++
				r.Last = port(2 + 2*i)
			}
			m.Ports = append(m.Ports, r)
		}
		return m, true, true
	case name == "conntrack" && revision >= 2 && len(b) >= 154:
		const stateFlag, statusFlag = 1 << 0, 1 << 1
		flags, inverted, states := port(146), port(148), port(150)
		*status = *status || flags&statusFlag != 0 || flags&stateFlag != 0 && states&xtDNAT != 0
		if flags&stateFlag != 0 && inverted&stateFlag == 0 {
			return m, false, states&(xtNew|xtUntracked|xtSNAT|xtDNAT) != 0
		}
	}
	return m, false, true
}

// portsBetween is nil for all ports.
func portsBetween(first, last uint16) []inet.PortRange {
	if first == 0 && last == 1<<16-1 {
		return nil
	}
	return []inet.PortRange{{First: first, Last: last}}
}
