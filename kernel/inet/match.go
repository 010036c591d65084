// SPDX-License-Identifier: Apache-2.0

package inet

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Match is a set of packets by protocol and destination. The zero Match is all packets.
type Match struct {
	// Not are the families that are not in it.
	Not [Families]bool
	// Protocol, or 0 for any.
	Protocol Protocol
	// Ports are destination ports; nil for any.
	Ports []PortRange
	// Destinations, or nil for any.
	Destinations []netip.Prefix
}

// PortRange is a range of ports, both ends included.
type PortRange struct{ First, Last uint16 }

func (r PortRange) String() string {
	if r.First == r.Last {
		return fmt.Sprint(r.First)
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// IsAll says that all packets are in it.
func (m *Match) IsAll() bool {
	return m.Not == [Families]bool{} && m.Protocol == 0 && m.Ports == nil && m.Destinations == nil
}

// Equal compares two, by the order of their ports and destinations too.
func (m *Match) Equal(o *Match) bool {
	return m.Not == o.Not && m.Protocol == o.Protocol && slices.Equal(m.Ports, o.Ports) && slices.Equal(m.Destinations, o.Destinations) &&
		(m.Ports == nil) == (o.Ports == nil) && (m.Destinations == nil) == (o.Destinations == nil)
}

// And returns what is in both; false if nothing is.
func (m Match) And(o Match) (Match, bool) {
	for f := range m.Not {
		m.Not[f] = m.Not[f] || o.Not[f]
	}
	switch {
	case m.Not[IPv4] && m.Not[IPv6], m.Protocol != 0 && o.Protocol != 0 && m.Protocol != o.Protocol:
		return Match{}, false
	case m.Protocol == 0:
		m.Protocol = o.Protocol
	}
	switch {
	case m.Ports == nil:
		m.Ports = o.Ports
	case o.Ports != nil:
		var both []PortRange
		for _, a := range m.Ports {
			for _, b := range o.Ports {
				if r := (PortRange{max(a.First, b.First), min(a.Last, b.Last)}); r.First <= r.Last {
					both = append(both, r)
				}
			}
		}
		if m.Ports = both; both == nil {
			return Match{}, false
		}
	}
	switch {
	case m.Destinations == nil:
		m.Destinations = o.Destinations
	case o.Destinations != nil:
		var both []netip.Prefix
		for _, a := range m.Destinations {
			for _, b := range o.Destinations {
				switch {
				case !a.Overlaps(b):
				case a.Bits() > b.Bits():
					both = append(both, a)
				default:
					both = append(both, b)
				}
			}
		}
		if m.Destinations = both; both == nil {
			return Match{}, false
		}
	}
	return m, true
}

// Has reports whether packets of a protocol to an address and port are in it.
func (m *Match) Has(to netip.AddrPort, protocol Protocol) bool {
	return m.HasPort(FamilyOf(to.Addr()), protocol, to.Port()) && m.Reaches(to.Addr())
}

// HasPort reports whether packets to a port are in it, at whatever address.
func (m *Match) HasPort(family Family, protocol Protocol, port uint16) bool {
	return !m.Not[family] && (m.Protocol == 0 || m.Protocol == protocol) &&
		(m.Ports == nil || slices.ContainsFunc(m.Ports, func(r PortRange) bool { return r.First <= port && port <= r.Last }))
}

// Reaches reports whether an address is among its destinations.
func (m *Match) Reaches(to netip.Addr) bool {
	return m.Destinations == nil || slices.ContainsFunc(m.Destinations, func(p netip.Prefix) bool { return p.Contains(to) })
}

// String is "IPv4 TCP ports 80,30000-30010 to 192.0.2.1/32", and "all packets" for those.
func (m Match) String() string {
	var words []string
	switch {
	case m.Not[IPv6]:
		words = append(words, IPv4.String())
	case m.Not[IPv4]:
		words = append(words, IPv6.String())
	}
	if m.Protocol != 0 {
		words = append(words, m.Protocol.String())
	}
	if m.Ports != nil {
		words = append(words, "ports "+join(m.Ports))
	}
	if m.Destinations != nil {
		words = append(words, "to "+join(m.Destinations))
	}
	if words == nil {
		return "all packets"
	}
	return strings.Join(words, " ")
}

func join[T fmt.Stringer](list []T) string {
	texts := make([]string, len(list))
	for i, item := range list {
		texts[i] = item.String()
	}
	return strings.Join(texts, ",")
}
