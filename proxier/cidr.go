// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"

	netutils "k8s.io/utils/net"
)

// ParseAddr reads an address of a configuration as upstream does: numbers of IPv4
// may begin with zeros, which say nothing, and there are no zones.
func ParseAddr(text string) (netip.Addr, error) {
	a, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(text))
	if !ok {
		return a, fmt.Errorf("%q is no IP address", text)
	}
	return a.Unmap(), nil
}

// ParseCIDR reads a CIDR of a configuration, as ParseAddr does, and takes off the bits
// behind the prefix.
func ParseCIDR(text string) (netip.Prefix, error) {
	_, n, err := netutils.ParseCIDRSloppy(text)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is no CIDR", text)
	}
	a, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	if a.Is4In6() {
		return netip.Prefix{}, fmt.Errorf("%q is IPv4 inside of IPv6", text)
	}
	return netip.PrefixFrom(a, bits), nil
}
