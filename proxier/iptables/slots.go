// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"net/netip"

	"github.com/tandem-proxy/tandem/proxier"
)

// sharedName is one of the chains that all service ports share.
type sharedName uint8

const (
	servicesNAT sharedName = iota
	nodePortsNAT
	servicesFilter
	externalServicesFilter
	nodePortsFilter
	firewallFilter
	healthChecksFilter
	sharedCount
)

var sharedNames = [sharedCount]struct {
	table, chain string
	// slots begins the names of the chains that a long one is split into. In nat these look
	// like chains of service ports: upstream, when it takes over, deletes chains with such
	// names. Others would stay, and keep the chains that they lead to from being deleted.
	slots  string
	byPort bool
}{
	servicesNAT:            {"nat", servicesChain, clusterPrefix + "SLOT-", false},
	nodePortsNAT:           {"nat", nodePortsChain, externalPrefix + "SLOT-", true},
	servicesFilter:         {"filter", servicesChain, servicesChain + "-", false},
	externalServicesFilter: {"filter", externalServicesChain, externalServicesChain + "-", false},
	nodePortsFilter:        {"filter", externalNodePortsChain, externalNodePortsChain + "-", true},
	firewallFilter:         {"filter", proxyFirewallChain, proxyFirewallChain + "-", false},
	healthChecksFilter:     {"filter", nodePortsChain, nodePortsChain + "-", true},
}

// slot is the part of a shared chain that a rule is in: that of the addresses which end in
// the same bits, or of neighbouring ports.
type slot uint32

const (
	addrSlots    = 128
	portsPerSlot = 64
)

func addrSlot(a netip.Addr) slot {
	b := a.AsSlice()
	return slot(b[len(b)-1] % addrSlots)
}

func portSlot(protocol proxier.Protocol, port uint16) slot {
	return slot(protocol)<<16 | slot(port/portsPerSlot)
}

// slotChain is the chain of a slot where the shared chain is split.
func slotChain(name sharedName, s slot) string {
	if sharedNames[name].byPort {
		return fmt.Sprintf("%s%d-%d", sharedNames[name].slots, s>>16, s&0xffff*portsPerSlot)
	}
	return fmt.Sprintf("%s%02X", sharedNames[name].slots, uint32(s))
}

// slotJump is the rule of a split chain that leads to a slot.
func slotJump(name sharedName, family proxier.Family, s slot) string {
	r := rule{target: slotChain(name, s)}
	switch {
	case sharedNames[name].byPort:
		first := int(s&0xffff) * portsPerSlot
		r.protocol, r.port = proxier.Protocol(s>>16), fmt.Sprintf("%d:%d", first, first+portsPerSlot-1)
	case family == proxier.IPv6:
		r.dest = fmt.Sprintf("%s/%s", lowByte(byte(s)), lowByte(addrSlots-1))
	default:
		r.dest = fmt.Sprintf("0.0.0.%d/0.0.0.%d", s, addrSlots-1)
	}
	return r.String()
}

// lowByte is the IPv6 address that has nothing but its last byte.
func lowByte(b byte) netip.Addr { return netip.AddrFrom16([16]byte{15: b}) }
