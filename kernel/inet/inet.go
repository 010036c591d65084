// SPDX-License-Identifier: Apache-2.0

// Package inet defines the value types that the Service model and the kernel packages
// share: address families, transport protocols, and sets of packets by destination.
package inet

import (
	"fmt"
	"net/netip"
)

// Protocol is an IANA protocol number.
type Protocol uint8

// The protocols of Services.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	}
	return fmt.Sprintf("protocol %d", uint8(p))
}

// Family is an IP address family.
type Family uint8

// The families, usable as indexes of an array of length Families.
const (
	IPv4 Family = iota
	IPv6
	Families
)

func (f Family) String() string {
	if f == IPv4 {
		return "IPv4"
	}
	return "IPv6"
}

// FamilyOf returns the family of an address. An IPv4-mapped address is IPv6.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}
